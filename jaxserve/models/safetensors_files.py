"""The safetensors files of one checkpoint, as one lazy table of tensors.

Tensors are read in slices: a device that holds an eighth of a matrix must read an eighth of it from disk. They are read
by plain reads and not through the library's memory map: touched pages of a map count as memory of the process, for all
tensors together, and a page fault on a slow disk stops every thread of Python.
"""

import dataclasses
import itertools
import json
import math
import os
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import INDEX_NAME, find_weights, read_json
from jaxserve.models.weights import fold_names

# Written names of element types, as numpy with ml_dtypes knows them. Weights are of the first three; the others are
# codes, scales and indices of quantised weights, and the vocabularies of draft heads.
_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "U8": "uint8",
    "I32": "int32",
    "I64": "int64",
    "BOOL": "bool",
}
FLOAT_DTYPES = ("float32", "float16", "bfloat16")


class ReadableTensor(Protocol):
    """A tensor that can be read in slices: of a file, or a quantised weight that is widened as it is read.

    `outer_axis`: the axis whose slices lie in the longest runs of the files.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    @property
    def outer_axis(self) -> int: ...

    def read(self, index: tuple[slice, ...]) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """One tensor of a checkpoint. `start` is where its bytes begin in the file."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    start: int

    @property
    def outer_axis(self) -> int:
        return 0

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """A fresh array of its own dtype; one slice of step 1 per axis.

        Raises CheckpointError when the file stops short (it was cut while being read).
        """
        dtype = jnp.dtype(self.dtype)
        bounds = [range(*cut.indices(size)) for cut, size in zip(index, self.shape, strict=True)]
        steps = [math.prod(self.shape[axis + 1 :]) * dtype.itemsize for axis in range(len(self.shape))]
        # Behind the last axis that is cut, elements are contiguous in the file and in the result.
        cut_axes = [axis for axis, bound in enumerate(bounds) if len(bound) < self.shape[axis]]
        last = max(cut_axes, default=0)
        out = np.empty(math.prod(len(bound) for bound in bounds) * dtype.itemsize, np.uint8)
        run_bytes, first = out.size, self.start
        if bounds:
            run_bytes, first = len(bounds[last]) * steps[last], self.start + bounds[last].start * steps[last]
        view, at = out.data, 0
        with self.file.open("rb", buffering=0) as file:
            for position in itertools.product(*bounds[:last]):
                offset = first + sum(i * step for i, step in zip(position, steps, strict=False))
                self._read_run(file.fileno(), view[at : at + run_bytes], offset)
                at += run_bytes
        return out.view(dtype).reshape([len(bound) for bound in bounds])

    def _read_run(self, descriptor: int, into: memoryview, offset: int) -> None:
        while into:
            count = os.preadv(descriptor, [into], offset)
            if count == 0:
                raise CheckpointError(f"{self.file}: tensor {self.name} cannot be read: the file stops short")
            into, offset = into[count:], offset + count


def open_tensors(directory: Path) -> dict[str, TensorSource]:
    """Every tensor of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Raises CheckpointError naming the file when one is missing, truncated or corrupt, when the index and its files
    disagree, or when an element type is unknown.
    """
    file = find_weights(directory)
    return _open_indexed(file) if file.name == INDEX_NAME else open_file(file)


def _open_indexed(index_file: Path) -> dict[str, TensorSource]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index_file}: 'weight_map' must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    # A checkpoint in a subdirectory may share weights with the one around it, and reaches no further.
    if outside := [n for n in names if Path(n).name != n and n != f"../{Path(n).name}"]:
        raise CheckpointError(f"{index_file} names {outside}, but files must lie beside it, or in the directory above")
    if missing := [n for n in names if not (index_file.parent / n).is_file()]:
        raise CheckpointError(f"{index_file} names files that are missing: {', '.join(missing)}")
    tensors: dict[str, TensorSource] = {}
    for name in names:
        tensors |= open_file(index_file.parent / name)
    if absent := sorted(
        t for t, f in weight_map.items() if t not in tensors or tensors[t].file != index_file.parent / f
    ):
        raise CheckpointError(f"{index_file} promises tensors that its files lack: {fold_names(absent)}")
    return tensors


def open_file(file: Path) -> dict[str, TensorSource]:
    """Every tensor of one file. Raises CheckpointError where it is truncated or corrupt, or an element type unknown."""
    try:
        with safe_open(str(file), framework="numpy"):  # checks the header and the length of the file
            pass
        with file.open("rb") as opened:
            header_len = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(header_len))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated, corrupt or no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name} has element type {entry['dtype']}; known: {', '.join(_DTYPES)}"
            )
        tensors[name] = TensorSource(
            name=name,
            file=file,
            shape=tuple(entry["shape"]),
            dtype=_DTYPES[entry["dtype"]],
            start=8 + header_len + entry["data_offsets"][0],
        )
    return tensors
