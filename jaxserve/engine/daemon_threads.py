"""`DaemonThreads`: threads for work of several owners, which the end of the process does not wait for.

Work such as the encoding of a prompt may take minutes, and nothing can stop it. Python joins the threads of a
`ThreadPoolExecutor` before it ends, so one such call would hold a server that was told to end.
"""

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from jaxserve.engine.fair_queue import FairQueue

T = TypeVar("T")


class DaemonThreads:
    """Started as they are needed, each before it is, and kept. Any thread may submit.

    A thread that is free works for the owner that has fewest threads, then for the one that has waited longest. Once
    nobody has the object any more, its threads end as after `close`.
    """

    def __init__(self, name: str, count: int, *, spare: int = 0) -> None:
        """`count`: threads, which one owner alone may have all; `spare`: further ones, each for an owner that has none.
        `name`: of the threads, to which a number is added."""
        self._shared = _Shared(name, count, spare)
        weakref.finalize(self, self._shared.close).atexit = False

    def submit(self, owner: str, work: Callable[[], T]) -> "Future[T]":
        """The future result of `work`. If it is cancelled before a thread is free, the work is never begun.

        Raises RuntimeError after `close`.
        """
        call = _Call(owner, work)
        call.add_done_callback(self._shared.forget)
        self._shared.add(call)
        return call

    def close(self, *, cancel: bool = False, timeout_s: float = 0.0) -> None:
        """Lets the threads end once they have done what they were given, or, with `cancel`, what they have begun.

        Waits `timeout_s` seconds for that at most.
        """
        self._shared.close()
        if cancel:
            for call in self._shared.waiting():
                call.cancel()
        self._shared.wait_idle(timeout_s)


class _Call(Future[T], Generic[T]):
    """Work that waits for a thread, and its result."""

    def __init__(self, owner: str, work: Callable[[], T]) -> None:
        super().__init__()
        self.owner = owner
        self.work: Callable[[], T] | None = work


class _Shared:
    """What the threads and those who submit share. The threads know nothing else, so that they keep nothing alive."""

    def __init__(self, name: str, count: int, spare: int) -> None:
        self._name = name
        self._most = count + spare
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._idle = threading.Condition(lock)
        self._calls: FairQueue[str, _Call[Any]] = FairQueue(count, spare)
        self._num_threads = 0
        self._num_free = 0  # of these, those that do nothing, or are about to begin
        self._closed = False

    def add(self, call: _Call[Any]) -> None:
        with self._changed:
            if self._closed:
                raise RuntimeError(f"the threads of {self._name} were closed")
            self._calls.wait(call.owner, call)
            is_first = not self._num_threads
            self._changed.notify()
        if is_first:
            self._start_another()

    def forget(self, call: "Future[Any]") -> None:
        """A call that has ended does not wait, should it have been cancelled."""
        assert isinstance(call, _Call)
        if call.cancelled():
            with self._changed:
                self._calls.forget(call.owner, call)
            call.work = None

    def waiting(self) -> list[_Call[Any]]:
        with self._changed:
            return self._calls.waiting()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_idle(self, timeout_s: float) -> None:
        with self._idle:
            self._idle.wait_for(lambda: not self._calls and not self._calls.num_held, timeout_s)

    def _start_another(self) -> None:
        """Starts a thread, unless one is free or there are as many as there may be.

        The start of a thread waits until that has the interpreter, which takes tens of milliseconds where much is to
        do. So whoever submits waits for the first alone: each that begins to work sees to it that another is free.
        """
        with self._changed:
            if self._num_free or self._num_threads == self._most or (self._closed and not self._calls):
                return
            name = f"{self._name}-{self._num_threads}"
            self._num_threads += 1
            self._num_free += 1
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def _run(self) -> None:
        while (call := self._next()) is not None:
            self._start_another()
            owner = call.owner
            _do(call)
            del call  # its result is not kept until there is other work
            with self._changed:
                self._num_free += 1
                self._calls.leave(owner)
                if self._calls:
                    self._changed.notify()
                elif not self._calls.num_held:
                    self._idle.notify_all()

    def _next(self) -> _Call[Any] | None:
        """None: the thread ends."""
        with self._changed:
            while (given := self._calls.next()) is None:
                if self._closed and not self._calls:
                    self._num_free -= 1
                    self._changed.notify_all()  # the others end likewise
                    return None
                self._changed.wait()
            self._num_free -= 1
            return given[1]


def _do(call: _Call[T]) -> None:
    work, call.work = call.work, None
    if work is None or not call.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        call.set_exception(error)
        del call, work  # the traceback has this frame, and the call has the error: a cycle
    else:
        call.set_result(result)
