"""The execution of plans, and of what has a place among them, on two threads of their own, so that no other thread
hangs together with a device.

When a process dies, the collectives of the others may wait for it for ever inside of the device's runtime, where Python
cannot interrupt them. So callers wait for a future, which an error can end at any time.

One thread dispatches, the other reads: a step must be launched while the one before still runs.
"""

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any, NamedTuple

from jaxserve.hosts.digest import StepDigest
from jaxserve.sched import InFlight, Runner, StepPlan, StepResult


class _Planned(NamedTuple):
    seq: int
    plan: StepPlan
    future: "Future[StepResult]"


class _Call(NamedTuple):
    work: Callable[[], None]
    future: "Future[None]"


class _Running(NamedTuple):
    seq: int
    handle: InFlight
    inputs: bytes
    future: "Future[StepResult]"


class Execution:
    """Runs plans and calls in their order. `submit` and `close` belong to one thread, `call` and `fail` to any.

    Args:
      runner: used by these threads alone from now on.
      digest: `digest.observe` must see all that `runner` sends to its device.
      on_digest: called with each finished step and the digest up to it, on the reading thread.
      patience_s: when the device fails, how long to wait for `fail` to give the reason: a lost process breaks the
        device's connections too, often before it is known to be lost.
    """

    def __init__(
        self,
        runner: Runner,
        digest: StepDigest,
        on_digest: Callable[[int, bytes], None],
        *,
        patience_s: float,
    ) -> None:
        self._runner = runner
        self._digest = digest
        self._on_digest = on_digest
        self._patience_s = patience_s
        self._planned: queue.SimpleQueue[_Planned | _Call | None] = queue.SimpleQueue()
        self._running: queue.SimpleQueue[_Running | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._open: set[Future[StepResult] | Future[None]] = set()
        self._failure: BaseException | None = None
        self._failed = threading.Event()
        self._threads = [
            threading.Thread(target=work, name=f"jaxserve-{name}", daemon=True)
            for name, work in (("dispatch", self._dispatch_all), ("read", self._read_all))
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, seq: int, plan: StepPlan) -> "Future[StepResult]":
        """Queues a plan and returns at once. Errors of `dispatch` arrive in the future, too."""
        future: Future[StepResult] = Future()
        if self._begin(future):
            self._planned.put(_Planned(seq, plan, future))
        return future

    def call(self, work: Callable[[], None]) -> "Future[None]":
        """Queues `work`, which must return at once, for the thread that dispatches: behind the plans so far."""
        future: Future[None] = Future()
        if self._begin(future):
            self._planned.put(_Call(work, future))
        return future

    def fail(self, error: BaseException) -> None:
        """Ends every future, those of later `submit`s included, with `error`. The first call counts."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = error
            ended, self._open = self._open, set()
        self._failed.set()
        for future in ended:
            _end(future, error)

    def close(self, timeout_s: float) -> bool:
        """Finishes the submitted plans. True when that was in time; False leaves the threads to their device."""
        self._planned.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _begin(self, future: "Future[StepResult] | Future[None]") -> bool:
        with self._lock:
            if self._failure is None:
                self._open.add(future)
                return True
            failure = self._failure
        future.set_exception(failure)
        return False

    def _dispatch_all(self) -> None:
        while (item := self._planned.get()) is not None:
            if self._failed.is_set():
                continue
            try:
                if isinstance(item, _Call):
                    item.work()
                    self._end_well(item.future, None)
                    continue
                handle = self._runner.dispatch(item.plan)
            except BaseException as error:  # the boundary of the thread; the waiting callers get the error
                self._give_up(item.future, error)
                continue
            self._running.put(_Running(item.seq, handle, self._digest.take_inputs(), item.future))
        self._running.put(None)

    def _read_all(self) -> None:
        while (item := self._running.get()) is not None:
            if self._failed.is_set():
                continue
            try:
                result = item.handle.result()
                self._on_digest(item.seq, self._digest.chain(item.seq, item.inputs, result))
            except BaseException as error:
                self._give_up(item.future, error)
                continue
            self._end_well(item.future, result)

    def _end_well(self, future: "Future[Any]", result: StepResult | None) -> None:
        with self._lock:
            self._open.discard(future)
        with contextlib.suppress(InvalidStateError):  # `fail` came first
            future.set_result(result)

    def _give_up(self, future: "Future[Any]", error: BaseException) -> None:
        self._failed.wait(self._patience_s)
        _end(future, error)
        self.fail(error)


def _end(future: "Future[Any]", error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):
        future.set_exception(error)
