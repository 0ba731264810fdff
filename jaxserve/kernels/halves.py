"""Weights [2, F, *in] in panels: gate and up, of which a panel has the same columns side by side.

So the item of work that multiplies with a panel can multiply the halves with each other, too (`cpu.gating`). The first
W / 2 rows of panel p are rows p * W / 2 and following of the first half, the others the same rows of the second half;
rows past the last are zeros. `multiply` of such a weight puts the columns in order again.
"""

import math
import os

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.cpu.scratch import GatedRooms

# Activations that end a product, as x * sigmoid(a x + b x^3): a and b.
_GELU = 2 * math.sqrt(2 / math.pi)
FACTORS = {"silu": (1.0, 0.0), "gelu_tanh": (_GELU, 0.044715 * _GELU)}


def has_halves(out_shape: tuple[int, ...]) -> bool:
    """Whether a weight with these axes of outputs lies so."""
    return len(out_shape) == 2 and out_shape[0] == 2


def num_panels(out_shape: tuple[int, ...], width: int) -> int:
    """Panels of a weight with these axes of outputs."""
    return -(-out_shape[1] // (width // 2)) if has_halves(out_shape) else -(-math.prod(out_shape) // width)


def side_by_side(rows: np.ndarray, out_shape: tuple[int, ...], width: int) -> np.ndarray:
    """Rows [out, ...] in the order of panels, with zeros in the place of those past the last half of a panel."""
    if not has_halves(out_shape):
        return rows
    half, panels = width // 2, num_panels(out_shape, width)
    padded = np.zeros((panels, 2, half, *rows.shape[1:]), rows.dtype)
    whole, rest = divmod(out_shape[1], half)
    for number, part in enumerate(rows.reshape(*out_shape, *rows.shape[1:])):
        padded[:whole, number] = part[: whole * half].reshape(whole, half, *part.shape[1:])
        if rest:
            padded[whole, number, :rest] = part[whole * half :]
    return padded.reshape(panels * width, *rows.shape[1:])


def to_panels(rows: Float[Array, "N r"], out_shape: tuple[int, ...], width: int) -> Float[Array, "C r"]:
    """`side_by_side` on the device, with zeros behind the last row, up to the end of its panel."""
    size = num_panels(out_shape, width) * width
    if not has_halves(out_shape):
        return jnp.pad(rows, ((0, size - rows.shape[0]), (0, 0)))
    both = rows.reshape(2, out_shape[1], -1)
    both = jnp.pad(both, ((0, 0), (0, size // 2 - out_shape[1]), (0, 0)))
    return both.reshape(2, -1, width // 2, both.shape[2]).swapaxes(0, 1).reshape(size, -1)


def from_panels(out: Float[Array, "T C"], out_shape: tuple[int, ...], width: int) -> Float[Array, "T ..."]:
    """Columns of panels as [T, *out]."""
    if not has_halves(out_shape):
        return out[:, : math.prod(out_shape)].reshape(-1, *out_shape)
    by_panel = out.reshape(out.shape[0], -1, 2, width // 2)
    return by_panel.swapaxes(1, 2).reshape(out.shape[0], 2, -1)[:, :, : out_shape[1]]


def rooms_of(num_rows: int, width: int, begin: int = 0) -> GatedRooms:
    """The scratch memory of a gated product, after `begin` bytes of others."""
    return GatedRooms.of(num_rows=num_rows, width=width, workers=os.cpu_count() or 1, begin=begin)


def gating_numbers(activation: str, dtype: jnp.dtype, rooms: GatedRooms) -> Array:
    """What a kernel has to know of the end of a gated product, int32 [5]: the factors as the bits of float32, whether
    results are bfloat16, where the rooms begin, and of how many workers they are."""
    factors = np.asarray(FACTORS[activation], np.float32).view(np.int32)
    assert dtype in (jnp.float32, jnp.bfloat16), dtype
    return jnp.asarray([*factors, int(dtype == jnp.bfloat16), rooms.begin, rooms.workers], jnp.int32)


def gated_results(num_rows: int, columns: int, dtype: jnp.dtype, rooms: GatedRooms) -> list[jax.ShapeDtypeStruct]:
    """The results of a gated product: the columns of all panels, and scratch memory."""
    return [jax.ShapeDtypeStruct((num_rows, columns), dtype), jax.ShapeDtypeStruct((rooms.num_bytes,), jnp.uint8)]
