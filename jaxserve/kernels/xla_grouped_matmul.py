"""Grouped products by a loop over tiles of rows of one expert each: runs everywhere, and is what GPUs use.

XLA has an operation for this, `lax.ragged_dot`, but outside of TPUs it multiplies all rows with all experts: 128 times
the arithmetic and every weight read, where a token of Qwen3-30B-A3B needs 8 experts. The loop reads only the experts
that have rows, each once for every tile of its rows. Reverse-mode differentiation does not go through a loop whose
number of turns depends on data, so its derivative is written here, as two loops over the same tiles.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels.grouped_matmul import ExpertWeight, GroupedMatmul
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.xla_matmul import DenseWeight

_MIN_TILE, _MAX_TILE = 8, 256  # rows; a turn costs an accelerator tens of microseconds, so many rows take few turns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseExperts:
    """One array [E, *out, in], as experts are loaded."""

    array: Float[Array, "E ..."]

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`. Differentiable by `array` and `x`, in reverse mode and once."""
        return _products(self.array, x, group_sizes)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`."""
        return (axes,)


@jax.custom_vjp
def _products(
    array: Float[Array, "E ..."], x: Float[Array, "M D"], group_sizes: Int[Array, " E"]
) -> Float[Array, "M ..."]:
    def product(expert: Array, first: Array, size: int) -> Array:
        matrix = jax.lax.dynamic_index_in_dim(array, expert, keepdims=False)
        return DenseWeight(array=matrix, num_in=1).multiply(jax.lax.dynamic_slice_in_dim(padded, first, size))

    padded = pad_rows(x, array.shape[0])
    return by_tiles(product, group_sizes, x.shape[0], array.shape[1:-1])


def _saved(array: Array, x: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _products(array, x, group_sizes), (array, x, group_sizes)


def _slopes(saved: tuple[Array, Array, Array], slopes: Float[Array, "M ..."]) -> tuple[Array, Array, None]:
    """Gradients of `array`, the sum of slope times row over each expert's rows, and of `x`, slopes times the expert."""
    array, x, group_sizes = saved
    num_experts = array.shape[0]
    padded_x, padded_slopes = pad_rows(x, num_experts), pad_rows(slopes, num_experts)
    ends = jnp.cumsum(group_sizes)

    def of_rows(expert: Array, first: Array, size: int) -> Array:
        matrix = jax.lax.dynamic_index_in_dim(array, expert, keepdims=False).astype(jnp.float32)
        taken = jax.lax.dynamic_slice_in_dim(padded_slopes, first, size)
        return jnp.tensordot(taken, matrix, axes=matrix.ndim - 1, precision="highest")

    def of_experts(expert: Array, first: Array, size: int, total: Array) -> Array:
        rows = jax.lax.dynamic_slice_in_dim(padded_x, first, size).astype(jnp.float32)
        rows = jnp.where(
            (first + jnp.arange(size) < ends[expert])[:, None], rows, 0
        )  # the others are the next expert's
        taken = jax.lax.dynamic_slice_in_dim(padded_slopes, first, size)
        return total.at[expert].add(jnp.einsum("m...,md->...d", taken, rows, precision="highest"))

    of_array = _over_tiles(of_experts, group_sizes, x.shape[0], jnp.zeros(array.shape, jnp.float32))
    of_x = by_tiles(of_rows, group_sizes, x.shape[0], x.shape[1:])
    return of_array.astype(array.dtype), of_x.astype(x.dtype), None


_products.defvjp(_saved, _slopes)


def pad_rows(x: Float[Array, "M ..."], num_experts: int) -> Float[Array, "M+B ..."]:
    """Rows, and zeros behind them for the last tile of `by_tiles`."""
    size = tile_rows(x.shape[0], num_experts, _MAX_TILE)
    return jnp.pad(x, ((0, size), *((0, 0),) * (x.ndim - 1)))


def by_tiles(
    product: Callable[[Array, Array, int], Float[Array, "B ..."]],
    group_sizes: Int[Array, " E"],
    num_rows: int,
    out_shape: tuple[int, ...],
) -> Float[Array, "M ..."]:
    """Grouped products, tile by tile: `product(expert, first, size)` is that of `size` rows from row `first` on.

    The last tile may run up to a tile over the rows (`pad_rows`).
    """

    def turn(expert: Array, row: Array, size: int, out: Array) -> Array:
        # The last tile of an expert runs over rows of the next one, whose own tiles come later and overwrite them.
        return jax.lax.dynamic_update_slice_in_dim(out, product(expert, row, size), row, 0)

    size = tile_rows(num_rows, group_sizes.shape[0], _MAX_TILE)
    out = _over_tiles(turn, group_sizes, num_rows, jnp.zeros((num_rows + size, *out_shape), jnp.float32))
    return zero_past(out[:num_rows], group_sizes)


def _over_tiles(
    turn: Callable[[Array, Array, int, Array], Array], group_sizes: Int[Array, " E"], num_rows: int, start: Array
) -> Array:
    """`turn(expert, first, size, carried)` for each tile of rows, one after the other; returns what the last gives."""
    size = tile_rows(num_rows, group_sizes.shape[0], _MAX_TILE)
    tiles = -(-group_sizes // size)
    ends = jnp.cumsum(tiles)
    first_tiles, first_rows = ends - tiles, jnp.cumsum(group_sizes) - group_sizes

    def at(tile: Array, carried: Array) -> Array:
        expert = jnp.searchsorted(ends, tile, side="right", method="compare_all")
        return turn(expert, first_rows[expert] + (tile - first_tiles[expert]) * size, size, carried)

    return jax.lax.fori_loop(0, ends[-1], at, start)


def zero_past(out: Float[Array, "M ..."], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
    """The same rows, but zeros for those past the sum of the sizes."""
    owned = jnp.arange(out.shape[0]) < jnp.sum(group_sizes)
    return jnp.where(owned.reshape(-1, *(1,) * (out.ndim - 1)), out, 0)


def tile_rows(num_rows: int, num_experts: int, most: int) -> int:
    """Rows of a tile: a power of two from 8 to `most`, near the rows of an expert when all have as many."""
    size = _MIN_TILE
    while size < min(num_rows // num_experts, most):
        size *= 2
    return size


def _as_it_is(weight: ExpertWeight) -> ExpertWeight:
    return weight


XLA_GROUPED_MATMUL = GroupedMatmul(name="xla", convert=_as_it_is, shapes=_as_it_is, refuses=lambda use: None)
