"""The loop of a batch: feed the engine, step it, hand out results; with a clean end after an interrupt."""

import collections
import contextlib
import signal
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from types import FrameType
from typing import Generic, TypeVar

from jaxserve.api import Request
from jaxserve.engine import AnyEngine, Update
from jaxserve.errors import JaxserveError, QueueFull
from jaxserve.offline.jobs import Job
from jaxserve.offline.results import Counts, Gatherer, Result
from jaxserve.offline.turns import Turns

_T = TypeVar("_T")

FEED_PER_STEP = 64  # requests handed over before each step: the device starts early, however many wait to be encoded


def run_jobs(
    engine: AnyEngine,
    jobs: Iterable[Job | JaxserveError],
    on_result: Callable[[int, Result], None],
    on_step: Callable[[Counts], None] = lambda counts: None,
    turns: Turns | None = None,
) -> None:
    """Runs every job; `on_result` gets the job's number and its result or error, in order of completion.

    `jobs` is read a little ahead of the engine, so it may be longer than memory or than the engine's queue. An error in
    place of a job is passed on. The engine must have no thread of its own. An early end (an interrupt, an
    exception of a callback) first aborts the running requests. `turns`: of an engine that other threads drive, too.
    """
    turns = Turns(engine) if turns is None else turns
    counts = Counts()
    live: dict[str, Gatherer] = {}
    ended: collections.deque[Gatherer] = collections.deque()  # by the steps of any thread
    numbered = enumerate(jobs)
    held: tuple[int, Job | JaxserveError] | None = None  # read from `jobs`, but the engine's queue was full
    done = False  # `jobs` is read to its end
    with _interrupts_between_steps() as check_interrupt:
        try:
            while True:
                for _ in range(FEED_PER_STEP):
                    index, job = held or next(numbered, (0, None))
                    held = None
                    if job is None:
                        done = True
                        break
                    if isinstance(job, JaxserveError):
                        counts.num_done += 1
                        on_result(index, job)
                        continue
                    gatherer = Gatherer(index, job, engine.tokenizer, counts, ended.append)
                    try:
                        engine.submit(job.request, gatherer.take)
                    except QueueFull:
                        held = index, job
                        break
                    live[gatherer.request_id] = gatherer
                    counts.prompt_tokens += len(job.request.prompt_token_ids)
                if done and not live:
                    return
                check_interrupt()
                worked = turns.step(lambda: len(ended) > 0)
                assert worked or len(ended) == len(live), f"the engine is idle, but {sorted(live)} have not ended"
                while ended:
                    gatherer = ended.popleft()
                    del live[gatherer.request_id]
                    counts.num_done += 1
                    on_result(gatherer.index, gatherer.result())
                on_step(counts)
        finally:
            if engine.failure is None:
                for request_id in live:
                    engine.abort(request_id)
                turns.finish(lambda: len(ended) == len(live))


def stream_updates(turns: Turns, request: Request) -> Generator[Update, None, None]:
    """The updates of one request, each as soon as the engine has it; the engine works while the next one is waited for.

    The engine must have no thread of its own. Requests of other calls go on meanwhile. Leaving the generator, or an
    interrupt, aborts the request. Raises QueueFull, and the error with which the request ends.
    """
    engine = turns.engine
    updates: collections.deque[Update] = collections.deque()
    ended = False

    def take(update: Update) -> None:
        nonlocal ended
        ended = ended or update.last
        updates.append(update)

    with turns.call():
        engine.submit(request, take)
    try:
        while updates or not ended:
            if updates:
                update = updates.popleft()
                if update.error is not None:
                    raise update.error
                yield update
                continue
            with turns.call(), _interrupts_between_steps() as check_interrupt:
                worked = turns.step(lambda: len(updates) > 0)
                check_interrupt()
            assert worked or ended, f"the engine is idle, but {request.request_id} has not ended"
    finally:
        if engine.failure is None:
            engine.abort(request.request_id)  # of one that has ended, nothing
            with _interrupts_between_steps():  # one more is as if it had come with the first
                turns.finish(lambda: ended)


class InOrder(Generic[_T]):
    """Passes results on in the order of their jobs, each as soon as those before it are there."""

    def __init__(self, emit: Callable[[int, _T], None]) -> None:
        self._emit = emit
        self._early: dict[int, _T] = {}
        self._next = 0

    def __call__(self, index: int, result: _T) -> None:
        self._early[index] = result
        while self._next in self._early:
            self._emit(self._next, self._early.pop(self._next))
            self._next += 1


@contextlib.contextmanager
def _interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """Holds Ctrl-C back until the yielded function is called; the second one takes effect at once.

    Python allows signal handlers in the main thread only; elsewhere an interrupt cannot arrive either.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    previous = signal.getsignal(signal.SIGINT)
    if previous in (signal.SIG_IGN, None):  # started in the background of a script, or not Python's to handle
        yield lambda: None
        return
    pending = False

    def hold(number: int, frame: FrameType | None) -> None:
        nonlocal pending
        pending = True
        signal.signal(signal.SIGINT, previous)

    def check() -> None:
        if pending:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, hold)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, previous)
