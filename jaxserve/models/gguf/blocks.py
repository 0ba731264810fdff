"""The element types of GGUF in the normal form: weights in blocks, each with its scales beside its codes.

    X  uint8 [..., out, in / block, bytes of a block]

A block is of 32 inputs, or of 256 for the types that end in K, which cut it into groups with scales of few bits. Types
with a minimum for each group are w = codes * scales - offsets. Facts: ggml-quants.c and gguf-py of llama.cpp.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from ml_dtypes import float4_e2m1fn

from jaxserve.kernels.block_codes import BLOCK_CODES
from jaxserve.kernels.storage import Storage
from jaxserve.models.layout import Index
from jaxserve.models.quantised.checks import fail
from jaxserve.models.quantised.fp4 import decode_exponents
from jaxserve.models.quantised.groups import group_range, groups_of
from jaxserve.models.quantised.scheme import Format
from jaxserve.models.quantised.slices import QuantisedSlice
from jaxserve.models.safetensors_files import TensorSource

# Types that are read as they are, with NumPy's names for them.
FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class Decoded(NamedTuple):
    """Blocks [..., B] decoded: codes [..., B, block], scales and offsets float32 [..., B, groups of a block]."""

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockFormat(Format):
    """One element type.

    Attributes:
      block, group: inputs of a block and of a scale.
      code: what the codes are kept as (`kernels.storage`).
      minima: groups have offsets.
    """

    name: str
    bits: int
    block: int
    group: int
    code: str
    decode: Callable[[np.ndarray], Decoded]
    minima: bool = False

    @property
    def storage(self) -> Storage | None:
        # Codes from 0 to 15 are -8 to 7 in four bits.
        zeros = self.minima and self.code == "int4"
        blocks = self.name if self.name in BLOCK_CODES else None
        return Storage(code=self.code, group=self.group, zeros=zeros, offsets=self.minima, blocks=blocks)

    def required(self, name: str) -> tuple[str, ...]:
        return (name,)

    def open(self, name: str, tensors: Mapping[str, TensorSource]) -> "BlockTensor":
        return BlockTensor(format=self, blocks=tensors[name])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockTensor:
    """A `QuantisedTensor`. `blocks`: uint8, as the head of this module says."""

    format: BlockFormat
    blocks: TensorSource

    @property
    def name(self) -> str:
        return self.blocks.name

    @property
    def shape(self) -> tuple[int, ...]:
        *outer, count, _ = self.blocks.shape
        return (*outer, count * self.format.block)

    @property
    def outer_axis(self) -> int:
        return len(self.shape) - 2  # of experts, too: all of a layer would be too much to hold at once

    def read(self, index: Index) -> QuantisedSlice:
        *outer, inputs = index
        block, group = self.format.block, self.format.group
        blocks = group_range(inputs, block)
        first = blocks.start * block  # input at which what is read begins
        raw = self.blocks.read((*outer, blocks, slice(0, self.blocks.shape[-1])))
        decoded = self.format.decode(raw)
        groups = group_range(slice(inputs.start - first, inputs.stop - first), group)
        origin = [cut.start for cut in outer]
        return QuantisedSlice(
            codes=_joined(decoded.codes)[..., inputs.start - first : inputs.stop - first],
            scales=self._checked("scales", _joined(decoded.scales)[..., groups], origin, groups, first),
            zeros=None,
            offsets=None
            if decoded.offsets is None
            else self._checked("minima", _joined(decoded.offsets)[..., groups], origin, groups, first),
            group_of=groups_of(inputs, group),
        )

    def _checked(self, what: str, values: np.ndarray, origin: list[int], groups: slice, first: int) -> np.ndarray:
        bad = ~np.isfinite(values)
        if bad.any():
            *rows, at = (int(i) for i in np.argwhere(bad)[0])
            where = [row + start for row, start in zip(rows, origin, strict=True)]
            inputs = first + (groups.start + at) * self.format.group
            fail(
                self.blocks,
                f"{int(bad.sum())} {what} are NaN or infinite, the first is {float(values[(*rows, at)])} at row "
                f"{where}, inputs {inputs} to {inputs + self.format.group - 1}",
                "the file is damaged: fetch it again",
            )
        return values


def _joined(values: np.ndarray) -> np.ndarray:
    """[..., B, n] as [..., B * n]."""
    return values.reshape(*values.shape[:-2], values.shape[-2] * values.shape[-1])


def _half(raw: np.ndarray, start: int) -> np.ndarray:
    """The float16 at a byte of each block, as float32 [..., B, 1]."""
    return np.ascontiguousarray(raw[..., start : start + 2]).view("<f2").astype(np.float32)


def _halves(octets: np.ndarray) -> np.ndarray:
    """Two codes to a byte: the low halves of all bytes, then the high ones."""
    return np.concatenate([octets & 15, octets >> 4], axis=-1)


def _q8_0(raw: np.ndarray) -> Decoded:
    return Decoded(raw[..., 2:].view(np.int8), _half(raw, 0))


def _q4_0(raw: np.ndarray) -> Decoded:
    return Decoded(_halves(raw[..., 2:]).view(np.int8) - np.int8(8), _half(raw, 0))


def _q4_1(raw: np.ndarray) -> Decoded:
    return Decoded(_halves(raw[..., 4:]), _half(raw, 0), -_half(raw, 2))


def _fifth_bits(octets: np.ndarray) -> np.ndarray:
    """The fifth bits of the 32 codes of a block, from its four bytes of them, in their place."""
    return np.unpackbits(octets, axis=-1, bitorder="little") << 4


def _q5_0(raw: np.ndarray) -> Decoded:
    codes = _halves(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])
    return Decoded(codes.view(np.int8) - np.int8(16), _half(raw, 0))


def _q5_1(raw: np.ndarray) -> Decoded:
    return Decoded(_halves(raw[..., 8:]) | _fifth_bits(raw[..., 4:8]), _half(raw, 0), -_half(raw, 2))


def _mxfp4(raw: np.ndarray) -> Decoded:
    scales = decode_exponents(np.ascontiguousarray(raw[..., :1]))
    return Decoded(_halves(raw[..., 1:]).view(float4_e2m1fn), scales)


def _scales_and_minima(raw: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of Q4_K and Q5_K: a scale and a minimum for each of 8 groups, of 6 bits each in 12 bytes, times two float16."""
    first, second, third = (raw[..., start : start + 4] for start in (4, 8, 12))
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=-1)
    minima = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=-1)
    return _half(raw, 0) * scales, _half(raw, 2) * minima


