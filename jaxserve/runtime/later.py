"""The background build of step shapes, while the engine already answers.

`build` decides which shapes can wait. The building thread never touches a runner: a finished shape waits until the loop
takes it between two steps. So a step never waits for a compile, and no plan can use a shape before the device has it.

A shape that cannot be built is no reason to stop: the others hold every plan, at the price of more padding. It is
logged as an error and counted in `BucketCounts.failed`, which the metrics show.
"""

import collections
import logging
import threading
from collections.abc import Callable, Mapping

from jaxserve.progress import plain_lines
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
        shown: bool = False,
    ) -> None:
        """Prepares; nothing is built before `start`.

        Args:
          limits: with the buckets that there are now.
          jobs: the step of each later bucket, in the order in which they are built.
          compiler: builds them; it must not be used elsewhere any more.
          check: raises when an executable must not be used.
          admit: gives the runner a bucket; called on the thread of `take`.
          shown: when the interpreter ends and waits for a compile, it says so.
        """
        self._limits = limits
        self._jobs = jobs
        self._compiler = compiler
        self._check = check
        self._admit = admit
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
        if self._shown:
            # It knows nothing but the event. With the last reference to an array, it would free that array while the
            # interpreter ends, which kills a daemon inside of JAX, and the process with it.
            threading.Thread(target=_tell_end, args=(self._done,), name=f"{THREAD_NAME}-end", daemon=True).start()

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

    def close(self) -> None:
        """Builds no further shape. One that is being compiled is finished: a compile cannot be interrupted."""
        self._closed.set()

    def _run(self) -> None:
        for bucket, job in self._jobs.items():
            # At its end the interpreter waits for this thread, and what it builds will not be used.
            if self._closed.is_set() or not threading.main_thread().is_alive():
                break
            self._build(bucket, job)
        self._done.set()

    def _build(self, bucket: Bucket, job: Job) -> None:
        try:
            compiled = self._compiler.build_one(job)
            self._check(compiled)
        except Exception as error:  # the boundary of the thread: serving goes on, and everybody can see why it is slow
            self._failed += 1
            self._pending -= 1
            logger.error("%s cannot be built, so its steps run in larger ones: %r", job.name, error)
            return
        self._finished.append((bucket, compiled))
        self._pending -= 1
        logger.info("%s is there, after %.2f s; %d more to come", job.name, compiled.seconds, self._pending)


def _tell_end(done: threading.Event) -> None:
    """Without a word, an interpreter that waits for a compile would look like one that hangs."""
    threading.main_thread().join()
    if done.wait(_PATIENCE_S):
        return
    lines = plain_lines()
    lines.begin("ending when the step that is being compiled is done: a compile cannot be interrupted")
    while not done.wait(_LOOK_S):
        lines.tick()
