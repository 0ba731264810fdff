"""Ending the loop from outside: what another thread knows and the device does not."""

import threading

import pytest

from jaxserve.api import FinishReason, SamplingParams
from jaxserve.engine import Engine, ModelInfo, Update
from jaxserve.errors import EngineStopped, HostLost
from jaxserve.sched import create_scheduler
from jaxserve.testing import FakeRunner, make_limits

WAIT_S = 120.0
LOST = HostLost("process 1 (b) is lost")


def make_engine() -> Engine:
    limits = make_limits()
    return Engine(
        runner=FakeRunner(limits),
        scheduler=create_scheduler("fcfs", limits),
        tokenizer=None,
        model=ModelInfo(name="fake", vocab_size=256, max_model_len=64, eos_token_ids=()),
    )


def test_an_idle_loop_wakes_and_ends() -> None:
    engine = make_engine()
    engine.start()
    engine.interrupt(LOST)
    engine.stop()
    assert engine.failure is LOST
    with pytest.raises(EngineStopped, match="process 1"):
        engine.submit(engine.prepare([1], SamplingParams(detokenize=False)), lambda update: None)


def test_a_reason_without_a_text_is_named() -> None:
    engine = make_engine()
    engine.interrupt(AssertionError())
    with pytest.raises(AssertionError):
        engine.run_until_idle()
    with pytest.raises(EngineStopped, match=r"takes no more requests: AssertionError\(\)"):
        engine.submit(engine.prepare([1], SamplingParams(detokenize=False)), lambda update: None)


def test_streams_end_with_the_reason_itself() -> None:
    engine = make_engine()
    updates: list[Update] = []
    ended = threading.Event()

    def sink(update: Update) -> None:
        updates.append(update)
        if len(updates) == 1:
            engine.interrupt(LOST)
        if update.last:
            ended.set()

    engine.submit(engine.prepare([1], SamplingParams(max_tokens=50, detokenize=False)), sink)
    engine.start()
    assert ended.wait(WAIT_S)
    engine.stop()
    assert updates[-1].finish_reason is FinishReason.ERROR
    assert updates[-1].error is LOST
    assert len(updates) < 50


def test_a_loop_driven_by_hand_raises_it() -> None:
    engine = make_engine()
    engine.interrupt(LOST)
    with pytest.raises(HostLost):
        engine.run_until_idle()
    assert engine.failure is LOST
