"""`WidenedTensor`: a quantised weight in the place of a float tensor, dequantised slice by slice as it is read."""

import dataclasses
from typing import TypeVar

import ml_dtypes
import numpy as np

from jaxserve.errors import CheckpointError
from jaxserve.models.layout import Index
from jaxserve.models.quantised.slices import QuantisedSlice, QuantisedTensor

_T = TypeVar("_T")
_LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)  # of both dtypes that a model can have
_SAFE_SCALE = _LARGEST / 2**17  # no difference of codes and zeros is larger than that power


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WidenedTensor:
    """Reads as a float32 tensor (`safetensors_files.ReadableTensor`). A reader takes a few megabytes at once.

    `in_major`: the weight rules ask for [..., in, out].
    """

    source: QuantisedTensor
    in_major: bool

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def dtype(self) -> str:
        return "float32"

    @property
    def shape(self) -> tuple[int, ...]:
        return turned(self.source.shape, self.in_major)

    @property
    def outer_axis(self) -> int:
        axes = tuple(range(len(self.source.shape)))
        return turned(axes, self.in_major).index(self.source.outer_axis)

    def read(self, index: Index) -> np.ndarray:
        """The weights at `index`. Raises CheckpointError for values that cannot be, or that no dtype here can hold."""
        found = self.source.read(turned(index, self.in_major))
        check_range(found, self.name)
        dense = found.dequantise(np.float32)
        return dense.swapaxes(-1, -2) if self.in_major else dense


def check_range(found: QuantisedSlice, name: str) -> None:
    """Raises CheckpointError where a weight is larger than any dtype here can hold."""
    if found.scales.max(initial=0) <= _SAFE_SCALE:
        return
    largest = float(np.abs(found.dequantise(np.float32)).max())
    if largest > _LARGEST:
        raise CheckpointError(
            f"{name}: a scale of {float(found.scales.max()):.3g} makes a weight of {largest:.3g}, but bfloat16 ends at "
            f"{_LARGEST:.3g}; the checkpoint is damaged: fetch it again, or quantise it again"
        )


def turned(axes: tuple[_T, ...], in_major: bool) -> tuple[_T, ...]:
    """What belongs to the axes [..., out, in], or to [..., in, out], in the other order where a file is `in_major`."""
    return (*axes[:-2], axes[-1], axes[-2]) if in_major else axes
