"""Threads that owners share: whose work is next, what a cancel leaves, and that nothing is kept or waited for."""

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future

import pytest

from jaxserve.engine.daemon_threads import DaemonThreads
from jaxserve.engine.fair_queue import FairQueue

A, B, C = "a", "b", "c"
WAIT_S = 120.0  # for anything that must happen: far more than a busy machine takes


def wait_until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.005)


class Works:
    """Work that each waits until it may end. Tells who has begun, in order."""

    def __init__(self, threads: DaemonThreads) -> None:
        self.begun: list[str] = []
        self._threads = threads
        self._ends: dict[str, list[threading.Event]] = {}

    def submit(self, owner: str, times: int = 1) -> list["Future[str]"]:
        return [self._threads.submit(owner, lambda: self._work(owner)) for _ in range(times)]

    def end(self, owner: str) -> None:
        """Ends the first that runs of an owner."""
        self._ends[owner].pop(0).set()

    def end_all(self) -> None:
        for events in self._ends.values():
            for event in events:
                event.set()

    def wait_for(self, *owners: str) -> None:
        """Those that have begun, in any order of those that began together."""
        wait_until(lambda: len(self.begun) >= len(owners), f"{owners} begin")
        assert sorted(self.begun) == sorted(owners)

    def _work(self, owner: str) -> str:
        event = threading.Event()
        self._ends.setdefault(owner, []).append(event)
        self.begun.append(owner)
        assert event.wait(WAIT_S)
        return owner


@pytest.fixture
def works() -> Iterator[Works]:
    threads = DaemonThreads("test", 2, spare=1)
    made = Works(threads)
    yield made
    threads.close(cancel=True)
    made.end_all()


def test_one_alone_has_all_threads_but_the_spare_one_which_is_there_for_the_next(works: Works) -> None:
    works.submit(A, 8)
    works.wait_for(A, A)
    [first, _] = works.submit(B, 2)
    works.wait_for(A, A, B)
    works.end(B)
    assert first.result(WAIT_S) == B
    works.wait_for(A, A, B, B)
    works.submit(C)
    works.end(A)
    works.wait_for(A, A, B, B, C)
    [last] = works.submit(A)
    works.end(C)
    works.end(B)
    works.wait_for(A, A, B, B, C, A)  # which has one thread again, and the spare one is free
    works.submit(C)
    works.wait_for(A, A, B, B, C, A, C)
    assert not last.done()


def test_work_that_is_cancelled_before_its_turn_is_never_begun_nor_kept(works: Works) -> None:
    class Text:
        pass

    works.submit(A, 2)
    works.wait_for(A, A)
    text, seen = Text(), list[Text]()
    kept = weakref.ref(text)
    call = works._threads.submit(A, lambda text=text: seen.append(text))
    del text
    assert call.cancel()
    assert kept() is None, "what waits no more is not kept until a thread is free"
    [last] = works.submit(A)
    works.end(A)
    works.wait_for(A, A, A)
    assert not seen and not last.done()
    with pytest.raises(CancelledError):
        call.result(0)


def test_results_and_errors_arrive_and_are_not_kept() -> None:
    threads = DaemonThreads("test", 1)

    class Result:
        pass

    gc.collect()
    gc.disable()
    try:
        call = threads.submit("", Result)
        kept = weakref.ref(call.result(WAIT_S))
        del call
        wait_until(lambda: kept() is None, "the thread has let go of the result")

        class Broken(Exception):
            pass

        def fail() -> None:
            raise Broken

        call = threads.submit("", fail)
        failed = weakref.ref(call)
        assert isinstance(call.exception(WAIT_S), Broken)
        del call
        wait_until(lambda: failed() is None, "no cycle of the error and its call is left")
    finally:
        gc.enable()
    assert threads.submit("", lambda: 5).result(WAIT_S) == 5, "a thread outlives an error"
    threads.close()


def test_a_close_lets_what_was_given_end_and_takes_no_more(works: Works) -> None:
    threads = works._threads
    calls = works.submit(A, 5)
    works.wait_for(A, A)
    threads.close()
    with pytest.raises(RuntimeError, match="closed"):
        threads.submit(A, int)
    for count in range(5):
        wait_until(lambda count=count: len(works.begun) > count, "the next begins")
        works.end(A)
    assert [call.result(WAIT_S) for call in calls] == [A] * 5


def test_threads_end_with_a_close_and_with_the_object() -> None:
    def alive(name: str) -> int:
        return sum(thread.name.startswith(name) for thread in threading.enumerate())

    closed, dropped = DaemonThreads("test-closed", 3), DaemonThreads("test-dropped", 3)
    for threads in (closed, dropped):
        Works(threads)
        for call in [threads.submit("", int) for _ in range(6)]:
            call.result(WAIT_S)
    assert alive("test-closed") and alive("test-dropped")
    closed.close()
    del threads, dropped
    wait_until(lambda: not alive("test-closed") and not alive("test-dropped"), "all threads have ended")


def test_a_process_ends_while_its_threads_work() -> None:
    code = (
        "import threading\n"
        "from jaxserve.engine.daemon_threads import DaemonThreads\n"
        "threads, begun = DaemonThreads('test', 2), threading.Event()\n"
        "calls = [threads.submit('', lambda: (begun.set(), threading.Event().wait())) for _ in range(5)]\n"
        "begun.wait()\n"
        "threads.close(timeout_s=0.01)\n"
        "print('ends')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert ended.stdout == "ends\n" and not ended.stderr


def test_a_spare_place_is_for_owners_that_hold_none() -> None:
    queue: FairQueue[str, str] = FairQueue(2, spare=1)
    for thing in ("a1", "a2", "a3", "b1", "b2"):
        queue.wait(thing[0], thing)
    assert [queue.next() for _ in range(3)] == [("a", "a1"), ("b", "b1"), None]
    queue.wait("c", "c1")
    assert queue.next() == ("c", "c1") and queue.num_held == 3 and queue.next() is None
    queue.forget("a", "a2")
    queue.forget("a", "a2")
    queue.leave("c")
    assert queue.next() is None and queue.waiting() == ["a3", "b2"]
    queue.leave("b")
    assert queue.next() == ("b", "b2") and len(queue) == 1


def test_who_submits_waits_for_the_start_of_the_first_thread_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started_by: list[str] = []
    start = threading.Thread.start

    def noted(self: threading.Thread) -> None:
        started_by.append(threading.current_thread().name)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", noted)
    threads = DaemonThreads("test", 2, spare=1)
    works = Works(threads)
    works.submit(A, 3)
    works.wait_for(A, A)
    works.submit(B)
    works.wait_for(A, A, B)
    threads.close(cancel=True)
    works.end_all()
    assert started_by == [threading.current_thread().name, "test-0", "test-1"]
