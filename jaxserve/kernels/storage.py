"""`Storage` and `Arithmetic`: how the numbers of a weight lie, and in what its products are computed.

A weight of N outputs and K inputs has a code for each number, a scale for each run of `group` inputs, and, where codes
are not symmetric, a zero beside it:

    w[n, k] = (codes[n, k] - zeros[n, k // group]) * scales[n, k // group]

An arithmetic never depends on how many rows there are, on the other rows, or on how many devices share the weight.
"""

import dataclasses
import math
from typing import Literal

import ml_dtypes
import numpy as np

CODES: dict[str, tuple[int, float, np.dtype]] = {
    # bits, the magnitude that a scale is chosen for, and the element type of arrays
    "int8": (8, 127.0, np.dtype(np.int8)),
    "int4": (4, 7.5, np.dtype(ml_dtypes.int4)),  # from -8 to 7: half a step of the largest numbers is cut off
    "float8_e4m3fn": (8, 448.0, np.dtype(ml_dtypes.float8_e4m3fn)),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How the numbers of one weight lie.

    Attributes:
      code: a name of `CODES`.
      group: successive inputs that share a scale; None: all of them.
      zeros: groups have zeros, too.
    """

    code: str
    group: int | None = None
    zeros: bool = False

    @property
    def bits(self) -> float:
        """Of memory for each number, with its share of a float32 scale and an int16 zero; rows are taken as long."""
        of_group = 0.0 if self.group is None else (32 + 16 * self.zeros) / self.group
        return CODES[self.code][0] + of_group

    def dtype(self, backend: str) -> np.dtype:
        """Of arrays of codes. Compiled programs of XLA:CPU refuse arrays of int4, so there each has a byte."""
        return np.dtype(np.int8) if (self.code, backend) == ("int4", "cpu") else CODES[self.code][2]

    def refined(self, size: int) -> "Storage":
        """The same numbers with groups that divide `size`, by repeating scales; exact."""
        return self if self.group is None else dataclasses.replace(self, group=math.gcd(self.group, size))

    def __str__(self) -> str:
        by = "a scale for each row" if self.group is None else f"a scale for each {self.group} inputs"
        return f"{self.code}, {by}{' and a zero' if self.zeros else ''}"


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
    """float32 scales that put numbers of these magnitudes into the range of codes."""
    return (largest / np.float32(CODES[storage.code][1])).astype(np.float32)


def round_to_codes(matrix: np.ndarray, scales: np.ndarray, storage: Storage) -> np.ndarray:
    """Each float32 number of [N, K] over its scale (any shape that broadcasts), rounded to the nearest code.

    Integer codes come as int8, whatever their bits. A scale of zero is of zeros alone.
    """
    steps = np.divide(matrix, scales, out=np.zeros_like(matrix), where=np.broadcast_to(scales > 0, matrix.shape))
    if storage.code == "float8_e4m3fn":
        return np.clip(steps, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    most = 2 ** (CODES[storage.code][0] - 1)
    return np.clip(np.rint(steps), -most, most - 1).astype(np.int8)
