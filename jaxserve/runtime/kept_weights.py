"""Weights in the form that products want, kept on disk beside executables: the next start maps them.

    header: JSON that lists the arrays | arrays, each from a multiple of 64 bytes on

Packing takes minutes for a model of billions of weights, and its result depends on few facts. They are in the name of
the file: the content of the checkpoint, the source of all code between it and the arrays, and the arrays' shapes, which
tell the width of the processor's panels. Pages of a mapped file are read when a step first needs them, and processes
that run one model share them.

Which weights have which form is decided in `convert_weights`.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import jax
import numpy as np
from flax import nnx

from jaxserve.models.weights import Path as ParamPath
from jaxserve.runtime.store import traced_files

logger = logging.getLogger(__name__)

_ALIGNMENT = 64  # bytes, of buffers that XLA:CPU takes as they are
_LEAST_BYTES = 2**25  # smaller models are packed within a second
_UNUSED_S = 30 * 86400.0  # as long as `store` keeps executables that no start reads
_ENDED_S = 3600.0  # no start writes for so long: its process has ended
_SPARE_BYTES = 2**29  # of the disk, which others need, too
_PART = ".part"
# Beside kernels and models, which read and pack, no source changes a number of a weight.
_PACKING = ("convert_weights.py", "kept_weights.py")

Write = Callable[[ParamPath, nnx.Variable], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptWeights:
    """Where such files lie, and which.

    Attributes:
      folder: of all files.
      max_bytes: of all files together; 0: none is read or written.
      content: a text that differs for weights of other numbers.
    """

    folder: Path
    max_bytes: int
    content: str

    def file_of(self, state: nnx.State, shardings: nnx.State, layers: range) -> "KeptFile | None":
        """The file for a model of shapes on one CPU, or for these layers of one.

        None: it is not worth a file, or too large for one, as the log then says.
        """
        devices = {device for sharding in jax.tree.leaves(shardings) for device in sharding.device_set}
        if len(devices) > 1 or any(device.platform != "cpu" for device in devices) or self.max_bytes == 0:
            return None
        file = KeptFile(self.folder, f"{self.content}, {layers}", state, shardings, self.max_bytes)
        if file.num_bytes < _LEAST_BYTES:
            return None
        if file.num_bytes > self.max_bytes:
            logger.info(
                "the packed weights have %.1f GB, more than the %.1f of runtime.kept_weights_bytes: each start packs "
                "them anew",
                file.num_bytes / 1e9,
                self.max_bytes / 1e9,
            )
            return None
        return file


class KeptFile:
    """The file with all arrays of one model. One thread reads or begins to write; any thread writes arrays."""

    def __init__(self, folder: Path, content: str, state: nnx.State, shardings: nnx.State, max_bytes: int) -> None:
        """`state` has the shapes of the arrays, `shardings` their places on the device."""
        self._folder, self._max_bytes = folder, max_bytes
        self._variables: dict[ParamPath, nnx.Variable] = dict(nnx.to_flat_state(state))
        self._shardings: dict[ParamPath, nnx.Variable] = dict(nnx.to_flat_state(shardings))
        listed = [
            [".".join(map(str, path)), str(jax.tree.structure(variable)), [*leaf.shape], np.dtype(leaf.dtype).name]
            for path, variable in self._variables.items()
            for leaf in jax.tree.leaves(variable)
        ]
        self._header = json.dumps([content, _source_digest(), np.__version__, *listed]).encode() + b"\n"
        self._places: dict[ParamPath, list[int]] = {}
        self.num_bytes = len(self._header)
        for path, variable in self._variables.items():
            self._places[path] = places = []
            for leaf in jax.tree.leaves(variable):
                places.append(-(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT)
                self.num_bytes = places[-1] + math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        self.path = folder / hashlib.sha256(self._header).hexdigest()[:40]

    def load(self) -> nnx.State | None:
        """The arrays, which view the file; None where it is not there, or is damaged, as the log then says."""
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size != self.num_bytes:
                    raise ValueError(f"it should have {self.num_bytes:,} bytes")
                if file.read(len(self._header)) != self._header:
                    raise ValueError("its header is damaged")
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            logger.warning("%s cannot be used, and the weights are packed anew: %s", self.path, error)
            return None
        with contextlib.suppress(OSError):  # of a file system that can only be read
            os.utime(self.path)
        octets, found = np.frombuffer(mapped, np.uint8), {}
        for path, variable in self._variables.items():
            leaves, tree = jax.tree.flatten(variable)
            arrays = [
                octets[start : start + math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize]
                .view(leaf.dtype)
                .reshape(leaf.shape)
                for start, leaf in zip(self._places[path], leaves, strict=True)
            ]
            # Nothing is copied. A step that such an array were donated to would copy it: pages cannot be written.
            found[path] = jax.tree.unflatten(tree, jax.device_put(arrays, jax.tree.leaves(self._shardings[path])))
        return nnx.from_flat_state(found)

    @contextlib.contextmanager
    def writing(self) -> Iterator[Write]:
        """Within, the function that is given writes the arrays of a parameter. The file has its name some time after,
        when the disk has all of it; where it cannot be written, a warning says so, once, and the start goes on."""
        part = _Part(self.path, self.num_bytes)
        part.write(0, self._header)

        def write(path: ParamPath, variable: nnx.Variable) -> None:
            for start, leaf in zip(self._places[path], jax.tree.leaves(variable), strict=True):
                part.write(start, np.asarray(leaf).reshape(-1).view(np.uint8).data)

        try:
            yield write
        except BaseException:
            part.give_up()
            raise

        def finish() -> None:
            if part.finish():
                _remove_old(self.path, self._max_bytes)

        # The disk takes seconds for a gigabyte. A process that ends before leaves nothing of use, and the next packs.
        threading.Thread(target=finish, name="jaxserve-keep-weights", daemon=True).start()


class _Part:
    """A file that is not whole yet. After a failure, of which a warning tells, nothing is written any more."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path, self._lock, self._failed = path, threading.Lock(), False
        self._file: IO[bytes] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if (free := shutil.disk_usage(path.parent).free) < num_bytes + _SPARE_BYTES:
                raise OSError(f"{num_bytes / 1e9:.1f} GB are needed, and {free / 1e9:.1f} are free")
            self._file = tempfile.NamedTemporaryFile(dir=path.parent, suffix=_PART, delete=False)  # noqa: SIM115
            self._file.truncate(num_bytes)
        except OSError as error:
            self._fail(error)

    def write(self, start: int, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view and not self._failed:
            assert self._file is not None
            try:
                count = os.pwrite(self._file.fileno(), view, start)
            except OSError as error:  # a full disk
                self._fail(error)
                return
            view, start = view[count:], start + count

    def finish(self) -> bool:
        """Gives the file its name when the disk has all of it. Returns whether it has."""
        if not self._failed:
            assert self._file is not None
            try:
                os.fsync(self._file.fileno())  # else a machine that stops now might leave a whole file of zeros
                os.replace(self._file.name, self._path)
            except OSError as error:
                self._fail(error)
        if self._failed:
            self.give_up()
        elif self._file is not None:
            self._file.close()
        return not self._failed

    def give_up(self) -> None:
        """No thread writes any more."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
                Path(self._file.name).unlink(missing_ok=True)

    def _fail(self, error: OSError) -> None:
        with self._lock:
            told, self._failed = self._failed, True
        if not told:
            logger.warning(
                "packed weights cannot be kept in %s, and each start packs them anew: %s", self._path.parent, error
            )


def _remove_old(newest: Path, max_bytes: int) -> None:
    """Removes files that no start has read for long, or has finished, and beyond the limit those read longest ago."""
    found: list[tuple[float, int, Path]] = []
    for path in newest.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            status = path.stat()
            found.append((status.st_mtime, status.st_size, path))
    excess, now_s = sum(size for _, size, _ in found) - max_bytes, time.time()
    for read_s, size, path in sorted(found):
        unused_s = _ENDED_S if path.suffix == _PART else _UNUSED_S
        if read_s < now_s - unused_s or (excess > 0 and path != newest and path.suffix != _PART):
            path.unlink(missing_ok=True)  # a process that has mapped it keeps its pages
            excess -= size


@functools.cache
def _source_digest() -> str:
    """Digest of all source that reads and packs weights."""
    digest = hashlib.sha256()
    for path in traced_files():
        if path.parent.name != "runtime" or path.name in _PACKING:
            digest.update(path.read_bytes())
    return digest.hexdigest()
