"""When tokens reach their clients: after the next launch, once a turn, and before an end that comes from elsewhere."""

import asyncio
import dataclasses

import pytest

from jaxserve.api import FinishReason, RequestOptions, SamplingParams
from jaxserve.engine import AsyncEngine, Engine, ModelInfo, Update
from jaxserve.errors import PromptTooLong
from jaxserve.sched import ContinuousScheduler, create_scheduler
from jaxserve.testing import ByteTokenizer, FakeRunner, make_limits


class Told(FakeRunner):
    """Notes launches and reads among what else is noted."""

    def __init__(self, order: list[str], **options) -> None:
        super().__init__(make_limits(num_pages=64), vocab_size=ByteTokenizer.vocab_size, **options)
        self.order = order

    def dispatch(self, plan):
        self.order.append(f"launch {plan.step_id}")
        flight = super().dispatch(plan)
        order = self.order

        class Read:
            def result(self):
                order.append(f"read {plan.step_id}")
                return flight.result()

        return Read()


class Parts:
    def __init__(self, **options) -> None:
        self.order: list[str] = []
        self.runner = Told(self.order, **options)
        scheduler = create_scheduler("fcfs", self.runner.limits)
        assert isinstance(scheduler, ContinuousScheduler)
        self.scheduler = scheduler
        self.engine = Engine(
            runner=self.runner,
            scheduler=scheduler,
            tokenizer=ByteTokenizer(),
            model=ModelInfo(name="fake", vocab_size=259, max_model_len=64, eos_token_ids=(257,)),
        )
        self.updates: list[Update] = []

    def submit(self, prompt: str, sampling: SamplingParams, **options):
        request = self.engine.prepare(prompt, sampling, RequestOptions(**options))
        self.engine.submit(request, self.take)
        return request

    def take(self, update: Update) -> None:
        self.updates.append(update)
        self.order.append(f"told {update.text or update.finish_reason}")


def greedy(max_tokens: int, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **options)


def test_tokens_are_told_after_the_next_launch_and_at_once_when_there_is_none() -> None:
    parts = Parts()
    parts.submit("a", greedy(3))
    parts.engine.run_until_idle()
    assert parts.order == [
        *("launch 0", "launch 1", "read 0", "launch 2", "told b"),
        *("read 1", "told c", "read 2", "told d"),
    ]  # fmt: skip


def test_a_stop_string_is_seen_before_the_next_plan() -> None:
    """So it wastes one token as a stop id does, not two, and other requests do not wait for it."""
    parts = Parts()
    parts.submit("a", greedy(20, stop=["d"]), request_id="stops")
    parts.submit("m", greedy(6), request_id="goes on")
    parts.engine.run_until_idle()
    fed = [plan.step_id for plan in parts.runner.plans if len(plan.decode_rows) == 2]
    assert fed == [1, 2, 3], "two tokens that count, and the one in flight"
    ends = {u.request_id: (u.finish_reason, u.stop_reason) for u in parts.updates if u.last}
    assert ends == {"stops": (FinishReason.STOP, "d"), "goes on": (FinishReason.LENGTH, None)}
    assert "".join(u.text for u in parts.updates if u.request_id == "stops") == "bc"
    assert parts.scheduler.num_held_pages == parts.engine.num_live == 0


@pytest.mark.parametrize("stop", [None, ["zz"]])
def test_what_was_drawn_before_an_abort_is_told_before_its_end(stop) -> None:
    parts = Parts()
    request = parts.submit("a", greedy(20, stop=stop))
    for _ in range(4):
        parts.engine.step()
    committed = parts.runner.num_steps - 1
    parts.engine.abort(request)
    parts.engine.run_until_idle()
    assert [u.token_ids for u in parts.updates[:-1]] == [(98 + i,) for i in range(committed)]
    assert parts.updates[-1].last and parts.updates[-1].finish_reason is FinishReason.ABORT
    assert parts.scheduler.num_held_pages == 0


