"""Grouped products by a loop over tiles of rows of one expert each: runs everywhere, and is what GPUs use.

XLA has an operation for this, `lax.ragged_dot`, but outside of TPUs it multiplies all rows with all experts: 128 times
the arithmetic and every weight read, where a token of Qwen3-30B-A3B needs 8 experts. The loop reads only the experts
that have rows, each once for every tile of its rows.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels.grouped_matmul import GroupedMatmul
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.xla_matmul import DenseWeight

_MIN_TILE, _MAX_TILE = 8, 256  # rows; a turn costs an accelerator tens of microseconds, so many rows take few turns


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseExperts:
    """One array [E, *out, in], as experts are loaded."""

    array: Float[Array, "E ..."]

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`."""
        num_rows, size = x.shape[0], tile_rows(x.shape[0], self.array.shape[0], _MAX_TILE)
        tiles = -(-group_sizes // size)
        ends = jnp.cumsum(tiles)
        first_tiles, first_rows = ends - tiles, jnp.cumsum(group_sizes) - group_sizes
        padded = jnp.pad(x, ((0, size), (0, 0)))

        def turn(tile: Array, out: Array) -> Array:
            expert = jnp.searchsorted(ends, tile, side="right", method="compare_all")
            row = first_rows[expert] + (tile - first_tiles[expert]) * size
            rows = jax.lax.dynamic_slice_in_dim(padded, row, size)
            matrix = jax.lax.dynamic_index_in_dim(self.array, expert, keepdims=False)
            # The last tile of an expert runs over rows of the next one, whose own tiles come later and overwrite them.
            product = DenseWeight(array=matrix, num_in=1).multiply(rows)
            return jax.lax.dynamic_update_slice_in_dim(out, product, row, 0)

        out = jnp.zeros((num_rows + size, *self.array.shape[1:-1]), jnp.float32)
        out = jax.lax.fori_loop(0, ends[-1], turn, out)
        return zero_past(out[:num_rows], group_sizes)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`."""
        return (axes,)


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


def _as_it_is(weight: DenseExperts) -> DenseExperts:
    return weight


XLA_GROUPED_MATMUL = GroupedMatmul(name="xla", convert=_as_it_is, shapes=_as_it_is, refuses=lambda use: None)
