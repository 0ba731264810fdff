"""The interpreter while there is work and after it, and where somebody else has decided about it."""

import gc
import sys
from collections.abc import Iterator

import pytest

from jaxserve.api import SamplingParams
from jaxserve.engine import Engine, ModelInfo
from jaxserve.engine.interpreter import Interpreter
from jaxserve.sched import create_scheduler
from jaxserve.testing import FakeRunner, make_limits, make_request


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    gc.unfreeze()  # what CPython 3.12 begins with
    before = gc.isenabled(), sys.getswitchinterval()
    yield
    assert (gc.isenabled(), sys.getswitchinterval()) == before and gc.get_freeze_count() == 0, "left changed"


class Cycle:
    """Goes only when it is collected."""

    def __init__(self) -> None:
        self.me = self


def engine_with(interpreter: Interpreter, **options) -> Engine:
    runner = FakeRunner(make_limits(), **options)
    return Engine(
        runner=runner,
        scheduler=create_scheduler("fcfs", runner.limits),
        tokenizer=None,
        model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=()),
        observers=[interpreter],
    )


def submit(engine: Engine, seen: list, name: str = "r") -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, detokenize=False)
    request = make_request(name, [1, 2, 3], 8, sampling=sampling)
    engine.submit(request, lambda update: seen.append((gc.isenabled(), gc.get_freeze_count() > 0)))


@pytest.mark.slow
def test_off_while_there_is_work_and_on_again_after_it() -> None:
    engine, seen = engine_with(Interpreter()), []
    submit(engine, seen)
    engine.run_until_idle()
    assert seen == [(False, True)] * 8
    assert gc.isenabled() and gc.get_freeze_count() == 0
    submit(engine, seen, "again")
    engine.step()
    assert not gc.isenabled()
    engine.stop()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_on_again_after_a_failure() -> None:
    engine, seen = engine_with(Interpreter(), fail_at=(3, "result")), []
    submit(engine, seen)
    with pytest.raises(RuntimeError, match="injected"):
        engine.run_until_idle()
    assert gc.isenabled() and gc.get_freeze_count() == 0


def test_loops_share_it() -> None:
    interpreter = Interpreter()
    interpreter.begin_work()
    interpreter.begin_work()
    interpreter.end_work()
    assert not gc.isenabled()
    interpreter.end_work()
    assert gc.isenabled()
    with pytest.raises(AssertionError, match="more loops"):
        interpreter.end_work()


def test_a_rest_collects_what_is_due_by_pythons_own_thresholds() -> None:
    interpreter = Interpreter()
    before = gc.get_threshold()
    try:
        gc.set_threshold(500, 3, 3)
        interpreter.begin_work()
        interpreter.rest()
        kept = [[] for _ in range(100)]
        interpreter.rest()
        assert interpreter.num_collections == 0, "nothing is due"
        cycles = [Cycle() for _ in range(1000)]
        interpreter.rest()
        assert interpreter.num_collections == 1
        del cycles
        for _ in range(5):  # they are of an older generation by now
            kept += [[] for _ in range(600)]
            interpreter.rest()
        assert not any(type(one) is Cycle for one in gc.get_objects())
        assert interpreter.total_s >= interpreter.longest_s > 0
    finally:
        interpreter.end_work()
        gc.set_threshold(*before)


def test_who_turned_it_off_or_froze_objects_decides() -> None:
    interpreter = Interpreter()
    gc.disable()
    try:
        interpreter.begin_work()
        assert gc.get_freeze_count() == 0
        cycles = [Cycle() for _ in range(5000)]
        interpreter.rest()
        assert interpreter.num_collections == 0
        del cycles
        interpreter.end_work()
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.freeze()
    try:
        interpreter.begin_work()
        interpreter.end_work()
        assert gc.get_freeze_count() > 0, "they are not ours to thaw"
    finally:
        gc.unfreeze()


def test_threads_switch_sooner_while_there_is_work() -> None:
    interpreter, before_s = Interpreter(), sys.getswitchinterval()
    interpreter.begin_work()
    assert sys.getswitchinterval() < before_s
    interpreter.end_work()
    assert sys.getswitchinterval() == before_s
    sys.setswitchinterval(1e-4)
    try:
        chosen_s = sys.getswitchinterval()
        interpreter.begin_work()
        assert sys.getswitchinterval() == chosen_s, "who wants it sooner still has decided"
        interpreter.end_work()
        assert sys.getswitchinterval() == chosen_s
    finally:
        sys.setswitchinterval(before_s)
