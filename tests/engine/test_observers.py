"""What the loop tells its observers, in which order, and what it makes of one that fails."""

import math
from collections.abc import Callable

import pytest

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine, ModelInfo
from jaxserve.engine.observers import EndedStep, StepObserver, WatchedLoop
from jaxserve.sched import create_scheduler
from jaxserve.sched.plan import StepPlan
from jaxserve.testing import FakeRunner, ManualClock, make_limits, make_request


class Everything(StepObserver):
    """Writes down each call."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.ended: list[EndedStep] = []

    def watch(self, loop: WatchedLoop) -> None:
        self.loop = loop

    def begin_turn(self, now_s: float) -> None:
        self.told.append("turn")

    def allowed_s(self, planned: StepPlan | None, running: StepPlan | None) -> float:
        self.told.append(f"{'-' if planned is None else planned.step_id} {'-' if running is None else running.step_id}")
        return 7.0

    def begin_work(self) -> None:
        self.told.append("work")

    def end_work(self) -> None:
        self.told.append("idle")

    def rest(self) -> None:
        self.told.append("rest")

    def note(self, step: EndedStep) -> None:
        self.told.append(f"ended {step.plan.step_id}")
        self.ended.append(step)

    def close(self) -> None:
        self.told.append("closed")


class Short(StepObserver):
    """Allows less than the other; has nothing else."""

    def allowed_s(self, planned: StepPlan | None, running: StepPlan | None) -> float:
        return 3.0 if planned is not None else math.inf


def engine_with(*observers: StepObserver, clock: Callable[[], float] | None = None) -> Engine:
    runner = FakeRunner(make_limits())
    return Engine(
        runner=runner,
        scheduler=create_scheduler("fcfs", runner.limits),
        tokenizer=None,
        model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=()),
        clock=clock or ManualClock(5.0),
        observers=observers,
    )


def submit(engine: Engine) -> list:
    updates: list = []
    sampling = SamplingParams(temperature=0.0, max_tokens=2, detokenize=False)
    engine.submit(make_request("r", [1, 2, 3], 2, sampling=sampling), updates.append)
    return updates


def test_an_observer_is_told_of_each_turn_step_and_end() -> None:
    observer = Everything()
    engine = engine_with(observer, Short())
    assert engine.has_deadlines and engine.allowed_s == 7.0, "nothing is planned"
    observer.told.clear()
    updates = submit(engine)
    engine.step()
    assert engine.allowed_s == 3.0, "the least of all"
    engine.run_until_idle()
    assert updates[-1].last and observer.loop.stats is engine.stats[0]
    engine.stop()
    first, *others = observer.told
    assert first == "work"
    assert [told for told in others if told.startswith("ended")] == ["ended 0", "ended 1"]
    assert others[:3] == ["turn", "0 -", "rest"], "the launch of the first step"
    assert others[3:6] == ["turn", "1 0", "rest"], "of the second, while the first runs"
    assert others.count("idle") == 1 and others[-1] == "closed"
    assert [step.result.token_ids for step in observer.ended] == [[t] for u in updates for t in u.token_ids]
    assert [step.limits for step in observer.ended] == [engine._runner.limits] * 2


def test_without_observers_nothing_has_a_deadline() -> None:
    engine = engine_with()
    assert engine.allowed_s == math.inf and not engine.has_deadlines


def test_an_observer_that_fails_ends_the_loop_and_no_request_hangs() -> None:
    class Broken(StepObserver):
        def note(self, step: EndedStep) -> None:
            raise RuntimeError("of the observer")

    engine = engine_with(Broken())
    updates = submit(engine)
    with pytest.raises(RuntimeError, match="of the observer"):
        engine.run_until_idle()
    assert updates[-1].last and updates[-1].error is not None
