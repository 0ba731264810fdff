"""The safetensors files of one checkpoint, as one lazy table of tensors.

Tensors are read in slices: a device that holds an eighth of a matrix must read an eighth of it from disk. They are read
by plain reads and not through the library's memory map: touched pages of a map count as memory of the process, for all
tensors together, and a page fault on a slow disk stops every thread of Python.

Published directories have more than the model needs: tensors that an index does not name, element types that no weight
has. They are no concern of this module but where they leave in doubt which tensor is meant.
"""

import dataclasses
import itertools
import json
import math
import os
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import INDEX_NAME, SINGLE_NAME, find_weights, read_weight_map
from jaxserve.models.weights import fold_names

# Written names of element types, as numpy with ml_dtypes knows them. Weights are of the first four; most of the others
# are codes, scales and indices of quantised weights, and the vocabularies of draft heads.
_DTYPES = {
    "F64": "float64",
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
    "I16": "int16",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
}
FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16")


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
    """One tensor of a checkpoint. `start` is where its bytes begin in the file.

    `dtype` of an element type that NumPy does not have is its name in the file, which no reader takes.
    """

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


def open_tensors(directory: Path, say: Callable[[str], None] | None = None) -> dict[str, TensorSource]:
    """Every tensor of the files that `find_weights` chooses; of an index, those that it names, each of its file.

    `say` is told in a sentence what else there is and is passed over. Raises CheckpointError naming the file when one
    is missing, truncated or corrupt, when the index and its files disagree, or when a tensor is in two shards.
    """
    found = find_weights(directory)
    said: list[str] = []
    if found.index is None:
        tensors = _join(directory, found.files)
        if found.unused_index is not None:
            said.append(f"{found.unused_index} is passed over: {SINGLE_NAME} lies beside it, and is the whole model")
        if found.files[0].name != SINGLE_NAME:
            said.append(f"{directory} has no {INDEX_NAME}: all {len(found.files)} numbered files are read")
    else:
        tensors, more = _open_indexed(found.index)
        if more:
            said.append(f"{found.index} does not name {len(more)} tensors of its files, which are passed over: ")
            said[-1] += fold_names(more)
    if say is not None:
        for sentence in said:
            say(sentence)
    return tensors


def stored_names(directory: Path) -> Collection[str]:
    """The names of `open_tensors`; an index alone is read where there is one. Raises CheckpointError."""
    found = find_weights(directory)
    return (read_weight_map(found.index) if found.index is not None else _join(directory, found.files)).keys()


def _open_indexed(index_file: Path) -> tuple[dict[str, TensorSource], set[str]]:
    """The tensors that an index names, and the names of those that it does not."""
    weight_map = read_weight_map(index_file)
    names = sorted(set(weight_map.values()))
    # A checkpoint in a subdirectory may share weights with the one around it, and reaches no further.
    if outside := [n for n in names if Path(n).name != n and n != f"../{Path(n).name}"]:
        raise CheckpointError(f"{index_file} names {outside}, but files must lie beside it, or in the directory above")
    if missing := [n for n in names if not (index_file.parent / n).is_file()]:
        raise CheckpointError(f"{index_file} names files that are missing: {', '.join(missing)}")
    files = {name: open_file(index_file.parent / name) for name in names}
    if absent := sorted(tensor for tensor, name in weight_map.items() if tensor not in files[name]):
        raise CheckpointError(f"{index_file} promises tensors that its files lack: {fold_names(absent)}")
    unnamed = {tensor for opened in files.values() for tensor in opened} - weight_map.keys()
    return {tensor: files[name][tensor] for tensor, name in weight_map.items()}, unnamed


def _join(directory: Path, files: Sequence[Path]) -> dict[str, TensorSource]:
    """All tensors of files that no index speaks of."""
    tensors: dict[str, TensorSource] = {}
    for file in files:
        opened = open_file(file)
        if twice := sorted(opened.keys() & tensors.keys()):
            others = ", ".join(sorted({tensors[name].file.name for name in twice}))
            raise CheckpointError(
                f"{file} has tensors that are in {others}, too, and {directory} has no {INDEX_NAME} that says which "
                f"count: {fold_names(twice)}; fetch the index, or remove the files that do not belong to the model"
            )
        tensors |= opened
    return tensors


def describe_origin(directory: Path, tensors: Sequence[TensorSource]) -> str:
    """The one file of these tensors, for messages; the directory where they lie in several, or there are none."""
    files = {tensor.file for tensor in tensors}
    return str(next(iter(files)) if len(files) == 1 else directory)


def open_file(file: Path, max_header_bytes: int | None = None) -> dict[str, TensorSource]:
    """Every tensor of one file. Raises CheckpointError where it is truncated or corrupt, or its header, which names the
    tensors, has more than `max_header_bytes`; None: as many as safetensors takes."""
    try:
        if max_header_bytes is not None:
            with file.open("rb") as opened:
                header_len = int.from_bytes(opened.read(8), "little")
            if max_header_bytes < header_len < file.stat().st_size:  # a longer one is no header
                raise CheckpointError(f"{file} has a header of {header_len} bytes; at most {max_header_bytes} are read")
        with safe_open(str(file), framework="numpy"):  # checks the header and the length of the file
            pass
        with file.open("rb") as opened:
            header_len = int.from_bytes(opened.read(8), "little")
            header = json.loads(opened.read(header_len))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated, corrupt or no safetensors file: {error}") from error
    header.pop("__metadata__", None)
    return {
        name: TensorSource(
            name=name,
            file=file,
            shape=tuple(entry["shape"]),
            dtype=_DTYPES.get(entry["dtype"]) or entry["dtype"],
            start=8 + header_len + entry["data_offsets"][0],
        )
        for name, entry in header.items()
    }
