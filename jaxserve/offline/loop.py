"""The loop: feed the engine, step it, hand out what has ended.

Owns the pace of feeding, and the clean end after an interrupt. Refuses to know what a job or a result means.
"""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FrameType

from jaxserve.engine import AnyEngine
from jaxserve.errors import JaxserveError, QueueFull
from jaxserve.offline.jobs import Job
from jaxserve.offline.results import Counts, Gatherer, Result

FEED_PER_STEP = 64  # requests handed over before each step: the device starts early, however many wait to be encoded


def run_jobs(
    engine: AnyEngine,
    jobs: Iterable[Job | JaxserveError],
    on_result: Callable[[int, Result], None],
    on_step: Callable[[Counts], None] = lambda counts: None,
) -> None:
    """Runs every job; `on_result` gets the job's number and its result or error, in order of completion.

    `jobs` is read a little ahead of the engine, so it may be longer than memory or than the engine's queue. An error in
    place of a job is handed on. The engine must have no thread of its own. Whatever ends this early (an interrupt, an
    exception of a callback) first aborts what was running.
    """
    run = _Run(engine, jobs, on_result)
    with _interrupts_between_steps() as check_interrupt:
        try:
            while run.feed() or run.live:
                check_interrupt()
                run.step()
                on_step(run.counts)
        finally:
            run.settle()


class InOrder:
    """An `on_result` that passes results on in the order of the jobs, each as soon as those before it are there."""

    def __init__(self, emit: Callable[[int, Result], None]) -> None:
        self._emit = emit
        self._early: dict[int, Result] = {}
        self._next = 0

    def __call__(self, index: int, result: Result) -> None:
        self._early[index] = result
        while self._next in self._early:
            self._emit(self._next, self._early.pop(self._next))
            self._next += 1


class _Run:
    """The state of one `run_jobs`; mutated by it alone."""

    def __init__(
        self, engine: AnyEngine, jobs: Iterable[Job | JaxserveError], on_result: Callable[[int, Result], None]
    ) -> None:
        self.live: dict[str, Gatherer] = {}
        self.counts = Counts()
        self._engine = engine
        self._jobs = enumerate(jobs)
        self._held: tuple[int, Job] | None = None  # read from `jobs`, but the engine's queue was full
        self._on_result = on_result

    def feed(self) -> bool:
        """Hands over a bounded number of jobs. False when there are no more."""
        for _ in range(FEED_PER_STEP):
            if self._held is not None:
                index, job = self._held
            else:
                index, job = next(self._jobs, (0, None))
            if job is None:
                return False
            if isinstance(job, JaxserveError):
                self._end(index, job)
            elif not self._submit(index, job):
                break
        return True

    def _submit(self, index: int, job: Job) -> bool:
        gatherer = Gatherer(index, job, self._engine.tokenizer, self.counts)
        try:
            self._engine.submit(job.request, gatherer.take, echo=job.echo)
        except QueueFull:
            self._held = index, job
            return False
        self._held = None
        self.live[job.request.request_id] = gatherer
        self.counts.prompt_tokens += len(job.request.prompt_token_ids)
        return True

    def step(self) -> None:
        engine = self._engine
        try:
            worked = engine.step()
        except BaseException as error:  # a defect: the engine's state is unknown, so it must not be used again
            engine.fail(error)
            raise
        ended = [gatherer for gatherer in self.live.values() if gatherer.ended]
        assert worked or len(ended) == len(self.live), f"the engine is idle, but {sorted(self.live)} have not ended"
        for gatherer in ended:
            del self.live[gatherer.request_id]
            self._end(gatherer.index, gatherer.result())

    def _end(self, index: int, result: Result) -> None:
        self.counts.num_done += 1
        self._on_result(index, result)

    def settle(self) -> None:
        """Leaves the engine idle, the step that was launched ahead of the last token included."""
        if self._engine.failure is not None:
            return
        for request_id in self.live:
            self._engine.abort(request_id)
        self._engine.run_until_idle()
        self.live.clear()


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
