"""The safetensors files of one checkpoint, as one lazy table of tensors.

Owns finding and opening the files, the index, and slices of tensors. Refuses to know what a tensor is for.

Why slices: a device that holds an eighth of a matrix must read an eighth of it from disk.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import CheckpointError
from jaxserve.models.checkpoint import INDEX_NAME, SINGLE_NAME, read_json

# Written names of element types, as numpy (with ml_dtypes' bfloat16) knows them.
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """One tensor of a checkpoint. `read` takes one slice per axis and returns a fresh array of its own dtype."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str
    handle: Any  # safetensors' slice object

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """Raises CheckpointError when the file stops short (it was cut while being read)."""
        try:
            return self.handle[index] if index else self.handle[...]
        except SafetensorError as error:
            raise CheckpointError(f"{self.file}: tensor {self.name} cannot be read: {error}") from error


def open_tensors(directory: Path) -> dict[str, TensorSource]:
    """Every tensor of `model.safetensors`, or of the files that `model.safetensors.index.json` names.

    Raises CheckpointError naming the file when one is missing, truncated or corrupt, when the index and its files
    disagree, or when an element type is not floating point.
    """
    index_file = directory / INDEX_NAME
    if index_file.is_file():
        return _open_indexed(index_file)
    file = directory / SINGLE_NAME
    if not file.is_file():
        others = sorted(f.name for f in directory.glob("*.bin")) + sorted(f.name for f in directory.glob("*.pt*"))
        hint = f"; found {', '.join(others)}, which must be converted to safetensors first" if others else ""
        raise CheckpointError(f"{directory} has neither {SINGLE_NAME} nor {INDEX_NAME}{hint}")
    return _open_file(file)


def _open_indexed(index_file: Path) -> dict[str, TensorSource]:
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index_file}: 'weight_map' must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    if outside := [n for n in names if Path(n).name != n]:
        raise CheckpointError(f"{index_file} names {outside}, but files must lie beside it")
    if missing := [n for n in names if not (index_file.parent / n).is_file()]:
        raise CheckpointError(f"{index_file} names files that are missing: {', '.join(missing)}")
    tensors: dict[str, TensorSource] = {}
    for name in names:
        tensors |= _open_file(index_file.parent / name)
    if absent := sorted(t for t, f in weight_map.items() if t not in tensors or tensors[t].file.name != f):
        raise CheckpointError(f"{index_file} promises tensors that its files lack: {', '.join(absent)}")
    return tensors


def _open_file(file: Path) -> dict[str, TensorSource]:
    try:
        # Stays open for as long as a slice of it lives: it is a memory map, and slices are read later.
        opened = safe_open(str(file), framework="numpy")
        handles = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} is truncated, corrupt or no safetensors file: {error}") from error
    tensors = {}
    for name, handle in handles.items():
        if handle.get_dtype() not in _DTYPES:
            raise CheckpointError(
                f"{file}: tensor {name} has element type {handle.get_dtype()}; known: {', '.join(_DTYPES)} "
                "(quantized checkpoints are not supported)"
            )
        tensors[name] = TensorSource(
            name=name, file=file, shape=tuple(handle.get_shape()), dtype=_DTYPES[handle.get_dtype()], handle=handle
        )
    return tensors