def _q4_k(raw: np.ndarray) -> Decoded:
    octets = raw[..., 16:].reshape(*raw.shape[:-1], 4, 32)  # each serves two groups
    scales, minima = _scales_and_minima(raw)
    return Decoded(_halves(octets).reshape(*raw.shape[:-1], 256), scales, minima)


def _q5_k(raw: np.ndarray) -> Decoded:
    octets = raw[..., 48:].reshape(*raw.shape[:-1], 4, 32)
    low = _halves(octets).reshape(*raw.shape[:-1], 8, 32)
    high = raw[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1  # bit g of byte i: of code i of group g
    scales, minima = _scales_and_minima(raw)
    return Decoded((low | high << 4).reshape(*raw.shape[:-1], 256), scales, minima)


def _q6_k(raw: np.ndarray) -> Decoded:
    outer = raw.shape[:-1]
    low = _halves(raw[..., :128].reshape(*outer, 2, 64))  # [..., 2, 128]: each half of the block by itself
    high = raw[..., 128:192].reshape(*outer, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
    codes = low | high.reshape(*outer, 2, 128) << 4
    scales = _half(raw, 208) * raw[..., 192:208].view(np.int8)
    return Decoded(codes.reshape(*outer, 256).view(np.int8) - np.int8(32), scales)


def _format(
    name: str,
    bits: int,
    block: int,
    group: int,
    code: str,
    decode: Callable[[np.ndarray], Decoded],
    *,
    minima: bool = False,
) -> BlockFormat:
    return BlockFormat(name=name, bits=bits, block=block, group=group, code=code, decode=decode, minima=minima)


# By the names of `gguf_file`.
BLOCKS = {
    found.name: found
    for found in (
        _format("Q4_0", 4, 32, 32, "int4", _q4_0),
        _format("Q4_1", 4, 32, 32, "int4", _q4_1, minima=True),
        _format("Q5_0", 5, 32, 32, "int8", _q5_0),
        _format("Q5_1", 5, 32, 32, "int8", _q5_1, minima=True),
        _format("Q8_0", 8, 32, 32, "int8", _q8_0),
        _format("Q4_K", 4, 256, 32, "int4", _q4_k, minima=True),
        _format("Q5_K", 5, 256, 32, "int8", _q5_k, minima=True),
        _format("Q6_K", 6, 256, 16, "int8", _q6_k),
        _format("MXFP4", 4, 32, 32, "float4_e2m1fn", _mxfp4),
    )
}
