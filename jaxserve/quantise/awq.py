"""AWQ (Lin et al., 2023): inputs that are large get finer weights, by a scale that the layer before takes back.

Input k is divided by s_k, and column k of the weight multiplied by it: the same product, but the rounding of a group
then serves the columns that matter. s = m^r with the mean magnitude m of each input, and the r of [0, 1] that makes the
error of the product smallest. The paper's clipping of the largest weights is not done.

Products that share their inputs (query, key and value; gate and up) share s. `folding` says who takes it back.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.storage import CODES, Storage
from jaxserve.quantise.rounding import nearest_codes

RATIOS = np.linspace(0, 1, 21, dtype=np.float32)


def search_scales(weights: Sequence[tuple[np.ndarray, Storage]], gram: np.ndarray, magnitude: np.ndarray) -> np.ndarray:
    """float32 [K]: the scales of inputs, their largest times their smallest 1; all 1 where nothing is better.

    Args:
      weights: float32 [N, K], and what each is rounded to.
      gram: the sum of x x^T over inputs [K, K].
      magnitude: of each input, its mean [K].
    """
    candidates = np.stack([scales_at(magnitude, float(ratio)) for ratio in RATIOS])
    losses = np.zeros(len(candidates))
    for matrix, storage in weights:
        found = _losses(jnp.asarray(matrix), jnp.asarray(gram), jnp.asarray(candidates), storage=storage)
        losses += np.asarray(found, np.float64)
    return candidates[int(np.argmin(losses))]


def scales_at(magnitude: np.ndarray, ratio: float) -> np.ndarray:
    """float32 [K]: magnitude^ratio, around 1. An input that is always 0 counts as a ten thousandth of the largest."""
    largest = float(magnitude.max(initial=0)) or 1.0
    scales = np.maximum(magnitude / largest, 1e-4) ** ratio
    return (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)


@functools.partial(jax.jit, static_argnames="storage")
def _losses(
    matrix: Float[Array, "N K"], gram: Float[Array, "K K"], candidates: Float[Array, "C K"], *, storage: Storage
) -> Float[Array, " C"]:
    """Squared errors of the product, for each of the candidates."""

    def loss(scales: Float[Array, " K"]) -> Float[Array, ""]:
        wide = matrix * scales
        groups = wide.reshape(len(wide), -1, storage.group or wide.shape[1])
        of_group = jnp.abs(groups).max(axis=2, keepdims=True) / jnp.float32(CODES[storage.code][1])
        steps = groups / jnp.where(of_group > 0, of_group, 1)
        codes = nearest_codes(steps, storage)
        difference = (codes * of_group).reshape(wide.shape) / scales - matrix
        return jnp.vdot(jnp.matmul(difference, gram, precision=jax.lax.Precision.HIGHEST), difference)

    return jax.lax.map(loss, candidates)
