"""Ahead-of-time compilation: every executable is built at start, in parallel, and reported.

Executables that can wait for the engine to run are built by `later`. Tracing and lowering are Python and run on one
thread, since several would only take the interpreter lock from each other; XLA releases it, so that its part runs on
all cores meanwhile.
"""

import contextlib
import dataclasses
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax

from jaxserve.config.schema import RuntimeConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime.store import ExecutableStore, Stored

logger = logging.getLogger(__name__)

_DEFAULT_CACHE = RuntimeConfig().compile_cache or ""
_STACK_BYTES = 64 * 2**20  # of a thread that compiles: XLA's passes over a deep model recurse further than 8 MiB


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One executable to build: `fn` with abstract `args`; `donate` are the argument numbers it consumes.

    `options`: XLA flags of this executable (`xla_flags`). `out_shardings` as for `jax.jit`; None leaves them to the
    compiler.
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    options: Mapping[str, bool | str]
    out_shardings: Any = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One executable with its cost. Bytes are per device. `stored`: it was read from a disk, not compiled."""

    name: str
    call: jax.stages.Compiled
    seconds: float
    stored: bool
    temporary_bytes: int
    code_bytes: int


# Called after each executable: number done, number of all, name of the newest.
OnCompiled = Callable[[int, int, Compiled], None]


def make_cache_directory(directory: str | None) -> Path | None:
    """The directory where executables outlive the process; None when the default cannot be used.

    Raises ConfigError when a directory named in the config cannot be made.
    """
    if directory is None:
        return None
    path = Path(directory)
    try:
        path = path.expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # a read-only file system, or no home directory
        if str(path) == os.path.expanduser(_DEFAULT_CACHE):
            logger.warning(
                "%s cannot be made, so each start compiles all anew: %s; name another runtime.compile_cache",
                path,
                error,
            )
            return None
        raise ConfigError(
            f"runtime.compile_cache {directory!r} cannot be made: {error}; name another directory, or null for none"
        ) from error
    return path


def use_compile_cache(path: Path) -> None:
    """Has JAX keep all it compiles from now on in this directory."""
    jax.config.update("jax_compilation_cache_dir", str(path))
    # Small CPU executables are worth keeping too: start-up is a sum of many.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def num_threads(asked: int | None, backend: str) -> int | None:
    """How many executables are compiled at once: as asked, else one for each core, but on a TPU one alone, since libtpu
    (0.0.42) ends now and then in a segmentation fault when two threads compile; it has threads of its own."""
    return 1 if asked is None and backend == "tpu" else asked


def compile_all(
    jobs: Sequence[Job], threads: int | None, progress: OnCompiled, mesh: jax.sharding.Mesh | None = None
) -> Mapping[str, Compiled]:
    """Builds all jobs; raises the first failure, since no executable is optional.

    `mesh` is needed for devices that are not here: its abstract form tells Pallas what it lowers for.
    """
    return build_replicas([Compiler(mesh, None)], [jobs], threads, progress)[0]


def build_replicas(
    compilers: Sequence["Compiler"],
    jobs: Sequence[Sequence[Job]],
    threads: int | None,
    progress: OnCompiled,
    *,
    ahead: Sequence[Job] = (),
) -> list[Mapping[str, Compiled]]:
    """The executables of each compiler, one for a replica, for its `jobs`: the same ones, on its devices.

    The first traces, lowers and compiles; as soon as an executable is there, the others find it in the store that they
    share. Raises the first failure. While XLA is busy, those of `ahead` are lowered for the first, and kept.
    """
    results: list[dict[str, Compiled]] = [{} for _ in compilers]
    pool = ThreadPoolExecutor(threads or os.cpu_count(), thread_name_prefix="jaxserve-compile")
    first, *others = compilers
    stack_before = threading.stack_size(_STACK_BYTES)
    try:
        futures: dict[Future[Compiled], int] = {}
        made: list[Future[Compiled]] = []
        for job in jobs[0]:
            first.lower(job)
            made.append(pool.submit(first.build_one, job))
            futures[made[-1]] = 0
        # Last come, first served: the largest is at the front, and its executable comes last. None of these can keep a
        # thread from what it waits for, since all of that has been begun by then.
        for i in reversed(range(len(made))):
            for number, other in enumerate(others, start=1):
                futures[pool.submit(_build_after, made[i], other, jobs[number][i])] = number
        for job in ahead:
            if all(future.done() for future in futures):
                break
            first.lower(job)
        for done, future in enumerate(as_completed(futures), start=1):
            compiled = future.result()
            results[futures[future]][compiled.name] = compiled
            progress(done, len(futures), compiled)
    finally:
        threading.stack_size(stack_before)
        pool.shutdown(cancel_futures=True)
    return [*results]


def _build_after(first: Future[Compiled], compiler: "Compiler", job: Job) -> Compiled:
    first.result()
    return compiler.build_one(job)


class Compiler:
    """Builds the jobs of one mesh: reads them from `store` where it has them, else compiles and stores them.

    Threads may use it at once, each for jobs of its own.
    """

    def __init__(self, mesh: jax.sharding.Mesh | None, store: ExecutableStore | None) -> None:
        self._mesh = mesh
        self._store = store
        self._hits = None if store is None else _cache_hits()
        self._lowered: dict[str, _Lowered] = {}

    def lower(self, job: Job) -> None:
        """Does the part of a job before XLA's; `build_one` goes on from there."""
        if self._store is None or not self._store.holds(job.name):
            self._lowered[job.name] = self._trace(job)

    def build_one(self, job: Job) -> Compiled:
        """The executable of a job, for the devices of the mesh."""
        if self._store is None:
            return self._compile(job)
        if (found := self.load(job)) is not None:
            return found
        with self._store.building(job.name):  # of several replicas that lack it, one compiles, the others wait for it
            return self.load(job) or self._compile(job)

    def load(self, job: Job) -> Compiled | None:
        """The executable of a job where the store has it; it is not compiled."""
        start = time.perf_counter()
        found = None if self._store is None or not self._store.holds(job.name) else self._store.load(job.name)
        return None if found is None else self._describe(job, found, time.perf_counter() - start, stored=True)

    def _trace(self, job: Job) -> "_Lowered":
        start = time.perf_counter()

        # A function that JAX has not seen: for one that it has, it would return an executable that this process has got
        # before, be it from its cache on disk, and tell of no hit.
        @functools.wraps(job.fn)
        def fn(*args: Any) -> Any:
            return job.fn(*args)

        with self._context():
            jitted = jax.jit(fn, donate_argnums=job.donate, out_shardings=job.out_shardings)
            return _Lowered(jitted.lower(*job.args), time.perf_counter() - start)

    def _compile(self, job: Job) -> Compiled:
        lowered = self._lowered.pop(job.name, None) or self._trace(job)
        start = time.perf_counter()
        program = ""
        if self._store is not None:
            program = _program_of(job, lowered.program)
            if (found := self._store.load_same(job.name, program)) is not None:
                seconds = lowered.seconds + time.perf_counter() - start
                return self._describe(job, found, seconds, stored=True)
        hits = 0 if self._hits is None else self._hits.count
        with self._context():
            call = lowered.program.compile(compiler_options={**job.options})
        memory = call.memory_analysis()
        built = Stored(
            call=call,
            temporary_bytes=memory.temp_size_in_bytes if memory is not None else 0,
            code_bytes=memory.generated_code_size_in_bytes if memory is not None else 0,
        )
        seconds = lowered.seconds + time.perf_counter() - start
        # XLA:CPU cannot write an executable again that it has read from JAX's cache: the file would lack its functions.
        if self._store is not None and self._hits is not None and self._hits.count == hits:
            self._store.save(job.name, built, program)
        return self._describe(job, built, seconds, stored=False)

    def _describe(self, job: Job, built: Stored, seconds: float, *, stored: bool) -> Compiled:
        return Compiled(
            name=job.name,
            call=built.call,
            seconds=seconds,
            stored=stored,
            temporary_bytes=built.temporary_bytes,
            code_bytes=built.code_bytes,
        )

    def _context(self) -> contextlib.AbstractContextManager[Any]:
        if self._mesh is None:
            return contextlib.nullcontext()
        return jax.sharding.use_abstract_mesh(self._mesh.abstract_mesh)


