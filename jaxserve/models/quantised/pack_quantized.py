"""compressed-tensors' pack-quantized: codes of 4 or 8 bits in words of 32.

X.weight_packed      int32 [out, ceil(in * bits / 32)]   packed along inputs, code + 2^(bits - 1)
X.weight_scale       [out, groups]
X.weight_shape       int64 [2]: out, in
X.weight_zero_point  int32 [ceil(out * bits / 32), groups]   packed along outputs, with the same offset
X.weight_g_idx       int32 [in]: the group of each input, with `actorder: group`
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.kernels.storage import Storage
from jaxserve.models.layout import Index
from jaxserve.models.quantised.bits import unpack_words, words_of
from jaxserve.models.quantised.checks import expect, fail
from jaxserve.models.quantised.group_args import GroupArgs
from jaxserve.models.quantised.groups import group_range, groups_of, listed_groups
from jaxserve.models.quantised.one_byte import Grid
from jaxserve.models.quantised.scales import ScaleGrid
from jaxserve.models.quantised.scheme import Format, beside
from jaxserve.models.quantised.slices import QuantisedSlice
from jaxserve.models.safetensors_files import TensorSource


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackQuantized(Format):
    """One weight. `grid`: outputs and inputs of one scale; `by_activation`: `weight_g_idx` has the groups."""

    bits: int
    grid: Grid
    symmetric: bool
    by_activation: bool

    @classmethod
    def read(cls, args: GroupArgs) -> "PackQuantized":
        """Raises CheckpointError for settings that the format does not have."""
        args.require(type="int", bits=(4, 8), strategy=("tensor", "channel", "group"))
        if args.strategy == "tensor" and not args.symmetric:
            args.fail("symmetric is false, which is not supported with strategy 'tensor'")
        by_activation = args.by_activation and args.strategy == "group"
        return cls(bits=args.bits, grid=args.grid, symmetric=args.symmetric, by_activation=by_activation)

    @property
    def storage(self) -> Storage | None:
        zeros, ordered = not self.symmetric, self.by_activation
        return Storage(code=f"int{self.bits}", group=self.grid[1], zeros=zeros, ordered=ordered)

    def required(self, name: str) -> tuple[str, ...]:
        suffixes = ["weight_packed", "weight_scale", "weight_shape"]
        suffixes += [] if self.symmetric else ["weight_zero_point"]
        suffixes += ["weight_g_idx"] if self.by_activation else []
        return tuple(beside(name, suffix) for suffix in suffixes)

    def optional(self, name: str) -> tuple[str, ...]:
        return tuple(beside(name, suffix) for suffix in ("weight_zero_point", "input_scale", "input_zero_point"))

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> "PackedTensor":
        packed = expect(tensors[beside(name, "weight_packed")], ("int32",))
        stated = expect(tensors[beside(name, "weight_shape")], ("int64", "int32"), (2,))
        outputs, inputs = (int(size) for size in stated.read((slice(0, 2),)))
        per_word = 32 // self.bits
        if packed.shape != (outputs, -(-inputs // per_word)):
            fail(
                packed,
                f"its shape is {list(packed.shape)}, but {stated.name} says [{outputs}, {inputs}], which is "
                f"[{outputs}, {-(-inputs // per_word)}] in words of {per_word}",
            )
        scale = tensors[beside(name, "weight_scale")]
        grid = ScaleGrid.open(scale, packed, (outputs, inputs), block=self.grid)
        because = f"{packed.name} with groups of {grid.columns}"
        groups = -(-inputs // grid.columns)
        zeros, g_idx = tensors.get(beside(name, "weight_zero_point")), tensors.get(beside(name, "weight_g_idx"))
        return PackedTensor(
            name=name,
            shape=(outputs, inputs),
            bits=self.bits,
            packed=packed,
            grid=grid,
            zeros=zeros and expect(zeros, ("int32",), (-(-outputs // per_word), groups), because=because),
            g_idx=expect(g_idx, ("int32",), (inputs,)) if self.by_activation and g_idx else None,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedTensor:
    """A `QuantisedTensor`."""

    name: str
    shape: tuple[int, ...]
    bits: int
    packed: TensorSource
    grid: ScaleGrid
    zeros: TensorSource | None
    g_idx: TensorSource | None

    @property
    def outer_axis(self) -> int:
        return 0

    def read(self, index: Index) -> QuantisedSlice:
        outputs, inputs = index
        words, kept = words_of(inputs, 32 // self.bits)
        codes = self._signed(unpack_words(self.packed.read((outputs, words)), self.bits)[:, kept])
        if self.g_idx is None:
            groups, group_of = group_range(inputs, self.grid.columns), groups_of(inputs, self.grid.columns)
        else:
            groups, group_of = listed_groups(self.g_idx, inputs, self.grid.tensor.shape[1], self.grid.tensor.name)
        zeros = None if self.zeros is None else self._read_zeros(self.zeros, outputs, groups)
        scales = self.grid.read_groups(outputs, groups)
        return QuantisedSlice(codes=codes, scales=scales, zeros=zeros, group_of=group_of)

    def input_groups(self) -> np.ndarray:
        if self.g_idx is None:
            return np.arange(self.shape[1], dtype=np.int32) // self.grid.columns
        whole, count = slice(0, self.shape[1]), self.grid.tensor.shape[1]
        first, groups = listed_groups(self.g_idx, whole, count, self.grid.tensor.name)
        return groups + np.int32(first.start)

    def _read_zeros(self, tensor: TensorSource, outputs: slice, groups: slice) -> np.ndarray:
        words, kept = words_of(outputs, 32 // self.bits)
        return self._signed(unpack_words(tensor.read((words, groups)).T, self.bits)[:, kept].T).astype(np.int16)

    def _signed(self, stored: np.ndarray) -> np.ndarray:
        """int8: what is stored less the offset, which flips the upper bit."""
        return (stored - np.uint8(2 ** (self.bits - 1))).view(np.int8)
