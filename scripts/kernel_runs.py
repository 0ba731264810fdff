"""The common part of the scripts that check, time and tune kernels: the device, a case ready to run, times, records.

An implementation is launched here when its time counts. `device_check` has the targets, `oracle` the error.

There are several layers in one program: a launch of one attention can cost more on the host than on the device, and a
cache that was just read may still lie in the chip's own cache. So each program attends LAYERS caches one after the
other.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxserve.kernels.cases import Case, Inputs, attend_layers, make_inputs, small
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.ops import PAGED_ATTENTION
from jaxserve.kernels.oracle import TOLERANCE
from jaxserve.kernels.paged_attention import AttentionBatch, PagedAttention
from jaxserve.kernels.tuning import TunedTable
from jaxserve.values.chips import canonical_kind

LAYERS = 4
ROUNDS = 7  # of which the median counts
_ROUND_S = 0.03  # so long that the host's part in starting and ending it is small
_SMALL = "/small"


def device_at_hand() -> Device:
    """What an implementation may know of JAX's first device."""
    device = jax.devices()[0]
    if device.platform not in ("cuda", "gpu"):
        return Device(backend=device.platform, kind=canonical_kind(device.device_kind))
    major, minor = device.compute_capability.split(".")
    return Device(backend="gpu", kind=device.device_kind, compute_capability=(int(major), int(minor)))


def find_case(name: str) -> Case:
    """The case of that name; '.../small' is its short form."""
    return small(find_case(name.removesuffix(_SMALL))) if name.endswith(_SMALL) else PAGED_ATTENTION.cases[name]


def mix_of(name: str) -> str:
    return name.split("/")[1]


def find_implementation(name: str, device: Device, table: TunedTable | None = None) -> PagedAttention:
    """One of the registry, or 'package.module:NAME'. `table` only for implementations that are made for a device."""
    found = PAGED_ATTENTION.implementations.get(name)
    if table is not None and not isinstance(found, PagedAttention):
        found = functools.partial(found, table=table)  # pyright: ignore[reportCallIssue]
    return PAGED_ATTENTION.make(found, device)


def prepare(case: Case, implementation: PagedAttention, poison: bool = True) -> Inputs:
    """The inputs of `case`, keys and values of the step in the dtype that a model has them in."""
    inputs = make_inputs(case, implementation, poison=poison)
    dtype = jnp.dtype(case.query_dtype)
    return dataclasses.replace(inputs, k=inputs.k.astype(dtype), v=inputs.v.astype(dtype))


def on_host(inputs: Inputs) -> Inputs:
    """The same in numpy and without the cache: what the oracle reads."""
    host = lambda x: None if x is None else np.asarray(x)  # noqa: E731
    return dataclasses.replace(
        inputs,
        q=host(inputs.q),
        k=host(inputs.k),
        v=host(inputs.v),
        cache=None,
        batch=None,
        sinks=host(inputs.sinks),
        alibi_slopes=host(inputs.alibi_slopes),
        keys=[np.asarray(x) for x in inputs.keys],
        values=[np.asarray(x) for x in inputs.values],
    )


def tolerance(case: Case) -> float:
    return TOLERANCE[case.query_dtype]


def layers_of(cache: Any, layers: int = LAYERS) -> list[Any]:
    """The cache and copies of it, all there."""
    return jax.block_until_ready([cache, *(jax.tree.map(jnp.copy, cache) for _ in range(layers - 1))])


class Attention:
    """An implementation compiled for one case over `caches`, one a layer, which it owns and donates."""

    def __init__(self, case: Case, implementation: PagedAttention, inputs: Inputs, caches: list[Any]) -> None:
        rest = (inputs.sinks, inputs.alibi_slopes, inputs.scales)
        self.caches = caches
        self._args = (inputs.q, inputs.k, inputs.v, inputs.batch, rest)
        program = jax.jit(attend_layers(case, implementation), donate_argnums=0)
        self._program = program.lower(self.caches, *self._args).compile()

    @property
    def layers(self) -> int:
        return len(self.caches)

    def launch(self) -> list[Array]:
        """Starts one pass over all layers; the outputs, not waited for."""
        outs, self.caches = self._program(self.caches, *self._args)
        return outs


