"""The store of executables on disk. They are found by their sources, so a warm start neither traces nor lowers.

JAX's own cache is keyed by the lowered program, and making that costs a second of Python for each step; here the key
covers everything that determines the program: the source text of all traced code, the versions, the settings of JAX and
XLA, the processor, and all shapes. It leaves out which devices of a kind run the program: executables that were
compiled for one replica are loaded for the others, too.

After a change of the source a step is lowered, and the store then finds it by its program, where that is still the
same: most changes change few programs. Such a file gets another name (a link), by which it is found from then on.

As with JAX's cache, anyone who can write to the directory can run code in this process.
"""

import collections
import contextlib
import copy
import dataclasses
import functools
import hashlib
import io
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jaxlib import xla_client

from jaxserve.config import read_compiler_variables

logger = logging.getLogger(__name__)

_PACKAGE = Path(__file__).parents[1]
_TRACED = ("kernels", "models", "runtime", "api.py", "sched/plan.py")  # sources from which a program can come
_VERSIONS = ("jax", "jaxlib", "flax", "numpy", "numba", "llvmlite")
_SAME_PROGRAMS = ("jax_platforms",)  # settings of JAX that change no program: the device is in the key by itself
_UNUSED_S = 30 * 86400.0  # a file that no start has read for this long is removed
_CPU_INFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An executable and its cost. Bytes are per device."""

    call: jax.stages.Compiled
    temporary_bytes: int
    code_bytes: int


class ExecutableStore:
    """The executables of one program for the devices of one replica. Threads may use it at once."""

    def __init__(
        self,
        directory: Path | None,
        facts: Iterable[str],
        devices: list[jax.Device],  # pyright: ignore[reportInvalidTypeForm]
        max_bytes: int = 2**31,
    ) -> None:
        """`facts`: all that determines the programs beside source, versions and settings. `devices` run them.

        `digest` of all of these is in the name of each file. `max_bytes`: of all files of the directory together.
        `directory` None keeps executables in memory, for the replicas of this process.
        """
        self._directory = directory
        self._devices = devices
        self._facts = [*facts]
        self._max_bytes = max_bytes
        self._told = False
        self._memory: dict[str, bytes] = {}
        self._locks: collections.defaultdict[str, threading.Lock] = collections.defaultdict(threading.Lock)
        self.digest = digest_of(devices, [source_digest(), *self._facts])

    def on(self, devices: list[jax.Device]) -> "ExecutableStore":  # pyright: ignore[reportInvalidTypeForm]
        """The same executables for another replica, whose devices are as many and of the same kind."""
        other = copy.copy(self)  # files, memory and locks are shared
        other._devices = devices
        other.digest = digest_of(devices, [source_digest(), *self._facts])
        return other

    def building(self, name: str) -> threading.Lock:
        """To be held while a replica compiles what none of them has: the next one then finds it."""
        return self._locks[self._file_name(name)]

    def holds(self, name: str) -> bool:
        return self._file_name(name) in self._memory if self._directory is None else self._path(name).exists()

    def load(self, name: str) -> Stored | None:
        """None when the file is not there or cannot be used; the log then says why."""
        try:
            if self._directory is None:
                return _unpacked(self._memory[self._file_name(name)], self._devices)
            path = self._path(name)
            stored = _unpacked(path.read_bytes(), self._devices)
            with contextlib.suppress(OSError):  # of a file system that can only be read
                os.utime(path)
        except Exception as error:  # damaged, or not for this machine after all: it is compiled instead
            logger.warning(
                "%s of %s cannot be used and is compiled anew: %r", self._file_name(name), self._directory, error
            )
            with contextlib.suppress(OSError):
                self._forget(name)
            return None
        return stored

    def load_same(self, name: str, program: str) -> Stored | None:
        """The executable of the same program, which another version of the source has made. From now on it is found by
        its name, too. None where there is none, as for `load`."""
        mine, other = self._file_name(name), self._program_name(program)
        try:
            if self._directory is None:
                self._memory[mine] = self._memory[other]
            else:
                with contextlib.suppress(FileExistsError):
                    os.link(self._directory / other, self._directory / mine)
        except (KeyError, OSError):  # not there, or a file system without links
            return None
        return self.load(name)

    def save(self, name: str, built: Stored, program: str) -> None:
        """Writes the file whole or not at all. If that fails, it is compiled at each start; the log says so once.

        `program`: all that the executable follows from beside versions, settings and devices (`load_same`).
        """
        part: Path | None = None
        try:
            data = _packed(built, self._devices)
            if self._directory is None:
                self._memory[self._file_name(name)] = self._memory[self._program_name(program)] = data
                return
            self._directory.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._directory, suffix=".part", delete=False) as file:
                part = Path(file.name)
                file.write(data)
            os.replace(part, self._path(name))
            with contextlib.suppress(OSError):  # it is there already, or the file system has no links
                os.link(self._path(name), self._directory / self._program_name(program))
            self._remove_old()
        except Exception as error:  # a full disk, or a backend that cannot write its executables
            if not self._told:
                self._told = True
                logger.warning("what is compiled now cannot be kept in %s (%s): %r", self._directory, name, error)
            with contextlib.suppress(OSError):
                if part is not None:
                    part.unlink(missing_ok=True)

    def _program_name(self, program: str) -> str:
        return f"program-{digest_of(self._devices, [_writer_digest(), program])}"

    def _file_name(self, name: str) -> str:
        return f"{name.replace(' ', '-')}-{self.digest}"

    def _path(self, name: str) -> Path:
        assert self._directory is not None, name
        return self._directory / self._file_name(name)

    def _forget(self, name: str) -> None:
        """Under all its names, since all have the same content."""
        if self._directory is None:
            data = self._memory.get(self._file_name(name))
            self._memory = {other: kept for other, kept in self._memory.items() if kept is not data}
        else:
            number = self._path(name).stat().st_ino
            for file in self._files():
                if file.number == number:
                    file.remove()

    def _files(self) -> "list[_File]":
        """Those of the directory, each with all its names."""
        assert self._directory is not None
        found: dict[int, _File] = {}
        for path in self._directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                status = path.stat()
                file = _File(read_s=status.st_mtime, size=status.st_size, number=status.st_ino, paths=[])
                found.setdefault(status.st_ino, file).paths.append(path)
        return sorted(found.values())

    def _remove_old(self) -> None:
        """Removes files that no start has read for long, then the oldest above the limit; none of this program."""
        files = self._files()
        excess = sum(file.size for file in files) - self._max_bytes
        for file in files:
            mine = any(path.name.endswith(self.digest) for path in file.paths)
            if file.read_s < time.time() - _UNUSED_S or (excess > 0 and not mine):
                file.remove()
                excess -= file.size


@dataclasses.dataclass(order=True)
class _File:
    read_s: float
    size: int
    number: int
    paths: list[Path]

    def remove(self) -> None:
        for path in self.paths:
            path.unlink(missing_ok=True)


def _packed(built: Stored, devices: list[jax.Device]) -> bytes:  # pyright: ignore[reportInvalidTypeForm]
    payload, in_tree, out_tree = serialize_executable.serialize(built.call)
    sizes = (built.temporary_bytes, built.code_bytes)
    return zlib.compress(pickle.dumps((payload, in_tree, out_tree, sizes, [d.id for d in devices])), 1)


def _unpacked(data: bytes, devices: list[jax.Device]) -> Stored:  # pyright: ignore[reportInvalidTypeForm]
    payload, in_tree, out_tree, sizes, ids = pickle.loads(zlib.decompress(data))
    if ids == [d.id for d in devices]:
        call = serialize_executable.deserialize_and_load(
            payload, in_tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
    else:
        unloaded, arguments, no_kwargs = _Moved(payload, ids, devices).load()
        call = jax.stages.Compiled(unloaded.load(), [], in_tree.unflatten(arguments), out_tree, no_kwargs=no_kwargs)
        found = [d.id for d in call.runtime_executable().local_devices()]  # pyright: ignore[reportOptionalMemberAccess]
        if sorted(found) != sorted(d.id for d in devices):
            raise ValueError(f"it was loaded for the devices {found}, not for {devices}")
    return Stored(call=call, temporary_bytes=sizes[0], code_bytes=sizes[1])


class _Moved(pickle.Unpickler):
    """Reads what `serialize_executable.serialize` wrote, with other devices in the place of those it was compiled for.

    `deserialize_and_load` looks devices up by their ids, and leaves the assignment as it was compiled; XLA takes
    another one at loading.
    """

    def __init__(self, payload: bytes, ids: list[int], devices: list[Any]) -> None:
        super().__init__(io.BytesIO(payload))
        self._devices = devices
        self._places = dict(zip(ids, devices, strict=True))

    def persistent_load(self, pid: tuple[Any, ...]) -> Any:
        """The client, a device, or machine code: `serialize` names them so."""
        client = self._devices[0].client
        match pid:
            case ("client",):
                return client
            case ("device", number):
                return self._places[number]
            case ("exec", code):
                devices = xla_client.DeviceList(tuple(self._devices))
                return client.deserialize_executable(code, executable_devices=devices, compile_options=self._options())
        raise pickle.UnpicklingError(f"unknown kind of object: {pid[0]!r}")

    def _options(self) -> Any:
        options = xla_client.CompileOptions()
        assignment = xla_client.DeviceAssignment.create(np.array([[d.id for d in self._devices]]))
        for one in (options, options.executable_build_options):
            one.num_replicas, one.num_partitions = 1, len(self._devices)
            one.device_assignment = assignment
        options.executable_build_options.use_spmd_partitioning = len(self._devices) > 1
        return options


def can_be_loaded(devices: Iterable[jax.Device]) -> bool:  # pyright: ignore[reportInvalidTypeForm]
    """Whether these devices run executables that were serialised and read again.

    libtpu halts the cores of some of its devices when they do, unless the first device is one of them
    (https://github.com/jax-ml/jax/issues/38004).
    """
    return any(device.platform != "tpu" or device.id == 0 for device in devices)


def digest_of(devices: list[jax.Device], facts: list[str]) -> str:  # pyright: ignore[reportInvalidTypeForm]
    """Of facts, the versions, the settings of JAX and XLA, and the kind of the devices."""
    return hashlib.sha256("\0".join([*_surroundings(devices), *facts]).encode()).hexdigest()[:40]


def _surroundings(devices: list[jax.Device]) -> list[str]:  # pyright: ignore[reportInvalidTypeForm]
    first = devices[0]
    # The code for several TPUs holds the ways between them; for others, all devices of a kind are alike.
    place = [d.id for d in devices] if first.platform == "tpu" and len(devices) > 1 else len(devices)
    settings = {k: v for k, v in jax.config.values.items() if "cache" not in k and k not in _SAME_PROGRAMS}
    return [
        *(f"{name} {_version(name)}" for name in _VERSIONS),
        sys.version,
        f"{first.device_kind} {first.client.platform_version} {place} of {jax.device_count()}",
        *(_processor() if first.platform == "cpu" else ()),
        repr(sorted(settings.items())),
        repr(sorted(read_compiler_variables().items())),
    ]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # Numba is an extra
        return "absent"


def traced_files() -> list[Path]:
    """Every file of the package whose text is in the key."""
    roots = [_PACKAGE / part for part in _TRACED]
    lists = [[root] if root.is_file() else sorted(root.rglob("*")) for root in roots]
    return [path for paths in lists for path in paths if path.suffix in {".py", ".json"}]


@functools.cache
def source_digest() -> str:
    """Digest of all files that the text of a program can come from, tuned tables included."""
    return _digest_of_files(traced_files())


@functools.cache
def _writer_digest() -> str:
    """Digest of the source that compiles and writes: a mistake there must not outlive it in files found by program."""
    return _digest_of_files([Path(__file__), Path(__file__).with_name("compile.py")])


def _digest_of_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _processor() -> tuple[str, ...]:
    """XLA compiles for the very processor: another one may lack instructions that the code uses."""
    if not _CPU_INFO.exists():
        return (platform.machine(), platform.processor())
    lines = _CPU_INFO.read_text().split("\n\n", 1)[0].splitlines()
    return tuple(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))
