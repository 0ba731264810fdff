"""`QuantisedSlice`: the normal form that every format of a quantised checkpoint is read in.

Formats differ in how they pack codes, in the order of axes, and in what they store for a zero. None of that leaves the
module of a format. What takes slices keeps their codes (`coding`) or widens them (`widening`).
"""

import dataclasses
from typing import Protocol, runtime_checkable

import numpy as np

from jaxserve.models.layout import Index
from jaxserve.models.quantised.bits import to_float32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisedSlice:
    """A rectangle of one weight of N outputs and K inputs, which are in G groups.

    w = (codes - zeros) * scales - offsets

    Attributes:
      codes: [..., N, K], whole numbers or float8 and float4 values. A stack of experts is a first axis.
      scales: float32 [..., N, G], finite; below 0 in GGUF alone, where a scale has the sign of its largest weight.
      zeros: int16 [..., N, G]; None: zero.
      offsets: float32 [..., N, G], finite, beside which there are no zeros; None: zero. GGUF's types with a minimum
        have them, and the minimum is no multiple of the scale.
      group_of: int32 [K], the index along G of each input. A slice may begin inside a group, and the groups of a GPTQ
        checkpoint with `desc_act` lie in any order.
    """

    codes: np.ndarray
    scales: np.ndarray
    zeros: np.ndarray | None
    group_of: np.ndarray
    offsets: np.ndarray | None = None

    def dequantise(self, dtype: np.typing.DTypeLike) -> np.ndarray:
        """The weights [..., N, K]: the differences and the product in float32, then rounded to `dtype`."""
        dense = to_float32(self.codes)
        runs = dense.reshape(*self.scales.shape, -1) if self._in_runs() else None

        def each(values: np.ndarray) -> np.ndarray:
            return self.by_input(values) if runs is None else values[..., None]

        target = dense if runs is None else runs
        if self.zeros is not None:
            target -= each(self.zeros.astype(np.float32))
        with np.errstate(over="ignore"):  # what exceeds the dtype is infinite, and the caller's to judge
            target *= each(self.scales)
            if self.offsets is not None:
                target -= each(self.offsets)
            return dense.astype(dtype, copy=False)

    def _in_runs(self) -> bool:
        """Whether the groups are whole and follow one another, so that a scale for each input need not be written."""
        size, rest = divmod(len(self.group_of), max(1, self.scales.shape[-1]))
        return not rest and np.array_equal(self.group_of, np.arange(len(self.group_of)) // max(1, size))

    def by_input(self, values: np.ndarray) -> np.ndarray:
        """[..., N, G] as [..., N, K], or as [..., N, 1] where all inputs are one group."""
        return values if values.shape[-1] == 1 else np.take(values, self.group_of, axis=-1)


class QuantisedTensor(Protocol):
    """One weight of a checkpoint, by its sidecar tensors.

    Attributes:
      name: of the float tensor that it stands for, such as `X.weight`.
      shape: [out, in], or [experts, out, in].
      outer_axis: the axis of `shape` whose slices lie in the longest runs of the files.
    """

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def outer_axis(self) -> int: ...

    def read(self, index: Index) -> QuantisedSlice:
        """The slice at `index`: one slice of step 1 per axis of `shape`, with both ends given.

        Cuts may lie anywhere, inside a packed word or a group, too. Raises CheckpointError for values that cannot be:
        NaN codes, scales that are negative or not finite, groups that do not exist.
        """
        ...


@runtime_checkable
class ListedGroups(Protocol):
    """A `QuantisedTensor` whose groups need not follow one another."""

    def input_groups(self) -> np.ndarray:
        """int32 [in]: the group of every input."""
        ...
