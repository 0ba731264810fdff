"""Executables on disk, found by what they were made from: a warm start neither traces nor lowers.

Owns the files and the digest that names them. Refuses to compile. JAX's own cache is keyed by the lowered program, and
making that costs a second of Python for each step; here the key is what the program follows from: the source text of
everything that is traced, the versions, the settings of JAX and XLA, the processor, and all shapes.

As with JAX's cache, whoever can write to the directory can run code in this process.
"""

import dataclasses
import functools
import hashlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import time
import zlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import jax
from jax.experimental import serialize_executable

from jaxserve.config import read_compiler_variables

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_TRACED = ("kernels", "models", "runtime", "sched/plan.py")  # what the text of a program can come from
_VERSIONS = ("jax", "jaxlib", "flax", "numpy")
_UNUSED_S = 30 * 86400.0  # a file that no start has read for so long is removed
_CPU_INFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An executable and what is known of it. Bytes are per device."""

    call: jax.stages.Compiled
    temporary_bytes: int
    code_bytes: int


class ExecutableStore:
    """The executables of one program. Threads may use it at once: each touches files of its own names."""

    def __init__(self, directory: Path, facts: Iterable[str], devices: list[jax.Device]) -> None:  # pyright: ignore[reportInvalidTypeForm]
        """`facts`: all that the programs follow from beside source, versions and settings. `devices` run them."""
        self._directory = directory
        self._devices = devices
        self._digest = hashlib.sha256("\0".join([*_surroundings(devices), *facts]).encode()).hexdigest()[:40]

    def holds(self, name: str) -> bool:
        return self._path(name).exists()

    def load(self, name: str) -> Stored | None:
        """None when the file is not there or cannot be used; the log then says why."""
        path = self._path(name)
        try:
            payload, in_tree, out_tree, sizes = pickle.loads(zlib.decompress(path.read_bytes()))
            call = serialize_executable.deserialize_and_load(
                payload, in_tree, out_tree, backend=self._devices[0].client, execution_devices=self._devices
            )
            os.utime(path)
        except Exception as error:  # damaged, or not for this machine after all: whatever it is, it can be compiled
            logger.warning("%s cannot be used and is compiled anew: %r", path, error)
            return None
        return Stored(call=call, temporary_bytes=sizes[0], code_bytes=sizes[1])

    def save(self, name: str, built: Stored) -> None:
        """Writes the file whole or not at all. What cannot be kept is compiled at each start; the log says so."""
        try:
            payload, in_tree, out_tree = serialize_executable.serialize(built.call)
            sizes = (built.temporary_bytes, built.code_bytes)
            data = zlib.compress(pickle.dumps((payload, in_tree, out_tree, sizes)), 1)
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, suffix=".part", delete=False) as file:
                file.write(data)
            os.replace(file.name, self._path(name))
            self._remove_unused()
        except Exception as error:  # a full disk, or a backend that cannot write its executables
            logger.warning("%s is not kept for the next start: %r", name, error)

    def _path(self, name: str) -> Path:
        return self._directory / f"{name.replace(' ', '-')}-{self._digest}"

    def _remove_unused(self) -> None:
        for path in self._directory.iterdir():
            try:
                if path.stat().st_mtime < time.time() - _UNUSED_S:
                    path.unlink()
            except FileNotFoundError:  # another process was faster
                continue


def _surroundings(devices: list[jax.Device]) -> list[str]:  # pyright: ignore[reportInvalidTypeForm]
    first = devices[0]
    settings = {k: v for k, v in jax.config.values.items() if "cache" not in k}
    return [
        _source_digest(),
        *(f"{name} {metadata.version(name)}" for name in _VERSIONS),
        sys.version,
        f"{first.device_kind} {first.client.platform_version} {[d.id for d in devices]} of {jax.device_count()}",
        *(_processor() if first.platform == "cpu" else ()),
        repr(sorted(settings.items())),
        repr(sorted(read_compiler_variables().items())),
    ]


@functools.cache
def _source_digest() -> str:
    """Of all files that the text of a program can come from, tuned tables included."""
    digest = hashlib.sha256()
    for part in _TRACED:
        root = _PACKAGE / part
        files = [root] if root.is_file() else sorted(p for p in root.rglob("*") if p.suffix in {".py", ".json"})
        for path in files:
            digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> tuple[str, ...]:
    """XLA compiles for the very processor: another one may lack instructions that the code uses."""
    if not _CPU_INFO.exists():
        return (platform.machine(), platform.processor())
    lines = _CPU_INFO.read_text().split("\n\n", 1)[0].splitlines()
    return tuple(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