def _program_of(job: Job, lowered: jax.stages.Lowered) -> str:
    """All that the executable follows from: the program, flags, and the form of what it is called with and returns."""
    return "\0".join(
        [lowered.as_text(), repr(sorted(job.options.items())), repr(lowered.in_tree), repr(lowered.out_tree)]
    )


class _CacheHits:
    """Hits of each thread in JAX's own cache, which the user may have turned on, as JAX reports them."""

    def __init__(self) -> None:
        self._local = threading.local()
        jax.monitoring.register_event_listener(self)

    def __call__(self, event: str, **details: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self._local.count = self.count + 1

    @property
    def count(self) -> int:
        """Hits of the calling thread."""
        return getattr(self._local, "count", 0)


@functools.cache  # one for all models of the process: JAX keeps every listener
def _cache_hits() -> _CacheHits:
    return _CacheHits()


@dataclasses.dataclass(frozen=True, slots=True)
class _Lowered:
    """`seconds` that lowering took."""

    program: jax.stages.Lowered
    seconds: float


def report_lines(compiled: Mapping[str, Compiled]) -> list[str]:
    """A table of the executables: seconds and megabytes of each, and how many an earlier start had compiled."""
    lines = [f"{'executable':<24}{'seconds':>9}{'temporaries':>14}{'code':>10}"]
    for item in sorted(compiled.values(), key=lambda c: c.name):
        temporaries, code = item.temporary_bytes / 2**20, item.code_bytes / 2**20
        stored = "  stored" if item.stored else ""
        lines.append(f"{item.name:<24}{item.seconds:9.2f}{temporaries:11.1f} MiB{code:6.1f} MiB{stored}")
    return lines
