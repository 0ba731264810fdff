"""`Rounded`: a weight as codes and scales; and rounding to nearest, which looks at nothing but the weight."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.storage import CODES, Storage, largest_by_row, round_to_codes, scales_for
from jaxserve.models.quantised.bits import to_float32


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rounded:
    """A weight [N, K]: w = codes * scales.

    Attributes:
      codes: int8 or float8 [N, K], whatever the bits of a code.
      scales: float32 [N, G], numbers that the dtype of scales in the file holds exactly; above 0.
    """

    codes: np.ndarray
    scales: np.ndarray

    def numbers(self) -> np.ndarray:
        """float32 [N, K]."""
        return to_float32(self.codes) * spread(self.scales, self.codes.shape[1])


def spread(scales: np.ndarray, num_in: int) -> np.ndarray:
    """[N, G] as [N, K]."""
    return np.repeat(scales, num_in // scales.shape[1], axis=1)


def stored_scales(scales: np.ndarray, scale_dtype: str) -> np.ndarray:
    """The nearest that a file holds, as float32; 1 where all numbers are 0, or too small for the dtype."""
    held = scales.astype(np.dtype(scale_dtype)).astype(np.float32)
    return np.where(held > 0, held, np.float32(1))


def to_nearest(matrix: np.ndarray, storage: Storage, scale_dtype: str) -> Rounded:
    """float32 [N, K] in the nearest codes, each group by its largest magnitude."""
    rows, columns = matrix.shape
    grouped = np.ascontiguousarray(matrix).reshape(-1, storage.group or columns)
    scales = stored_scales(scales_for(largest_by_row(grouped), storage), scale_dtype)[:, None]
    codes = round_to_codes(grouped, scales, storage)
    return Rounded(codes=codes.reshape(rows, columns), scales=scales.reshape(rows, -1))


def nearest_codes(steps: Float[Array, "..."], storage: Storage) -> Float[Array, "..."]:
    """The code nearest to each number, as float32, inside a compiled function (`storage.round_to_codes`)."""
    if storage.code == "float8_e4m3fn":
        return jnp.clip(steps, -448, 448).astype(jnp.float8_e4m3fn).astype(jnp.float32)
    most = 2 ** (CODES[storage.code][0] - 1)
    return jnp.clip(jnp.round(steps), -most, most - 1)


def output_error(matrix: np.ndarray, rounded: np.ndarray, gram: np.ndarray) -> float:
    """Of what a product gives on the inputs whose sum of x x^T is `gram`: the squared error over the squares.

    `matrix`, `rounded`: [N, K]; 0 where the product is 0 throughout.
    """
    difference = matrix - rounded
    squares = float(np.vdot(matrix @ gram, matrix))
    return float(np.vdot(difference @ gram, difference)) / squares if squares > 0 else 0.0
