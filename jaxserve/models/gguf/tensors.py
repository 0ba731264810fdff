"""The tensors of a GGUF file by their names, as sources that can be read in slices, and how they are quantised."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.files.gguf_file import GgufFile, GgufTensor, read_gguf
from jaxserve.models.checkpoint import Checkpoint
from jaxserve.models.gguf.architectures import Architecture
from jaxserve.models.gguf.blocks import BLOCKS, FLOATS, BlockFormat
from jaxserve.models.gguf.config import architecture_of, read_config
from jaxserve.models.quantised.scheme import Format, Module, Scheme, module_name
from jaxserve.models.safetensors_files import TensorSource

_LAYER = "blk."
_NORM = "norm.weight"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TurnedRows(TensorSource):
    """A tensor whose heads have row i of their first half beside row i of their second, read in the order of halves.

    llama.cpp turns neighbours of a head where config.json's Llama turns rows half a head apart, so its converter writes
    the H rows of each head as [H / 2, 2] where they were [2, H / 2]. Blocks lie along inputs, so their bytes move with
    the rows.
    """

    head_dim: int

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """See `TensorSource.read`. Whole heads are read."""
        rows, *rest = index
        size = self.head_dim
        first, last = rows.start // size, -(-rows.stop // size)
        heads = TensorSource.read(self, (slice(first * size, last * size), *rest))
        by_half = heads.reshape(last - first, size // 2, 2, *heads.shape[1:]).swapaxes(1, 2).reshape(heads.shape)
        return by_half[rows.start - first * size : rows.stop - first * size]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ShiftedNorm(TensorSource):
    """The weight of a norm that is stored with 1 added, without it."""

    def read(self, index: tuple[slice, ...]) -> np.ndarray:
        """See `TensorSource.read`; float32."""
        return TensorSource.read(self, index).astype(np.float32) - np.float32(1)


def open_gguf(checkpoint: Checkpoint) -> dict[str, TensorSource]:
    """Every tensor that could be a weight. Quantised ones are bytes: uint8 [..., blocks, bytes of a block]."""
    file = _file_of(checkpoint)
    _, architecture = architecture_of(file)
    head_dim = read_config(file)["head_dim"]  # the file's own: model.overrides may have another
    return {name: _source(tensor, architecture, head_dim) for name, tensor in file.tensors.items()}


def _source(tensor: GgufTensor, architecture: Architecture, head_dim: int) -> TensorSource:
    shape, dtype = tensor.shape, FLOATS.get(tensor.type)
    if dtype is None:
        dtype, shape = "uint8", (*shape[:-1], shape[-1] // tensor.block, tensor.block_bytes)
    fields = {"name": tensor.name, "file": tensor.file, "shape": shape, "dtype": dtype, "start": tensor.start}
    is_layer = tensor.name.startswith(_LAYER)
    if is_layer and tensor.name.split(".", 2)[-1] in architecture.turned:
        return TurnedRows(**fields, head_dim=head_dim)
    if architecture.shifted_norms and tensor.name.endswith(_NORM):
        return ShiftedNorm(**fields)
    return TensorSource(**fields)


def gguf_scheme(checkpoint: Checkpoint) -> "GgufScheme | None":
    """How the weights are quantised; None: all are float. Raises CheckpointError for types that are not known."""
    file = _file_of(checkpoint)
    known = (*FLOATS, *BLOCKS)
    wrong = {tensor.type: tensor.name for tensor in file.tensors.values() if tensor.type not in known}
    if wrong:
        said = ", ".join(f"{kind} (as {name})" for kind, name in sorted(wrong.items()))
        raise CheckpointError(
            f"{file.path} has tensors of element types that are not supported: {said}; known: {', '.join(known)}; take "
            "a file that was quantised to these, such as Q4_K_M, Q6_K or Q8_0"
        )
    quantised = [tensor for tensor in file.tensors.values() if tensor.type in BLOCKS]
    return GgufScheme(quantised) if quantised else None


class GgufScheme(Scheme):
    """Each weight has the format of its element type."""

    def __init__(self, tensors: Iterable[GgufTensor]) -> None:
        self._format_of = {module_name(tensor.name): BLOCKS[tensor.type] for tensor in tensors}
        used = {found.name: found for found in self._format_of.values()}
        self._formats = tuple(used[name] for name in BLOCKS if name in used)
        super().__init__(f"GGUF with {', '.join(found.name for found in self._formats)}")

    @property
    def formats(self) -> tuple[Format, ...]:
        return self._formats

    def format_of(self, module: Module) -> BlockFormat | None:
        return self._format_of.get(module.name)


def _file_of(checkpoint: Checkpoint) -> GgufFile:
    assert checkpoint.gguf is not None, checkpoint.path
    return read_gguf(checkpoint.gguf)
