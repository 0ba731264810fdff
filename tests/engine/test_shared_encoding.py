"""Prompts that wait to be encoded, of several owners: whose is next, who is refused, and that nothing is left."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from group_parts import GREEDY, WAIT_S, Group

from jaxserve.api import RequestOptions
from jaxserve.engine import AsyncEngine, Engine, EngineGroup, ModelInfo
from jaxserve.errors import QueueFull
from jaxserve.sched import create_scheduler
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits


def make_engine(max_waiting: int) -> Engine:
    limits = make_limits()
    return Engine(
        runner=FakeRunner(limits),
        scheduler=create_scheduler("fcfs", limits),
        tokenizer=ByteTokenizer(),
        model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=(255,)),
        max_waiting=max_waiting,
    )


class Blocked:
    """Long work of one owner, on the threads of streams."""

    def __init__(self, streams: AsyncEngine[Engine] | AsyncEngine[EngineGroup]) -> None:
        self._streams = streams
        self._go_on = threading.Event()
        self.num_begun = 0
        self.tasks: list[asyncio.Task[None]] = []

    def _work(self) -> None:
        self.num_begun += 1
        assert self._go_on.wait(WAIT_S)

    async def begin(self, owner: str, times: int = 1, *, prompts: int = 0, n: int = 1) -> None:
        for _ in range(times):
            run = self._streams.run(self._work, prompts=prompts, n=n, owner=owner)
            self.tasks.append(asyncio.create_task(run))
        await asyncio.sleep(0)  # each has been accepted, or refused

    async def until_begun(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while self.num_begun < count:
                await asyncio.sleep(0.005)

    async def end(self) -> None:
        self._go_on.set()
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest_asyncio.fixture
async def blocked() -> AsyncIterator[Blocked]:
    streams = AsyncEngine(make_engine(max_waiting=8), encode_threads=2)
    made = Blocked(streams)
    yield made
    await made.end()
    assert not streams._pending.by_owner and not streams._pending.total
    streams.close()


async def test_long_work_of_one_owner_holds_up_no_other(blocked: Blocked) -> None:
    await blocked.begin("a", 8)
    await blocked.until_begun(2)
    for _ in range(5):
        async with asyncio.timeout(WAIT_S):
            assert await blocked._streams.run(lambda: "at once", owner="b") == "at once"
    assert blocked.num_begun == 2, "one owner has no more threads than the setting says"


async def test_work_whose_caller_has_left_is_never_begun(blocked: Blocked) -> None:
    await blocked.begin("a", 6)
    await blocked.until_begun(2)
    for task in blocked.tasks[1:6]:  # of one of them the work has begun
        task.cancel()
    await asyncio.wait(blocked.tasks[1:6])
    assert blocked._streams._pending.by_owner == {"a": 1}
    await blocked.begin("a")
    await blocked.end()
    assert blocked.num_begun == 3


async def test_prompts_that_wait_to_be_encoded_are_shared_as_the_queue_is(blocked: Blocked) -> None:
    streams = blocked._streams
    await blocked.begin("a", 2, prompts=2, n=2)
    with pytest.raises(
        QueueFull, match="8 sequences are waiting, 8 of them yours, and 1 more .*sched.max_waiting is 8,"
    ):
        await streams.run(int, prompts=1, owner="a")
    with pytest.raises(QueueFull, match="8 prompts wait to be encoded, 8 of them yours, .*sched.max_waiting is 8,"):
        await streams.run(int, owner="a")
    with pytest.raises(QueueFull, match="8 sequences are waiting, 0 of them yours, and 2 more are asked for"):
        await streams.run(int, prompts=2, owner="b")
    async with asyncio.timeout(WAIT_S):
        assert await streams.run(int, prompts=1, owner="b") == await streams.run(int, owner="c") == 0


async def test_what_waits_in_the_queue_and_what_is_encoded_count_together(blocked: Blocked) -> None:
    streams = blocked._streams
    for _ in range(2):
        sampling = dataclasses.replace(GREEDY, n=3)
        streams.engine.submit(streams.engine.prepare([1, 2], sampling, RequestOptions(owner="a")), lambda update: None)
    await blocked.begin("b", prompts=2)
    with pytest.raises(QueueFull, match="8 sequences are waiting, 6 of them yours, and 1 more"):
        await streams.run(int, prompts=1, owner="a")
    with pytest.raises(QueueFull, match="8 sequences are waiting, 2 of them yours, and 1 more"):
        await streams.run(int, prompts=1, owner="b")
    assert await streams.run(int, prompts=1, owner="c") == 0
    streams.engine.run_until_idle()
    assert await streams.run(int, prompts=6, owner="a") == 0


async def test_replicas_share_what_is_encoded() -> None:
    group = Group(2, max_waiting=4).group
    blocked = Blocked(AsyncEngine(group))
    await blocked.begin("a", prompts=8)
    with pytest.raises(QueueFull, match="4 sequences are waiting, 4 of them yours, and 1 more"):
        await blocked._streams.run(int, prompts=2, owner="a")
    assert await blocked._streams.run(int, prompts=1, owner="b") == 0
    await blocked.end()
    assert await blocked._streams.run(int, prompts=8, owner="b") == 0
    blocked._streams.close()
