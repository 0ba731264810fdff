"""`Storage` and `Arithmetic`: how the numbers of a weight lie, and in what its products are computed.

A weight of N outputs and K inputs has a code for each number, a scale for each run of `group` inputs, and, where codes
are not symmetric, a zero beside it:

    w[n, k] = (codes[n, k] - zeros[n, k // group]) * scales[n, k // group] - offsets[n, k // group]

An arithmetic never depends on how many rows there are, on the other rows, or on how many devices share the weight.
"""

import dataclasses
import math
from typing import Literal, TypeVar

import ml_dtypes
import numpy as np
from jaxtyping import Array

from jaxserve.kernels.block_codes import BLOCK_CODES

T = TypeVar("T", np.ndarray, Array)

CODES: dict[str, tuple[int, float, np.dtype]] = {
    # bits, the magnitude that a scale is chosen for, and the element type of arrays
    "int8": (8, 127.0, np.dtype(np.int8)),
    "int4": (4, 7.5, np.dtype(ml_dtypes.int4)),  # from -8 to 7: half a step of the largest numbers is cut off
    "float8_e4m3fn": (8, 448.0, np.dtype(ml_dtypes.float8_e4m3fn)),
    # Whole numbers: the n-th magnitude of the format, n below 8, with the sign. `decode_float4` gives twice the value.
    "float4_e2m1fn": (4, 12.0, np.dtype(ml_dtypes.int4)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How the numbers of one weight lie.

    Attributes:
      code: a name of `CODES`.
      group: successive inputs that share a scale; None: all of them.
      zeros: groups have zeros, too.
      offsets: groups have offsets, too (`composed_weight.WithOffsets`).
      ordered: inputs lie in an order of their own (`composed_weight.Reordered`).
      blocks: a name of `block_codes.BLOCK_CODES`, which holds codes, scales and offsets exactly; None: none does.
    """

    code: str
    group: int | None = None
    zeros: bool = False
    offsets: bool = False
    ordered: bool = False
    blocks: str | None = None

    @property
    def bits(self) -> float:
        """Of memory for each number, with its share of a float32 scale, an int16 zero and a float32 offset; rows are
        taken as long."""
        of_group = 0.0 if self.group is None else (32 + 16 * self.zeros + 32 * self.offsets) / self.group
        return CODES[self.code][0] + of_group

    def dtype(self, backend: str) -> np.dtype:
        """Of arrays of codes. Compiled programs of XLA:CPU refuse arrays of int4, so there each has a byte."""
        found = CODES[self.code][2]
        return np.dtype(np.int8) if found == ml_dtypes.int4 and backend == "cpu" else found

    def refined(self, size: int) -> "Storage":
        """The same numbers with groups that divide `size`, by repeating scales; exact."""
        if self.group is None or size % self.group == 0:
            return self
        return dataclasses.replace(self, group=math.gcd(self.group, size), blocks=None)

    @property
    def magnitude(self) -> float:
        """That a scale is chosen for."""
        if self.blocks is None:
            return CODES[self.code][1]
        return 2.0 ** (BLOCK_CODES[self.blocks].bits - 1) - 1

    @property
    def of_codes(self) -> "Storage":
        """Of the weight of codes alone that is inside of one with offsets, or of one that is ordered."""
        return dataclasses.replace(self, offsets=False, ordered=False)

    def __str__(self) -> str:
        by = "a scale for each row" if self.group is None else f"a scale for each {self.group} inputs"
        said = f"{' and an offset' if self.offsets else ''}{', inputs in an order' if self.ordered else ''}"
        return f"{self.code}, {by}{' and a zero' if self.zeros else ''}{said}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """The numbers that products are computed with; sums are float32.

    Attributes:
      activations: 'float': as they are. 'int8': rounded to codes, whose products with integer codes are exact.
      block: inputs of a scale of rounded activations; None: all inputs of a token.
    """

    activations: Literal["float", "int8"] = "float"
    block: int | None = None


FLOAT = Arithmetic()


def array_bytes(size: int, dtype: np.typing.DTypeLike) -> int:
    """Bytes of `size` numbers on a device, where two of four bits share one; NumPy gives each a byte."""
    return -(-size // 2) if np.dtype(dtype) == ml_dtypes.int4 else size * np.dtype(dtype).itemsize


def largest_by_row(matrix: np.ndarray) -> np.ndarray:
    """float32 [N]: the largest magnitude of each row of [N, K]; NaN where a number is."""
    return np.abs(matrix).max(axis=1, initial=0).astype(np.float32)


def scales_for(largest: np.ndarray, storage: Storage) -> np.ndarray:
    """float32 scales that put numbers of these magnitudes into the range of codes. Where blocks hold them, they are
    such as these can hold, and the largest codes are cut off by what that rounds."""
    scales = (largest / np.float32(storage.magnitude)).astype(np.float32)
    if storage.blocks is None:
        return scales
    code = BLOCK_CODES[storage.blocks]
    if code.scales == "float16":
        return scales.astype(np.float16).astype(np.float32)
    by_block = scales.reshape(-1, code.inputs // code.group)
    factors = (by_block.max(axis=1, keepdims=True) / 127).astype(np.float16).astype(np.float32)
    steps = np.divide(by_block, factors, out=np.zeros_like(by_block), where=factors > 0)
    return (factors * np.clip(np.rint(steps), 0, 127)).astype(np.float32).reshape(scales.shape)


def round_to_codes(matrix: np.ndarray, scales: np.ndarray, storage: Storage) -> np.ndarray:
    """Each float32 number of [N, K] over its scale (any shape that broadcasts), rounded to the nearest code.

    Integer codes come as int8, whatever their bits. A scale of zero is of zeros alone.
    """
    steps = np.divide(matrix, scales, out=np.zeros_like(matrix), where=np.broadcast_to(scales > 0, matrix.shape))
    if storage.code == "float8_e4m3fn":
        return np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    if storage.code == "float4_e2m1fn":
        return encode_float4((steps / 2).astype(ml_dtypes.float4_e2m1fn))
    most = 2 ** ((CODES[storage.code][0] if storage.blocks is None else BLOCK_CODES[storage.blocks].bits) - 1)
    return np.clip(np.rint(steps), -most, most - 1).astype(np.int8)


def encode_float4(values: np.ndarray) -> np.ndarray:
    """float4_e2m1fn numbers as the int8 codes that stand for them: -7 to 7. Both zeros are 0."""
    bits = values.view(np.uint8)
    index = (bits & 7).astype(np.int8)
    return np.where(bits & 8, -index, index)


def decode_float4(codes: T) -> T:
    """Twice the numbers of such codes: 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, in the dtype of the codes.

    Without a table, which vector units would look up number by number: the magnitudes lie on three lines.
    """
    return 4 * codes - codes.clip(-4, 4) - 2 * codes.clip(-6, 6)
