"""Threads that share one `LLM`, on the fake device: they wait for each other, and one's error is nobody else's."""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from fake_parts import Fakes

from jaxserve import LLM, SamplingParams
from jaxserve.errors import EngineStopped, InvalidRequest
from jaxserve.offline.llm import RequestOutput
from jaxserve.sched import ContinuousScheduler

WAIT_S = 60
THREADS = 4
LONG = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Fakes:
    return Fakes().install(monkeypatch.setattr)


@pytest.fixture
def llm(fakes: Fakes) -> Iterator[LLM]:
    with LLM(served_model_name="fake", block_size=4) as llm:
        yield llm
        [engine] = llm._engine.replicas
        scheduler = engine._scheduler
        assert isinstance(scheduler, ContinuousScheduler)
        scheduler.check()
        assert engine.num_live == scheduler.num_held_pages == 0 and not scheduler.has_work()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(THREADS) as pool:
        yield pool


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def ask(llm: LLM, prompts: list[str], params: SamplingParams = LONG) -> list[str]:
    return texts(llm.generate(prompts, params, use_tqdm=False))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def in_step(llm: LLM) -> tuple[threading.Event, Callable[[], None]]:
    """An event for a step that has begun, and what lets it, and all after it, go on."""
    step, begun, going = llm._engine.step, threading.Event(), threading.Event()

    def waiting() -> bool:
        begun.set()
        assert going.wait(WAIT_S)
        return step()

    llm._engine.step = waiting  # type: ignore[method-assign]
    return begun, going.set


def test_four_threads_have_the_answers_of_one(llm: LLM, pool: ThreadPoolExecutor) -> None:
    batches = [[f"{chr(97 + thread)}{number}" for number in range(7)] for thread in range(THREADS)]
    wanted = [ask(llm, batch) for batch in batches]
    start = threading.Barrier(THREADS)

    def many(batch: list[str]) -> list[list[str]]:
        start.wait(WAIT_S)
        return [ask(llm, batch) for _ in range(5)]

    for answers, right in zip(pool.map(many, batches, timeout=WAIT_S), wanted, strict=True):
        assert answers == [right] * 5


def test_every_kind_of_call_at_once(llm: LLM, pool: ThreadPoolExecutor) -> None:
    hi = [{"role": "user", "content": "hi"}]
    calls: list[Callable[[], Any]] = [
        lambda: ask(llm, ["a", "b", "c"]),
        lambda: texts(llm.chat([hi] * 3, LONG, use_tqdm=False)),
        lambda: "".join(update.text for update in llm.stream("xyz", LONG)),
        lambda: [output.outputs.embedding for output in llm.embed(["a", "bc"], use_tqdm=False)],
    ]
    wanted = [call() for call in calls]
    start = threading.Barrier(THREADS)

    def many(call: Callable[[], Any]) -> list[Any]:
        start.wait(WAIT_S)
        return [call() for _ in range(5)]

    for answers, right in zip(pool.map(many, calls, timeout=WAIT_S), wanted, strict=True):
        assert answers == [right] * 5


def test_the_prompts_of_threads_share_steps(llm: LLM, fakes: Fakes, pool: ThreadPoolExecutor) -> None:
    begun, go = in_step(llm)
    first = pool.submit(ask, llm, ["a"])
    assert begun.wait(WAIT_S)
    second = pool.submit(ask, llm, ["b"])
    wait_until(lambda: llm._engine.load.num_waiting == 2)  # the second thread submits without a turn
    go()
    assert first.result(WAIT_S) and second.result(WAIT_S)
    assert fakes.runner is not None
    assert len(fakes.runner.plans) < 60, "one after the other they would need 80"


def test_an_error_of_one_thread_is_its_own(llm: LLM, pool: ThreadPoolExecutor) -> None:
    wanted = ask(llm, ["abc"] * 5)

    def bad() -> None:
        for _ in range(10):
            with pytest.raises(InvalidRequest):
                llm.generate([[256, 97], [259]], LONG, use_tqdm=False)
            for _ in llm.stream("abc", LONG):
                break

    futures = [pool.submit(bad), pool.submit(bad)]
    answers = [pool.submit(ask, llm, ["abc"] * 5) for _ in range(6)]
    assert [answer.result(WAIT_S) for answer in answers] == [wanted] * 6
    for future in futures:
        future.result(WAIT_S)


