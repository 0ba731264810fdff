"""Ahead-of-time compilation: every executable is built at start, in parallel, and reported.

Owns the compile pool, the persistent cache setting and the report. Refuses to run anything. XLA releases the
interpreter lock while it compiles, so threads give real parallelism.
"""

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax

from jaxserve.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One executable to build: `fn` with abstract `args`; `donate` are the argument numbers it consumes.

    `options`: XLA flags of this executable (`xla_flags`).
    """

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    donate: tuple[int, ...]
    options: Mapping[str, bool | str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """One executable with its cost. Bytes are per device."""

    name: str
    call: jax.stages.Compiled
    seconds: float
    temporary_bytes: int
    code_bytes: int


# Called after each executable: how many are done, of how many, and the newest.
Progress = Callable[[int, int, Compiled], None]


def use_compile_cache(directory: str | None) -> None:
    """Points JAX at a directory of executables that outlives the process; None leaves JAX as it is."""
    if directory is None:
        return
    try:
        path = Path(directory).expanduser()
        path.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # a read-only file system, or no home directory
        raise ConfigError(
            f"runtime.compile_cache {directory!r} cannot be made: {error}; name another directory, or null for none"
        ) from error
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
    results: dict[str, Compiled] = {}
    with ThreadPoolExecutor(threads or os.cpu_count(), thread_name_prefix="jaxserve-compile") as pool:
        futures = [pool.submit(_compile, job, mesh) for job in jobs]
        for future in as_completed(futures):
            compiled = future.result()
            results[compiled.name] = compiled
            progress(len(results), len(jobs), compiled)
    return results


def _compile(job: Job, mesh: jax.sharding.Mesh | None) -> Compiled:
    start = time.perf_counter()
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = jax.jit(job.fn, donate_argnums=job.donate).lower(*job.args)
        call = lowered.compile(compiler_options={**job.options})
    memory = call.memory_analysis()
    return Compiled(
        name=job.name,
        call=call,
        seconds=time.perf_counter() - start,
        temporary_bytes=memory.temp_size_in_bytes if memory is not None else 0,
        code_bytes=memory.generated_code_size_in_bytes if memory is not None else 0,
    )


def report_lines(compiled: Mapping[str, Compiled]) -> list[str]:
    """A table of what was built: seconds and megabytes per executable."""
    lines = [f"{'executable':<24}{'seconds':>9}{'temporaries':>14}{'code':>10}"]
    for item in sorted(compiled.values(), key=lambda c: c.name):
        temporaries, code = item.temporary_bytes / 2**20, item.code_bytes / 2**20
        lines.append(f"{item.name:<24}{item.seconds:9.2f}{temporaries:11.1f} MiB{code:6.1f} MiB")
    return lines
