"""The background build of step shapes, while the engine already answers.

`build` decides which shapes can wait. The thread here never touches a runner: a finished shape waits until the loop
takes it between two steps. So a step never waits for a compile, and no plan can use a shape before the device has it.

On a CPU another process compiles (`apart`), and the thread only reads what is in the store then. Where there is none,
the thread compiles itself: then a program that ends waits for the shape that is being compiled.

A shape that cannot be built is no reason to stop: the others hold every plan, at the price of more padding. It is
logged as an error and counted in `BucketCounts.failed`, which the metrics show.
"""

import collections
import functools
import logging
import threading
from collections.abc import Callable, Mapping

from jaxserve.progress import plain_lines
from jaxserve.runtime.apart import StepFailed, StepsApart, Unavailable
from jaxserve.runtime.compile import Compiled, Compiler, Job
from jaxserve.sched.base import BucketCounts
from jaxserve.sched.plan import Bucket, Limits

logger = logging.getLogger(__name__)

THREAD_NAME = "jaxserve-later"
_PATIENCE_S = 1.0  # for which nobody asks why a program does not end
_LOOK_S = 0.5


class BackgroundBuckets:
    """A `sched.base.LaterBuckets`. `take` is the loop's; the rest may be used from any thread."""

    def __init__(
        self,
        *,
        limits: Limits,
        jobs: Mapping[Bucket, Job],
        compiler: Compiler,
        check: Callable[[Compiled], None],
        admit: Callable[[Bucket, Compiled], Limits],
        apart: StepsApart | None = None,
        shown: bool = False,
    ) -> None:
        """Prepares; nothing is built before `start`.

        Args:
          limits: with the buckets that there are now.
          jobs: the step of each later bucket, in the order in which they are built.
          compiler: builds them, or reads what `apart` has built; it must not be used elsewhere any more.
          check: raises when an executable must not be used.
          admit: gives the runner a bucket; called on the thread of `take`.
          apart: compiles; None: the thread does.
          shown: when the interpreter ends and waits for a compile, it says so.
        """
        self._limits = limits
        self._jobs = jobs
        self._compiler = compiler
        self._check = check
        self._admit = admit
        self._apart = apart
        self._user = object()  # for `apart`, which is to know nothing that holds an array
        self._shown = shown
        self._finished: collections.deque[tuple[Bucket, Compiled]] = collections.deque()
        self._pending = len(jobs)
        self._failed = 0
        self._closed = threading.Event()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def all_limits(self) -> Limits:
        """The limits once every bucket is there."""
        return self._limits.with_buckets((*self._limits.buckets, *self._jobs))

    @property
    def counts(self) -> BucketCounts:
        ready = len(self._limits.buckets) + len(self._jobs) - self._pending - self._failed
        return BucketCounts(ready=ready, pending=self._pending, failed=self._failed)

    def start(self) -> None:
        """Begins to build. Not a daemon: an interpreter that ends in the middle of a compile would crash."""
        assert self._thread is None, "started twice"
        self._thread = threading.Thread(target=self._run, name=THREAD_NAME)
        self._thread.start()
        if self._apart is not None or self._shown:
            # It knows nothing that holds an array. With the last reference to one, it would free that array while the
            # interpreter ends, which kills a daemon inside of JAX, and the process with it.
            end = None if self._apart is None else functools.partial(self._apart.end, self._user)
            args = (end, self._done, self._shown)
            threading.Thread(target=_at_end, args=args, name=f"{THREAD_NAME}-end", daemon=True).start()

    def take(self) -> Limits | None:
        """Gives the finished buckets to the runner. Returns its new limits, None when nothing has changed."""
        if not self._finished:
            return None
        limits = None
        while self._finished:
            limits = self._admit(*self._finished.popleft())
        return limits

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until no bucket is left to build. False on a timeout. The loop still has to `take`."""
        return self._done.wait(timeout_s)

    def note_work(self, working: bool) -> None:
        """Steps are in flight, or no longer: another process that compiles gives way to them."""
        if self._apart is not None:
            self._apart.note_work(self._user, working)

    def close(self) -> None:
        """Builds no further shape, and ends another process that does. In this one a shape that is being compiled is
        finished: a compile cannot be interrupted."""
        self._closed.set()
        if self._apart is not None:
            self._apart.end(self._user)

    @property
    def _ends(self) -> bool:
        """Whether nobody will use what is built. At its end the interpreter waits for the thread."""
        return self._closed.is_set() or not threading.main_thread().is_alive()

    def _run(self) -> None:
        waiting = dict(self._jobs)
        if self._apart is not None:
            self._read_all(waiting, self._apart)
        for bucket, job in waiting.items():
            if self._ends:
                break
            self._build(bucket, job)
        self._done.set()

    def _read_all(self, waiting: dict[Bucket, Job], apart: StepsApart) -> None:
        """Takes out of `waiting` all that the store has, now or once the other process has built it, and what fails
        there."""
        for bucket, job in [*waiting.items()]:
            if not self._ends and self._read(bucket, job, None):
                del waiting[bucket]
        if not waiting or self._ends:
            return
        apart.begin(self._user, [job.name for job in waiting.values()])
        if self._ends:  # since: whoever ends it may not have seen it
            apart.end(self._user)
        try:
            for bucket, job in [*waiting.items()]:
                try:
                    seconds = apart.wait(job.name)
                except StepFailed as error:
                    self._give_up(job, str(error))
                    del waiting[bucket]
                    continue
                if not self._read(bucket, job, seconds):
                    raise Unavailable(f"{job.name}, which it has built, cannot be read from the store")
                del waiting[bucket]
        except Unavailable as error:
            if not self._ends:
                logger.warning(
                    "the process that compiles step shapes beside this one is of no use, so a thread compiles %s: %s",
                    ", ".join(job.name for job in waiting.values()),
                    error,
                )
        finally:
            apart.end(self._user)

    def _read(self, bucket: Bucket, job: Job, seconds: float | None) -> bool:
        """Whether the store has the step. `seconds` that it took to compile; None: an earlier start did."""
        compiled = self._compiler.load(job)
        if compiled is None:
            return False
        self._finish(bucket, job, compiled, compiled.seconds if seconds is None else seconds)
        return True

    def _finish(self, bucket: Bucket, job: Job, compiled: Compiled, seconds: float) -> None:
        try:
            self._check(compiled)
        except Exception as error:  # as in `_build`
            self._give_up(job, repr(error))
            return
        self._finished.append((bucket, compiled))
        self._pending -= 1
        logger.info("%s is there, after %.2f s; %d more to come", job.name, seconds, self._pending)

    def _give_up(self, job: Job, error: str) -> None:
        self._failed += 1
        self._pending -= 1
        logger.error("%s cannot be built, so its steps run in larger ones: %s", job.name, error)

    def _build(self, bucket: Bucket, job: Job) -> None:
        try:
            compiled = self._compiler.build_one(job)
        except Exception as error:  # the boundary of the thread: serving goes on, and everybody can see why it is slow
            self._give_up(job, repr(error))
            return
        self._finish(bucket, job, compiled, compiled.seconds)


def _at_end(end: Callable[[], None] | None, done: threading.Event, shown: bool) -> None:
    """When the interpreter ends, ends the other process, for which it would wait. It waits for a compile all the same:
    without a word it would look like one that hangs."""
    threading.main_thread().join()
    if end is not None:
        end()
    if not shown or done.wait(_PATIENCE_S):
        return
    lines = plain_lines()
    lines.begin("ending when the step that is being compiled is done: a compile cannot be interrupted")
    while not done.wait(_LOOK_S):
        lines.tick()
