"""What an engine measures of its pressure, on a clock of the test."""

import pytest

from jaxserve.api import Known, RequestOptions, Resume, SamplingParams
from jaxserve.engine import Engine, ModelInfo, Update
from jaxserve.engine.degrading import DegradeOptions, Degrading, _StorePressure
from jaxserve.errors import QueueFull
from jaxserve.sched import create_scheduler
from jaxserve.sched.ladder import LadderOptions, Pressure, Rung
from jaxserve.testing import FakeRunner, ManualClock, make_limits

LONG = SamplingParams(temperature=0.0, max_tokens=50, detokenize=False)


class Parts:
    """An engine of one row that climbs a rung at each look."""

    def __init__(self, highest: Rung) -> None:
        limits = make_limits(max_rows=1)
        ladder = LadderOptions(highest=highest, up_s=0.0, down_s=0.0)
        self.clock = ManualClock(100.0)
        self.engine = Engine(
            runner=FakeRunner(limits),
            scheduler=create_scheduler("fcfs", limits, clock=self.clock),
            tokenizer=None,
            model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=()),
            clock=self.clock,
            observers=[Degrading(DegradeOptions(ladder, queue_s=2.0, step_s=0.5))],
        )

    def submit(self, **options) -> list[Update]:
        updates: list[Update] = []
        self.engine.submit(self.engine.prepare([1, 2], LONG, RequestOptions(**options)), updates.append)
        return updates

    def look(self, seconds: float) -> tuple[Rung, Pressure]:
        self.clock.advance(seconds)
        self.engine.step()
        return self.engine.stats[0].degraded


def test_a_wait_that_is_too_long_and_its_end() -> None:
    parts = Parts(Rung.REFUSE)
    parts.submit()
    assert parts.look(1.0) == (Rung.NONE, Pressure(queue=0.5)), "it has no token yet"
    for _ in range(3):
        parts.engine.step()
    assert parts.look(1.0) == (Rung.NONE, Pressure())
    parts.submit(request_id="waits")
    assert parts.look(1.0)[1].queue == 0.5
    assert [parts.look(2.0)[0] for _ in range(8)] == [*list(Rung)[1:7], Rung.REFUSE, Rung.REFUSE]
    with pytest.raises(QueueFull, match="overloaded, and 1 sequences wait") as caught:
        parts.submit()
    assert caught.value.retry_after_s == 18.0, "since the last one has begun"
    parts.submit(request_id="began elsewhere", resume=Resume(sequences=(Known((7,)),)))
    parts.engine.abort("waits")
    parts.engine.abort("began elsewhere")
    assert parts.look(1.0)[1].queue == 0.0
    parts.submit()  # nobody waits
    parts.engine.run_until_idle()
    for rung in reversed(list(Rung)[:5]):
        assert parts.look(1.0)[0] is rung


def test_steps_that_take_too_long() -> None:
    parts = Parts(Rung.SMALL_CHUNKS)
    dispatch = parts.engine._runner.dispatch

    def slowly(plan):
        parts.clock.advance(0.6)
        return dispatch(plan)

    parts.engine._runner.dispatch = slowly
    parts.submit()
    pressures = [parts.look(0.3) for _ in range(10)]
    assert pressures[-1][0] is Rung.SMALL_CHUNKS
    assert pressures[-1][1].steps == pytest.approx(1.2) and pressures[-1][1].queue == 0.0


def test_a_store_in_trouble() -> None:
    store = _StorePressure()
    assert store.look(0.0, {}) == 0.0
    assert store.look(1.0, {"failed": 4}) == 0.0, "a few say nothing yet"
    assert store.look(2.0, {"failed": 8, "prefetch_wasted": 90}) == 2.0
    assert store.look(3.0, {"failed": 12, "filled": 12}) == 0.5
    assert store.look(4.0, {"failed": 12, "filled": 12}) == 0.5
    assert store.look(8.1, {"failed": 12, "filled": 12}) == 0.0, "it has not been asked of late"
