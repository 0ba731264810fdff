"""`LargeReads`: in turns of their owners, one message of each at a time, with rests between them, and off the loop."""

import asyncio
import threading

import pytest
from serve_parts import wait_until

from jaxserve.engine.interpreter import process_interpreter
from jaxserve.serve.large_reads import LargeReads


def test_one_message_of_an_owner_is_read_at_a_time_and_others_do_not_wait_for_them() -> None:
    released, order = threading.Event(), list[str]()

    def held(name: str) -> str:
        order.append(f"{name} begins")
        assert released.wait(60)
        order.append(f"{name} ends")
        return name

    def told(name: str) -> str:
        order.append(name)
        return name

    async def read() -> list[str]:
        reads = LargeReads()
        mine = [asyncio.ensure_future(reads.run("mine", lambda n=n: held(n))) for n in ("first", "second")]
        while not order:
            await asyncio.sleep(0)
        theirs = await reads.run("theirs", lambda: told("theirs"))
        released.set()
        found = [theirs, *await asyncio.gather(*mine)]
        reads.close()
        return found

    assert asyncio.run(read()) == ["theirs", "first", "second"]
    assert order == ["first begins", "theirs", "first ends", "second begins", "second ends"]


def test_a_thread_rests_before_the_next_message_for_as_long_as_the_last_one_took() -> None:
    now_s, rests = [100.0], list[float]()

    def read(seconds: float) -> None:
        now_s[0] += seconds

    def rest(seconds: float) -> None:
        rests.append(round(seconds, 6))
        now_s[0] += seconds

    async def read_all() -> None:
        reads = LargeReads(clock=lambda: now_s[0], sleep=rest)
        for seconds in (0.03, 0.05, 7.0, 0.0):
            await reads.run("mine", lambda seconds=seconds: read(seconds))
        now_s[0] += 0.05
        await reads.run("mine", lambda: None)
        reads.close()

    asyncio.run(read_all())
    assert rests == [0.03, 0.05, 0.2]  # none is longer than the most


@pytest.mark.parametrize("closed", [False, True])
def test_memory_of_large_messages_is_given_back_when_no_more_come(closed: bool) -> None:
    given_back = list[str]()

    def give_back() -> None:
        given_back.append(threading.current_thread().name)

    async def read() -> None:
        reads = LargeReads(give_back=give_back, give_back_s=0.0)
        await reads.run("mine", lambda: None)
        if not closed:
            while not given_back:
                await asyncio.sleep(0)
        reads.close()
        for _ in range(5):
            await asyncio.sleep(0)

    asyncio.run(read())
    assert bool(given_back) is not closed
    assert all(name.startswith("jaxserve-large") for name in given_back)


def test_what_is_cancelled_while_it_waits_is_never_read_and_errors_come_to_the_caller() -> None:
    released, done = threading.Event(), list[str]()

    def fail() -> None:
        raise ValueError("no message")

    async def read() -> None:
        reads = LargeReads()
        first = asyncio.ensure_future(reads.run("mine", lambda: released.wait(60)))
        second = asyncio.ensure_future(reads.run("mine", lambda: done.append("second")))
        await asyncio.sleep(0)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        released.set()
        assert await first
        with pytest.raises(ValueError, match="no message"):
            await reads.run("mine", fail)
        reads.close()

    asyncio.run(read())
    assert done == []
    wait_until(lambda: process_interpreter()._num_busy == 0, "the interpreter has its own settings again")
