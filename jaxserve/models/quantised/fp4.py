"""Weights with two float4 codes to a byte, the first in the low half: MXFP4 and NVFP4."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from ml_dtypes import float8_e8m0fnu

from jaxserve.models.layout import Index
from jaxserve.models.quantised.bits import to_float32, unpack_fp4, words_of
from jaxserve.models.quantised.checks import expect, fail
from jaxserve.models.quantised.scales import ScaleGrid
from jaxserve.models.quantised.scheme import beside
from jaxserve.models.quantised.slices import QuantisedSlice
from jaxserve.models.safetensors_files import TensorSource


def decode_exponents(stored: np.ndarray) -> np.ndarray:
    """uint8 exponents as float32 2^(e - 127), NaN for 255."""
    return to_float32(stored.view(float8_e8m0fnu))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScaleKind:
    """Element types in which a format stores its scales, and how one is read."""

    dtypes: tuple[str, ...]
    decode: Callable[[np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fp4Tensor:
    """A `QuantisedTensor`. `shared`: one number that divides all scales, where the format has it."""

    name: str
    shape: tuple[int, ...]
    codes: TensorSource
    grid: ScaleGrid
    shared: TensorSource | None

    @property
    def outer_axis(self) -> int:
        return 0

    def read(self, index: Index) -> QuantisedSlice:
        outputs, inputs = index
        octets, kept = words_of(inputs, 2)
        scales, group_of = self.grid.read(outputs, inputs)
        if self.shared is not None:
            scales = self._divided(scales, self.shared)
        codes = unpack_fp4(self.codes.read((outputs, octets)))[:, kept]
        return QuantisedSlice(codes=codes, scales=scales, zeros=None, group_of=group_of)

    def _divided(self, scales: np.ndarray, by: TensorSource) -> np.ndarray:
        value = np.float32(by.read(tuple(slice(0, size) for size in by.shape)).reshape(-1)[0])
        with np.errstate(all="ignore"):
            divided = scales / value
        if not (0 < value < np.inf and np.isfinite(divided).all()):
            fail(by, f"it is {value}, by which the scales of {self.codes.name} cannot be divided")
        return divided


def open_fp4(
    name: str, tensors: Mapping[str, TensorSource], *, group: int, scales: ScaleKind, shared: str | None = None
) -> Fp4Tensor:
    """The weight of `weight_packed` and `weight_scale`. `shared`: the suffix of what divides the scales.

    Raises CheckpointError.
    """
    codes = expect(tensors[beside(name, "weight_packed")], ("uint8",))
    if len(codes.shape) != 2:
        fail(codes, f"its shape is {list(codes.shape)}, but packed codes have two axes")
    shape = (codes.shape[0], 2 * codes.shape[1])
    return Fp4Tensor(
        name=name,
        shape=shape,
        codes=codes,
        grid=ScaleGrid.open(
            tensors[beside(name, "weight_scale")],
            codes,
            shape,
            block=(1, group),
            dtypes=scales.dtypes,
            decode=scales.decode,
        ),
        shared=None if shared is None else _one(tensors[beside(name, shared)]),
    )


def _one(tensor: TensorSource) -> TensorSource:
    if set(tensor.shape) - {1}:
        fail(tensor, f"its shape is {list(tensor.shape)}, but it must hold one number")
    return expect(tensor, ("float32",))