def test_a_step_that_fails_ends_the_calls_of_all(fakes: Fakes, pool: ThreadPoolExecutor) -> None:
    fakes.fail_at = (30, "dispatch")
    llm = LLM(served_model_name="fake", block_size=4)
    futures = [pool.submit(ask, llm, ["abc"] * 20) for _ in range(THREADS)]
    failures = [future.exception(WAIT_S) for future in futures]
    assert all(failures)
    assert sum(isinstance(failure, EngineStopped) for failure in failures) == THREADS - 1, "the other one has the cause"
    llm.close()


def test_an_interrupt_ends_the_call_of_the_main_thread_alone(llm: LLM, pool: ThreadPoolExecutor) -> None:
    wanted, step, presses = ask(llm, ["abc"] * 8), llm._engine.step, iter([None])

    def interrupted() -> bool:
        if llm._engine.num_live > 40 and next(presses, "no more") is None:  # the main thread is in its call
            signal.raise_signal(signal.SIGINT)  # reaches the main thread, whoever has the turn
        return step()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    llm._engine.step = interrupted  # type: ignore[method-assign]
    try:
        others = [pool.submit(ask, llm, ["abc"] * 8) for _ in range(3)]
        with pytest.raises(KeyboardInterrupt):
            ask(llm, ["xyz"] * 60)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [other.result(WAIT_S) for other in others] == [wanted] * 3
    llm._engine.step = step  # type: ignore[method-assign]
    assert ask(llm, ["abc"] * 8) == wanted


def test_a_stream_that_is_held_keeps_nobody_waiting(llm: LLM, pool: ThreadPoolExecutor) -> None:
    [whole] = ask(llm, ["abc"])
    stream = llm.stream("abc", LONG)
    begun = next(stream).text
    assert ask(llm, ["abc"]) == [whole], "the same thread"
    assert pool.submit(ask, llm, ["abc"]).result(WAIT_S) == [whole]
    assert begun + "".join(update.text for update in stream) == whole


def test_a_stream_may_be_read_by_another_thread(llm: LLM, pool: ThreadPoolExecutor) -> None:
    [whole] = ask(llm, ["abc"])
    stream = llm.stream("abc", LONG)
    begun = next(stream).text
    assert begun + pool.submit(lambda: "".join(u.text for u in stream)).result(WAIT_S) == whole


def test_a_stream_that_is_collected_inside_of_a_step(llm: LLM) -> None:
    """Python ends a generator that only a cycle holds wherever it collects: there may be a step under way."""
    [whole] = ask(llm, ["abc"])
    stream, step = llm.stream("abc", LONG), llm._engine.step
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle

    def collecting() -> bool:
        llm._engine.step = step  # type: ignore[method-assign]
        worked = step()
        gc.collect()
        return worked

    llm._engine.step = collecting  # type: ignore[method-assign]
    assert ask(llm, ["abc"]) == [whole]
    assert llm._engine.num_live == 0


def test_close_waits_for_the_calls_of_others(fakes: Fakes, pool: ThreadPoolExecutor) -> None:
    llm = LLM(served_model_name="fake", block_size=4)
    [whole] = ask(llm, ["abc"])
    begun, go = in_step(llm)
    call = pool.submit(ask, llm, ["abc"])
    assert begun.wait(WAIT_S)
    closing = pool.submit(llm.close)
    wait_until(lambda: llm._turns._is_alone)
    late = pool.submit(ask, llm, ["abc"])
    assert not closing.done() and not late.done()
    go()
    assert call.result(WAIT_S) == [whole]
    closing.result(WAIT_S)
    assert isinstance(late.exception(WAIT_S), EngineStopped)
    llm.close()


@pytest.mark.parametrize("name", ["generate", "chat", "stream", "embed", "score", "sleep", "wake_up", "update_weights"])
def test_calls_after_close(fakes: Fakes, name: str) -> None:
    arguments: dict[str, Any] = {
        "generate": ["a"], "chat": [[]], "stream": ["a"], "embed": ["a"], "score": ["a", "b"],
        "update_weights": ["x"],
    }  # fmt: skip
    options = {"version": "2"} if name == "update_weights" else {}
    llm = LLM(served_model_name="fake", block_size=4)
    held = llm.stream("abc", LONG)
    next(held)
    llm.close()
    with pytest.raises(EngineStopped, match="was closed"):
        getattr(llm, name)(*arguments.get(name, []), **options)
    assert [update.finish_reason for update in held][-1] == "abort"


def test_two_threads_close(fakes: Fakes, pool: ThreadPoolExecutor) -> None:
    llm = LLM(served_model_name="fake", block_size=4)
    futures: list[Future[None]] = [pool.submit(llm.close) for _ in range(THREADS)]
    for future in futures:
        future.result(WAIT_S)
