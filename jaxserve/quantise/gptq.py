"""GPTQ (Frantar et al., 2022): columns are rounded one after the other, and later ones make up for the errors.

For inputs x, rounding the weights w of a row to q should keep (w - q) H (w - q)^T small, H = sum x x^T. When column j
is rounded, the best change of the columns behind it is -(w_j - q_j) / U_jj * U_j, where U is the upper factor of the
inverse, H^-1 = U^T U. All rows share U. The order of columns is that of the weight, so that groups follow one another.

The scales of a group are taken when its first column is reached, from the weights as the earlier columns have left
them; those of a whole row from the weight itself.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.storage import CODES, Storage
from jaxserve.quantise.rounding import Rounded, nearest_codes, stored_scales

_BLOCK = 128  # columns whose changes are kept back from the columns behind them, where a row has one scale
_HIGHEST = jax.lax.Precision.HIGHEST
_MANTISSAS = {"float32": (8, 23), "bfloat16": (8, 7), "float16": (5, 10)}  # bits of exponent and of mantissa


def solve(
    matrix: np.ndarray, gram: np.ndarray, storage: Storage, scale_dtype: str, *, damping: float = 0.01
) -> Rounded:
    """float32 [N, K] in codes, for inputs with the sum of x x^T `gram` [K, K].

    `damping`, of the mean of H's diagonal, is added to it. An input that was always 0 is rounded to nearest.
    """
    columns = matrix.shape[1]
    upper = inverse_factor(gram, damping).astype(np.float32)
    block = storage.group or _BLOCK
    pad = -columns % block
    padded = np.pad(matrix, ((0, 0), (0, pad)))
    upper = np.pad(upper, ((0, pad), (0, pad)))
    upper[range(columns, columns + pad), range(columns, columns + pad)] = 1
    of_rows = stored_scales(np.abs(matrix).max(axis=1, keepdims=True) / np.float32(CODES[storage.code][1]), scale_dtype)
    steps, scales = _solve(
        jnp.asarray(padded),
        jnp.asarray(upper),
        jnp.asarray(of_rows),
        storage=storage,
        block=block,
        scale_dtype=scale_dtype,
    )
    codes = np.asarray(steps)[:, :columns].astype(storage.dtype("cpu"))
    return Rounded(codes=codes, scales=np.asarray(scales).T if storage.group else of_rows)


def inverse_factor(gram: np.ndarray, damping: float) -> np.ndarray:
    """float64 [K, K], upper: U with (H + damping)^-1 = U^T U.

    With the order of columns turned around, H = L L^T; turned back, H = R R^T with R upper, and U = R^-1.
    """
    hessian = gram.astype(np.float64)
    diagonal = np.diag_indices(len(hessian))
    mean = float(hessian[diagonal].mean())
    hessian[diagonal] += np.where(hessian[diagonal] == 0, mean or 1.0, 0) + damping * mean
    lower = np.linalg.cholesky(hessian[::-1, ::-1])
    return np.triu(np.linalg.inv(lower)[::-1, ::-1])


@functools.partial(jax.jit, static_argnames=("storage", "block", "scale_dtype"))
def _solve(
    matrix: Float[Array, "N K"],
    upper: Float[Array, "K K"],
    of_rows: Float[Array, "N 1"],
    *,
    storage: Storage,
    block: int,
    scale_dtype: str,
) -> tuple[Float[Array, "N K"], Float[Array, "G N"]]:
    """Codes as float32, and the scales of each block (those of rows where there are no groups)."""
    num_rows, depth = matrix.shape

    def turn(index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        weights, codes, scales = carry
        start = index * block
        part = jax.lax.dynamic_slice(weights, (0, start), (num_rows, block))
        factors = jax.lax.dynamic_slice(upper, (start, 0), (block, depth))
        square = jax.lax.dynamic_slice(factors, (0, start), (block, block))
        scale = _scales(part, storage, scale_dtype) if storage.group else of_rows[:, 0]

        def column(at: Array, inner: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            left, done, errors = inner
            now = left[:, at]
            code = nearest_codes(now / scale, storage)
            error = (now - code * scale) / square[at, at]
            left = left - error[:, None] * square[at]  # of the columns before it the factor is 0
            return left, done.at[:, at].set(code), errors.at[:, at].set(error)

        _, done, errors = jax.lax.fori_loop(0, block, column, (part, jnp.zeros_like(part), jnp.zeros_like(part)))
        behind = jnp.where(jnp.arange(depth) >= start + block, factors, 0)
        weights = weights - jnp.matmul(errors, behind, precision=_HIGHEST)
        codes = jax.lax.dynamic_update_slice(codes, done, (0, start))
        return weights, codes, scales.at[index].set(scale)

    num_blocks = depth // block
    empty = (matrix, jnp.zeros_like(matrix), jnp.zeros((num_blocks, num_rows), jnp.float32))
    _, codes, scales = jax.lax.fori_loop(0, num_blocks, turn, empty)
    return codes, scales


def _scales(part: Float[Array, "N B"], storage: Storage, scale_dtype: str) -> Float[Array, " N"]:
    """`rounding.stored_scales` of the largest magnitudes."""
    exact = jnp.abs(part).max(axis=1) / jnp.float32(CODES[storage.code][1])
    # Not two conversions: XLA takes those out, since it may compute more exactly than it is told to.
    held = jax.lax.reduce_precision(exact, *_MANTISSAS[scale_dtype])
    return jnp.where(held > 0, held, 1)
