"""Ahead-of-time compilation: every executable is built at start, in parallel, and reported.

Owns the compile pool, the persistent cache setting and the report. Refuses to run anything, and to know which
executables can wait (`later`). Tracing and lowering are Python and run on one thread, since several would only take
the interpreter lock from each other; XLA releases it, so that its part runs on all cores meanwhile.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import ConfigError
from jaxserve.runtime.store import ExecutableStore, Stored


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


# Called after each executable: how many are done, of how many, and the newest.
Progress = Callable[[int, int, Compiled], None]


def make_cache_directory(directory: str | None) -> Path | None:
    """Where executables outlive the process; None: nowhere. Raises ConfigError when it cannot be made."""
    if directory is None:
        return None
    try:
        path = Path(directory).expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # a read-only file system, or no home directory
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


def compile_all(
    jobs: Sequence[Job], threads: int | None, progress: Progress, mesh: jax.sharding.Mesh | None = None
) -> Mapping[str, Compiled]:
    """Builds all jobs; raises the first failure, naming nothing lost: no executable is optional.

    `mesh` is needed for devices that are not here: its abstract form tells Pallas what it lowers for.
    """
    return Compiler(mesh, None).build(jobs, threads, progress)


class Compiler:
    """Builds the jobs of one mesh: out of `store` where that has them, else with XLA, and then `store` has them.

    One thread at a time may call its methods.
    """

    def __init__(self, mesh: jax.sharding.Mesh | None, store: ExecutableStore | None) -> None:
        self._mesh = mesh
        self._store = store
        self._hits = None if store is None else _CacheHits()
        self._lowered: dict[str, _Lowered] = {}

    def build(
        self, jobs: Sequence[Job], threads: int | None, progress: Progress, *, ahead: Sequence[Job] = ()
    ) -> Mapping[str, Compiled]:
        """All `jobs`, or the first failure. While XLA is busy with them, those of `ahead` are lowered, and kept."""
        results: dict[str, Compiled] = {}
        futures: list[Future[Compiled]] = []
        pool = ThreadPoolExecutor(threads or os.cpu_count(), thread_name_prefix="jaxserve-compile")
        try:
            futures += [pool.submit(self._finish, job, self._lower(job)) for job in jobs]
            for job in ahead:
                if all(future.done() for future in futures):
                    break
                self._lowered[job.name] = self._lower(job)
            for future in as_completed(futures):
                compiled = future.result()
                results[compiled.name] = compiled
                progress(len(results), len(jobs), compiled)
        finally:
            pool.shutdown(cancel_futures=True)
        return results

    def build_one(self, job: Job) -> Compiled:
        """One more, on this thread."""
        return self._finish(job, self._lowered.pop(job.name, None) or self._lower(job))

    def _lower(self, job: Job) -> "_Lowered":
        """What XLA is to compile; None in its place where the store has the outcome."""
        start = time.perf_counter()
        if self._store is not None and self._store.holds(job.name):
            return _Lowered(None, 0.0)
        with self._context():
            jitted = jax.jit(job.fn, donate_argnums=job.donate, out_shardings=job.out_shardings)
            return _Lowered(jitted.lower(*job.args), time.perf_counter() - start)

    def _finish(self, job: Job, lowered: "_Lowered") -> Compiled:
        start = time.perf_counter()
        if lowered.program is None:
            assert self._store is not None, job.name
            found = self._store.load(job.name)
            if found is not None:
                return self._describe(job, found, time.perf_counter() - start, stored=True)
            with self._context():
                jitted = jax.jit(job.fn, donate_argnums=job.donate, out_shardings=job.out_shardings)
                lowered = _Lowered(jitted.lower(*job.args), 0.0)
        assert lowered.program is not None, job.name
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
        # What XLA:CPU has read from JAX's cache it cannot write again: the file would lack its functions.
        if self._store is not None and self._hits is not None and self._hits.count == hits:
            self._store.save(job.name, built)
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


class _CacheHits:
    """How often each thread found an executable in JAX's own cache, which the user may have turned on. JAX tells."""

    def __init__(self) -> None:
        self._local = threading.local()
        jax.monitoring.register_event_listener(self)

    def __call__(self, event: str, **details: str | int) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            self._local.count = self.count + 1

    @property
    def count(self) -> int:
        """Of the thread that asks."""
        return getattr(self._local, "count", 0)


@dataclasses.dataclass(frozen=True, slots=True)
class _Lowered:
    """`program` None: the store holds its executable. `seconds` that lowering took."""

    program: jax.stages.Lowered | None
    seconds: float


def report_lines(compiled: Mapping[str, Compiled]) -> list[str]:
    """A table of what was built: seconds and megabytes per executable, and what an earlier start had compiled."""
    lines = [f"{'executable':<24}{'seconds':>9}{'temporaries':>14}{'code':>10}"]
    for item in sorted(compiled.values(), key=lambda c: c.name):
        temporaries, code = item.temporary_bytes / 2**20, item.code_bytes / 2**20
        stored = "  stored" if item.stored else ""
        lines.append(f"{item.name:<24}{item.seconds:9.2f}{temporaries:11.1f} MiB{code:6.1f} MiB{stored}")
    return lines
