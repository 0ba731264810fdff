"""Grouped products of experts on Hopper: the cost is reading the weights of the experts hit once, then the products.

The rows of each expert are cut into tiles of `rows` (8 to 128), counted out on the device, so that any split of the
rows over experts runs in one compiled program. A program computes one tile for 128 columns of its expert:

    experts   e0 (3 rows)   e3 (1 row)   e7 (11 rows)          tiles of 8 rows: a flat list of static length; those
    tiles     | e0 |        | e3 |       | e7 | e7 |           past the last end at once

    program (columns, tile)
      producer warpgroup:   for each 64 of the depth: wait until a slot of the ring is free -> copies (TMA) of
                            W [128, 64] and x [rows, 64]
      compute warpgroups:   two, with 64 columns each:   y^T [64, rows] += W [64, 64] x^T [64, rows]

Columns are the 64 rows of the wgmma, and rows of the batch its columns: with few rows to an expert, the other way round
most of it would be padding.

Each expert's rows are first moved to a multiple of 8, since a copy into the tiled pattern of shared memory takes whole
groups of 8 rows: of a group that it enters in the middle it would read the rest, and zeros for the rows after it. The
interpreter does not know that.

A tile at the end of an expert runs over rows of the next one. They are computed and not used: each tile is stored whole
at a place of its own, and rows are gathered from there afterwards.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.grouped_matmul import GroupedMatmul, GroupedMatmulUse
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.pallas import gpu_layout as layout
from jaxserve.kernels.pallas.gpu_layout import Interpret
from jaxserve.kernels.xla_grouped_matmul import DenseExperts, tile_rows

_ACC = plgpu.Layout.WGMMA
_HALF, _DEPTH = 64, 64  # columns of a warpgroup; numbers of the depth in a slot: a whole line of 128 bytes
_MAX_ROWS = 128  # of a tile
_GROUP = 8  # rows that the pattern of shared memory keeps together
# Two programs on each multiprocessor: 4 slots of 16 KB of weights and up to 16 of rows. Not measured.
_STAGES = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HopperExperts:
    """Experts [E, *out, in] as they are loaded.

    Attributes:
      interpret: stands in for the hardware; None: there is one.
    """

    array: Float[Array, "E ..."]
    interpret: Interpret = dataclasses.field(default=None, metadata={"static": True})

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`, in bfloat16 with float32 sums."""
        experts, *out_shape, depth = self.array.shape
        columns, num_rows = math.prod(out_shape), x.shape[0]
        size = tile_rows(num_rows, experts, _MAX_ROWS)
        tiles = cut_groups(group_sizes.astype(jnp.int32), num_rows, size)
        weights = self.array.reshape(experts, columns, depth)
        moved = x.astype(jnp.bfloat16)[tiles.sources]
        found = _multiply_tiles(moved, weights, tiles, size, self.interpret)  # [tiles, columns, size]
        by_row = found.swapaxes(1, 2).reshape(-1, columns)
        out = jnp.where(tiles.owned[:, None], by_row[tiles.places], 0)
        return out.reshape(num_rows, *out_shape)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`."""
        return (axes,)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Tiles:
    """The flat list of tiles, and where each row is in it.

    Attributes:
      sources: the row of the batch that lies at each place of the moved batch; between experts any.
      experts, rows: of each tile, and the place of the first of its rows in the moved batch, a multiple of 8.
      count: how many there are; those behind are none.
      places: of each row of the batch, among the rows of all tiles.
      owned: whether the row has an expert.
    """

    sources: Int[Array, " A"]
    experts: Int[Array, " W"]
    rows: Int[Array, " W"]
    count: Int[Array, " 1"]
    places: Int[Array, " M"]
    owned: Array


def cut_groups(group_sizes: Int[Array, " E"], num_rows: int, size: int) -> Tiles:
    """Tiles of `size` rows of one expert each; the last one of an expert may have fewer that are its own."""
    num_experts = group_sizes.shape[0]
    parts = -(-group_sizes // size)
    tile_ends, row_ends = jnp.cumsum(parts), jnp.cumsum(group_sizes)
    first_tiles, first_rows = tile_ends - parts, row_ends - group_sizes
    held = -(-group_sizes // _GROUP) * _GROUP
    place_ends = jnp.cumsum(held)
    first_places = place_ends - held

    def group_of(index: Array, ends: Array) -> Array:
        return jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), num_experts - 1)

    # Each expert hit has at most one tile, and one group of 8, that is not full; and a tile has a row.
    most_hit = min(num_experts, num_rows)
    bound = max(1, (num_rows + most_hit * (size - 1)) // size)
    last = (num_rows + most_hit * (_GROUP - 1)) // _GROUP * _GROUP  # place, or beyond it
    tile, row = jnp.arange(bound, dtype=jnp.int32), jnp.arange(num_rows, dtype=jnp.int32)
    place = jnp.arange(last + size, dtype=jnp.int32)
    expert, owner, holder = group_of(tile, tile_ends), group_of(row, row_ends), group_of(place, place_ends)
    owned = row < row_ends[-1]
    places = first_tiles[owner] * size + row - first_rows[owner]
    begin = first_places[expert] + (tile - first_tiles[expert]) * size
    return Tiles(
        sources=jnp.minimum(first_rows[holder] + place - first_places[holder], num_rows - 1),
        experts=expert,
        rows=jnp.minimum(begin, last),  # of those that are none, too: no copy passes the array's end
        count=tile_ends[-1:],
        places=jnp.where(owned, places, 0),
        owned=owned,
    )


@functools.partial(jax.jit, static_argnames=("size", "interpret"))
def _multiply_tiles(
    x: Float[Array, "M D"], weights: Float[Array, "E N D"], tiles: Tiles, size: int, interpret: Interpret
) -> Float[Array, "W N B"]:
    """The transposed products of all tiles; what is none is not written."""
    _, columns, depth = weights.shape
    halves = 2 if columns % (2 * _HALF) == 0 else 1
    width, steps = halves * _HALF, depth // _DEPTH

    def multiply_tile(experts_ref, rows_ref, count_ref, x_ref, weights_ref, out_ref, smem, barriers) -> None:
        tile, warpgroup = lax.axis_index("tile"), lax.axis_index("wg")
        column = lax.axis_index("column") * width
        expert, row = experts_ref[tile], rows_ref[tile]

        def produce() -> None:
            def step(k: Array, _: None) -> None:
                slot, at = lax.rem(k, jnp.int32(_STAGES)), pl.ds(k * _DEPTH, _DEPTH)
                pl.when(k >= _STAGES)(lambda: plgpu.barrier_wait(barriers["free"].at[slot]))
                full = barriers["full"].at[slot]
                plgpu.copy_gmem_to_smem(
                    weights_ref.at[expert, pl.ds(column, width), at], smem["weights"].at[slot], full
                )
                plgpu.copy_gmem_to_smem(x_ref.at[pl.ds(row, size), at], smem["x"].at[slot], full)

            lax.fori_loop(0, steps, step, None)

        def compute(half: int) -> None:
            def step(k: Array, acc: Array) -> Array:
                slot = lax.rem(k, jnp.int32(_STAGES))
                plgpu.barrier_wait(barriers["full"].at[slot])
                part = smem["weights"].at[slot, pl.ds(half * _HALF, _HALF)]
                acc = layout.accumulate(acc, part, smem["x"].at[slot], interpret, transpose_b=True)
                pl.when(k + _STAGES < steps)(lambda: plgpu.barrier_arrive(barriers["free"].at[slot]))
                return acc

            acc = lax.fori_loop(0, steps, step, layout.full((_HALF, size), 0.0, _ACC, interpret))
            smem["out"].at[half][...] = acc
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem["out"].at[half], out_ref.at[tile, pl.ds(column + half * _HALF, _HALF)])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(tile < count_ref[0])
        def _() -> None:
            for half in range(halves):
                pl.when(warpgroup == half)(functools.partial(compute, half))
            pl.when(warpgroup == halves)(produce)

    smem = {
        "weights": layout.tile_type((_STAGES, width, _DEPTH), jnp.bfloat16),
        "x": layout.tile_type((_STAGES, size, _DEPTH), jnp.bfloat16),
        "out": layout.tile_type((halves, _HALF, size), jnp.float32),
    }
    barriers = {
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
        "free": plgpu.Barrier(num_arrivals=halves, num_barriers=_STAGES),
    }
    return layout.launch(
        multiply_tile,
        out_type=jax.ShapeDtypeStruct((tiles.experts.shape[0], columns, size), jnp.float32),
        grid={"column": columns // width, "tile": tiles.experts.shape[0]},
        scratch=(smem, barriers),
        warpgroups=halves + 1,
        own_barriers=True,
        interpret=interpret,
    )(tiles.experts, tiles.rows, tiles.count, x, weights)


def make_grouped_matmul(device: Device, interpret: Interpret = None) -> GroupedMatmul:
    """The implementation for a device; it refuses all that are no Hopper GPUs. `interpret` runs it on a CPU."""

    def refuses(use: GroupedMatmulUse) -> str | None:
        remedy = "kernels.grouped_matmul: xla runs it"
        if reason := layout.refuses_device(device):
            return f"{reason}; {remedy}"
        if use.storage is not None:
            return f"its experts are bfloat16 numbers, and these are {use.storage}; {remedy}"
        if use.dtype != "bfloat16":
            return f"weights are {use.dtype}, but the GPU kernel takes bfloat16; set model.dtype to it, or {remedy}"
        for name, size in (("hidden size", use.hidden_size), ("columns of an expert", use.size)):
            if size % _DEPTH:
                if name != "hidden size" and use.num_devices > 1:
                    remedy = f"parallel.expert, {use.num_devices} times as large, leaves experts whole; {remedy}"
                return f"the {name} on a device: {size}, but the GPU kernel takes multiples of {_DEPTH}; {remedy}"
        return None

    def convert(weight: DenseExperts) -> HopperExperts:
        return HopperExperts(array=weight.array, interpret=interpret)

    return GroupedMatmul(name="mosaic_gpu", convert=convert, shapes=convert, refuses=refuses)