class Write:
    """The write of a step's keys and values alone, `times` over, into one cache that it owns and donates."""

    def __init__(self, implementation: PagedAttention, inputs: Inputs, times: int = 32) -> None:
        write = jax.jit(implementation.write)

        def run(cache: Any, k: Array, v: Array, batch: AttentionBatch, scales: Any) -> Any:
            for _ in range(times):
                cache = write(k, v, cache, batch, scales)
            return cache

        self._cache = inputs.cache
        self._args = (inputs.k, inputs.v, inputs.batch, inputs.scales)
        self._program = jax.jit(run, donate_argnums=0).lower(self._cache, *self._args).compile()
        self.times = times

    def launch(self) -> Any:
        self._cache = self._program(self._cache, *self._args)
        return self._cache


def seconds_per_call(launch: Callable[[], Any], calls: int, rounds: int = ROUNDS) -> float:
    """Median seconds of one of the `calls` that a launch makes; launches of a round queue up behind each other.

    A launch of more than half a second gets three rounds.
    """
    for _ in range(2):
        jax.block_until_ready(launch())
    start = time.perf_counter()
    jax.block_until_ready(launch())
    once = time.perf_counter() - start
    launches, rounds = int(np.clip(_ROUND_S / once, 1, 200)), rounds if once < 0.5 else 3
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(launches):
            out = launch()
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / launches / calls)
    return statistics.median(times)


class Turns:
    """Whose turn it is on the device, among processes: some share it, or one has it alone while its time counts.

    Whoever wants it alone comes first: sharers wait until all of those are through, so that waiting for the sharers
    that are inside is paid once for many. A process that dies gives back what it held.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = folder / "wanted", folder / "room"

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with _held(self._paths[0], fcntl.LOCK_EX), contextlib.ExitStack() as room:
            room.enter_context(_held(self._paths[1], fcntl.LOCK_SH))
            inside = room.pop_all()
        with inside:
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        with _held(self._paths[0], fcntl.LOCK_SH), _held(self._paths[1], fcntl.LOCK_EX):
            yield


@contextlib.contextmanager
def _held(path: Path, mode: int) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, mode)
        yield


def worker_environment(backend: str, workers: int) -> dict[str, str]:
    """For a process that shares the device with others, and the processors with `workers` of its kind."""
    threads = str(max(1, (os.cpu_count() or 1) // workers))
    return os.environ | {
        "JAX_PLATFORMS": {"gpu": "cuda"}.get(backend, backend),
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "OPENBLAS_NUM_THREADS": threads,
        "OMP_NUM_THREADS": threads,
    }


def write_between(page: Path, begin: str, end: str, lines: Iterable[str]) -> None:
    """Replaces what lies between two markers of a page of the docs."""
    before, begins, rest = page.read_text().partition(begin)
    _, ends, after = rest.partition(end)
    assert begins and ends, f"{page} lacks a marker: {begin} or {end}"
    page.write_text("\n".join([before + begin, *lines, end + after]))


def write_results(path: Path, results: Any, **about: Any) -> None:
    """{"about": versions, commit and what the caller adds, "results": ...} as JSON."""
    write_json(path, {"about": versions() | {"commit": commit()} | about, "results": results})


def write_json(path: Path, value: Any) -> None:
    """Replaces the file as a whole, so that a script that is stopped leaves the old one or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(".tmp")
    fresh.write_text(json.dumps(value, indent=1) + "\n")
    fresh.replace(path)


def versions() -> dict[str, Any]:
    """Of Python, JAX and its plugins."""
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "torch")
    return {
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        **{name: found for name in packages if (found := _version(name)) is not None},
    }


def commit() -> str:
    """The commit of the tree, 'with changes' if it has any; '' where git or its folder is missing."""
    try:
        head, changes = (
            subprocess.run(["git", *command], capture_output=True, text=True, check=False).stdout.strip()
            for command in (("rev-parse", "HEAD"), ("status", "--porcelain", "-uno"))
        )
    except FileNotFoundError:
        return ""
    return head + (" with changes" if changes else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