@pytest.mark.parametrize("where", ["dispatch", "result"])
def test_what_was_drawn_before_the_device_failed_is_told(where) -> None:
    parts = Parts(fail_at=(3, where))
    parts.submit("a", greedy(20))
    with pytest.raises(RuntimeError, match="injected"):
        parts.engine.run_until_idle()
    told = {"dispatch": 2, "result": 3}[where]  # step 2 is in flight when the launch of step 3 fails
    assert [u.token_ids for u in parts.updates[:-1]] == [(98 + i,) for i in range(told)]
    assert parts.updates[-1].last and parts.updates[-1].error is not None


def test_a_sink_that_breaks_on_the_last_word_leaves_the_next_of_its_name_alone() -> None:
    parts = Parts()

    def broken(update: Update) -> None:
        if update.last and update.error is None:
            again = parts.engine.prepare("m", greedy(2), RequestOptions(request_id="name"))
            parts.engine.submit(again, parts.take)
            raise ValueError("broken")

    parts.engine.submit(parts.engine.prepare("a", greedy(9, stop=["c"]), RequestOptions(request_id="name")), broken)
    parts.engine.run_until_idle()
    assert "".join(u.text for u in parts.updates) == "no" and parts.updates[-1].last


async def test_a_turn_wakes_the_event_loop_once_for_all_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts()
    streams = AsyncEngine(parts.engine)
    loop = asyncio.get_running_loop()
    wakes = []
    call_soon = loop.call_soon_threadsafe

    def counted(callback, *args, **options):
        wakes.append(parts.runner.num_steps)
        return call_soon(callback, *args, **options)

    async def read(first: str) -> str:
        request = parts.engine.prepare(first, greedy(6))
        return "".join([update.text async for update in streams.stream(request)])

    reading = [asyncio.create_task(read(first)) for first in "aeim"]
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
    parts.engine.run_until_idle()
    assert await asyncio.gather(*reading) == ["bcdefg", "fghijk", "jklmno", "nopqrs"]
    assert len(wakes) <= parts.runner.num_steps + 1 < 24, "the last turn has two: of the tokens before, and its own"
    streams.close()
    parts.engine.run_until_idle()
    assert not parts.engine._live.on_delivered, "who has closed is not called any more"


def test_streams_of_a_closed_event_loop_are_aborted() -> None:
    parts = Parts()
    streams = AsyncEngine(parts.engine)
    loop = asyncio.new_event_loop()
    stream = streams.stream(parts.engine.prepare("a", greedy(40)))
    first = loop.create_task(anext(stream))
    loop.call_later(0.01, loop.stop)
    loop.run_forever()
    first.cancel()
    loop.close()
    parts.engine.run_until_idle()
    assert parts.engine.num_live == parts.scheduler.num_held_pages == 0
    assert parts.runner.num_steps < 10, "it did not run to its end for nobody"
    streams.close()


async def test_a_stream_of_several_requests_ends_with_the_last_of_them() -> None:
    parts = Parts()
    streams = AsyncEngine(parts.engine)
    requests = [
        parts.engine.prepare(first, greedy(count), RequestOptions(request_id=first))
        for first, count in (("a", 2), ("m", 4))
    ]
    texts = {"a": "", "m": ""}
    parts.engine.start()
    async for update in streams.stream(*requests):
        texts[update.request_id] += update.text
    assert texts == {"a": "bc", "m": "nopq"}
    parts.engine.stop()
    streams.close()


@pytest.mark.parametrize("how", ["left", "refused"])
async def test_a_stream_that_ends_early_aborts_all_its_requests(how: str) -> None:
    """Also when one of them is refused, as a request that could never run is."""
    parts = Parts()
    streams = AsyncEngine(parts.engine)
    requests = [parts.engine.prepare(first, greedy(40)) for first in "ae"]
    if how == "refused":
        requests.append(dataclasses.replace(requests[0], request_id="huge", prompt_token_ids=(1,) * 1000))
    stream = streams.stream(*requests)
    first = asyncio.create_task(anext(stream))
    await asyncio.sleep(0)
    for _ in range(3):
        parts.engine.step()
    if how == "left":
        assert (await first).text == "b"
    else:
        with pytest.raises(PromptTooLong):
            await first
    await stream.aclose()
    parts.engine.run_until_idle()
    assert parts.engine.num_live == parts.scheduler.num_held_pages == 0
    assert parts.runner.num_steps < 10, "they did not run to their ends"
    streams.close()
