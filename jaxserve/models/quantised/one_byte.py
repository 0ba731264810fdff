"""Weights with one code to a byte: int8 and float8, as compressed-tensors and Hugging Face's fp8 store them."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxserve.models.layout import Index
from jaxserve.models.quantised.checks import check_codes, expect, fail
from jaxserve.models.quantised.groups import group_range
from jaxserve.models.quantised.scales import FLOATS, ScaleGrid
from jaxserve.models.quantised.scheme import beside
from jaxserve.models.quantised.slices import QuantisedSlice
from jaxserve.models.safetensors_files import TensorSource

Grid = tuple[int | None, int | None]  # outputs and inputs of one scale; None: all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OneByteTensor:
    """A `QuantisedTensor`."""

    name: str
    codes: TensorSource
    grid: ScaleGrid
    zeros: ScaleGrid | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def outer_axis(self) -> int:
        return 0

    def read(self, index: Index) -> QuantisedSlice:
        outputs, inputs = index
        codes = self.codes.read(index)
        if codes.dtype.kind != "i":
            check_codes(codes, self.codes, (outputs.start, inputs.start))
        scales, group_of = self.grid.read(outputs, inputs)
        zeros = None
        if self.zeros is not None:
            zeros = self.zeros.read_stored(outputs, group_range(inputs, self.zeros.columns)).astype(np.int16)
        return QuantisedSlice(codes=codes, scales=scales, zeros=zeros, group_of=group_of)


def open_one_byte(
    name: str, tensors: Mapping[str, TensorSource], *, dtype: str, grid: Grid, scale: str, zero: str | None = None
) -> OneByteTensor:
    """The weight `name`, whose codes have that name. `scale`, `zero`: suffixes of its sidecars.

    Raises CheckpointError.
    """
    codes = expect(tensors[name], (dtype,))
    if len(codes.shape) != 2:
        fail(codes, f"its shape is {list(codes.shape)}, but a quantised weight has two axes")
    dtypes = (*FLOATS, "float8_e8m0fnu")
    zeros = None if zero is None else tensors.get(beside(name, zero))
    return OneByteTensor(
        name=name,
        codes=codes,
        grid=ScaleGrid.open(tensors[beside(name, scale)], codes, codes.shape, block=grid, dtypes=dtypes),
        zeros=None if zeros is None else ScaleGrid.open(zeros, codes, codes.shape, block=grid, dtypes=("int8",)),
    )
