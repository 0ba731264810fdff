"""Grouped products of TPUs with experts that are codes.

`lax.ragged_dot` has a kernel there for floats alone: of codes XLA would widen all experts in memory first. Here rows
are cut into tiles of one expert each, as on Hopper, and each expert that has rows is read once, as codes:

    columns   | 512 outputs of the expert of tile 0, all its inputs | the same of tile 1: no copy if it has that expert
    tiles     rows of e0, padded | rows of e3 | rows of e3 | rows of e7 | none: nothing is copied or computed

Products and their order are those of `tpu_matmul`: that of each group of inputs, times its scale, one after the other.
Groups of more than 512 inputs, and rows with one scale, are added in pieces of equal size, whatever the number of rows.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.coded_experts import CodedExperts
from jaxserve.kernels.coded_weight import round_activations
from jaxserve.kernels.grouped_matmul import GroupedMatmulUse
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.storage import array_bytes, decode_float4
from jaxserve.kernels.xla_grouped_matmul import tile_rows

_LEAST_ROWS, _MOST_ROWS = 16, 256  # of a tile
COLUMNS = 512  # outputs of a block
_LEAST_GROUP = 32
_MOST_PIECE = 512  # inputs: products of codes of eight bits, summed, are whole numbers that float32 holds
_VMEM_BYTES = 48 * 2**20  # of every TPU since v5e
_ROWS_BYTES = 6 * 2**20  # of the rows of one tile
_LANES = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Codes [E, P, p, N] of P pieces of p inputs; scales, and float32 zeros or None, [E, G, 1, N] of G groups."""

    codes: Array
    scales: Float[Array, "E G 1 N"]
    zeros: Float[Array, "E G 1 N"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertCodes:
    """Experts [E, *out, in] as matrices of pieces.

    Attributes:
      parts: one, or, where there are two axes of outputs (gate and up), one for each index of the first: a device that
        has a part of the second could not flatten them.
      is_split: whether there are two axes of outputs.
      is_float4: codes stand for float4 numbers (`storage.decode_float4`).
      is_rounded: rows are rounded to eight bits, each with one scale over all devices along `cut_over`.
      interpret: run by JAX's interpreter, on a CPU.
    """

    parts: tuple[Part, ...]
    is_split: bool = dataclasses.field(metadata={"static": True})
    is_float4: bool = dataclasses.field(metadata={"static": True})
    is_rounded: bool = dataclasses.field(metadata={"static": True})
    cut_over: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    interpret: pltpu.InterpretParams | None = dataclasses.field(default=None, metadata={"static": True})

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`."""
        num_rows = x.shape[0]
        experts, pieces, size, _ = self.parts[0].codes.shape
        row_scales = None
        if self.is_rounded:
            codes, row_scales = round_activations(x, x.shape[1], self.cut_over)
            x = codes.astype(jnp.bfloat16)
        tile = _rows_of_tile(num_rows, experts, pieces, size, x.dtype.itemsize)
        tiles = cut_tiles(group_sizes.astype(jnp.int32), num_rows, tile)
        by_piece = jnp.swapaxes(x[tiles.sources].reshape(-1, pieces, size), 0, 1)
        outs = [
            _multiply(by_piece, part, tiles, tile, self.is_float4, self.interpret)[tiles.places] for part in self.parts
        ]
        out = jnp.stack(outs, axis=1) if self.is_split else outs[0]
        by_row = (-1, *(1,) * (out.ndim - 1))
        if row_scales is not None:
            out = out * row_scales.reshape(by_row)
        return jnp.where(tiles.owned.reshape(by_row), out, 0)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`."""
        codes: Axes = (axes[0], axes[-1], None, axes[-2])
        of_part = []
        for part in self.parts:
            # One group has inputs of all devices.
            scales = (axes[0], axes[-1] if part.scales.shape[1] > 1 else None, None, axes[-2])
            of_part += [codes, *(scales for _ in range(1 if part.zeros is None else 2))]
        return tuple(of_part)


def _rows_of_tile(num_rows: int, num_experts: int, pieces: int, size: int, item_bytes: int) -> int:
    """A power of two, near the rows of an expert when all have as many, of which a tile fits into fast memory."""
    of_row = pieces * -(-size // _LANES) * _LANES * item_bytes
    most = max(_LEAST_ROWS, min(_MOST_ROWS, _ROWS_BYTES // of_row))
    return max(_LEAST_ROWS, tile_rows(num_rows, num_experts, 1 << (most.bit_length() - 1)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowTiles:
    """The flat list of tiles, of a static length, and where each row is in it.

    Attributes:
      sources: the row of the batch that lies at each place of the tiles; of places without one any row.
      experts: of each tile; of those past the last one, that of the last.
      count: how many have rows.
      places: of each row of the batch, among the rows of all tiles.
      owned: whether the row has an expert.
    """

    sources: Int[Array, " W*B"]
    experts: Int[Array, " W"]
    count: Int[Array, " 1"]
    places: Int[Array, " M"]
    owned: Array


def cut_tiles(group_sizes: Int[Array, " E"], num_rows: int, size: int) -> RowTiles:
    """Tiles of `size` rows of one expert each; the last one of an expert may have fewer."""
    num_experts = group_sizes.shape[0]
    parts = -(-group_sizes // size)
    tile_ends, row_ends = jnp.cumsum(parts), jnp.cumsum(group_sizes)
    first_tiles, first_rows = tile_ends - parts, row_ends - group_sizes

    def group_of(index: Array, ends: Array) -> Array:
        return jnp.minimum(jnp.sum(index[:, None] >= ends, axis=1, dtype=jnp.int32), num_experts - 1)

    bound = max(1, (num_rows + min(num_experts, num_rows) * (size - 1)) // size)
    count = tile_ends[-1:]
    tile = jnp.minimum(jnp.arange(bound, dtype=jnp.int32), jnp.maximum(count - 1, 0))
    row = jnp.arange(num_rows, dtype=jnp.int32)
    expert, owner = group_of(tile, tile_ends), group_of(row, row_ends)
    place = jnp.arange(size, dtype=jnp.int32)
    sources = (first_rows[expert] + (tile - first_tiles[expert]) * size)[:, None] + place
    owned = row < row_ends[-1]
    return RowTiles(
        sources=jnp.minimum(sources, num_rows - 1).reshape(-1),
        experts=expert,
        count=count,
        places=jnp.where(owned, first_tiles[owner] * size + row - first_rows[owner], 0),
        owned=owned,
    )


def _multiply(
    x: Float[Array, "P T p"],
    part: Part,
    tiles: RowTiles,
    rows: int,
    is_float4: bool,
    interpret: pltpu.InterpretParams | None,
) -> Float[Array, "T N"]:
    """Products of all tiles; rows of tiles that are none hold anything."""
    pieces, num_rows, size = x.shape
    _, groups, _, num_out = part.scales.shape
    columns = min(COLUMNS, num_out)
    zeros = () if part.zeros is None else (part.zeros,)

    def of_expert(n: Array, t: Array, experts: Any, count: Any) -> tuple[Any, ...]:
        del count
        return experts[t], 0, 0, n

    def last(t: Array, count: Any) -> Array:
        return jnp.minimum(t, jnp.maximum(count[0] - 1, 0))

    by_group = pl.BlockSpec((None, groups, 1, columns), of_expert)
    return pl.pallas_call(
        functools.partial(_kernel, part.zeros is not None, is_float4, groups),
        out_shape=jax.ShapeDtypeStruct((num_rows, num_out), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(pl.cdiv(num_out, columns), num_rows // rows),
            in_specs=[
                pl.BlockSpec((pieces, rows, size), lambda n, t, experts, count: (0, last(t, count), 0)),
                pl.BlockSpec((None, pieces, size, columns), of_expert),
                by_group,
                *(by_group for _ in zeros),
            ],
            out_specs=pl.BlockSpec((rows, columns), lambda n, t, experts, count: (last(t, count), n)),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=_VMEM_BYTES
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * num_rows * num_out * pieces * size,
            transcendentals=0,
            bytes_accessed=pl.cdiv(num_out, columns) * x.size * x.dtype.itemsize
            + array_bytes(part.codes.size, part.codes.dtype)
            + part.scales.size * 4
            + num_rows * num_out * 4,
        ),
        interpret=False if interpret is None else interpret,
        name="expert_codes",
    )(tiles.experts, tiles.count, x, part.codes, part.scales, *zeros)


def _kernel(
    has_zeros: bool,
    is_float4: bool,
    groups: int,
    experts_ref: Any,
    count_ref: Any,
    x_ref: Any,
    codes_ref: Any,
    scales_ref: Any,
    *refs: Any,
) -> None:
    del experts_ref
    zeros_ref, out_ref = refs if has_zeros else (None, *refs)
    exact = x_ref.dtype == jnp.float32
    precision = jax.lax.Precision.HIGHEST if exact else jax.lax.Precision.DEFAULT
    pieces = x_ref.shape[0]

    def piece(at: Array, total: Array) -> Array:
        group = jax.lax.div(at, jnp.int32(pieces // groups))
        codes = codes_ref[at].astype(jnp.float32)
        if is_float4:
            codes = decode_float4(codes)
        if zeros_ref is not None:
            codes = codes - zeros_ref[group]
        product = jax.lax.dot_general(
            x_ref[at],
            codes.astype(x_ref.dtype),
            (((1,), (0,)), ((), ())),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return total + product * scales_ref[group]

    @pl.when(pl.program_id(1) < count_ref[0])
    def _() -> None:
        out_ref[...] = jax.lax.fori_loop(0, pieces, piece, jnp.zeros(out_ref.shape, jnp.float32))


def piece_of(group: int) -> int | None:
    """Inputs of a piece of groups of so many inputs; None: no size fits."""
    most = min(group, _MOST_PIECE)
    return next((size for size in range(most, 0, -1) if group % size == 0 and size % _LEAST_GROUP == 0), None)


def to_expert_codes(weight: CodedExperts, interpret: pltpu.InterpretParams | None = None) -> ExpertCodes:
    """Transposed into pieces."""
    experts, *out_shape, depth = weight.codes.shape
    assert len(out_shape) in (1, 2), out_shape
    size = piece_of(weight.storage.group or depth)
    assert size is not None, weight.storage
    is_split = len(out_shape) == 2

    def by_piece(array: Array, inputs: int) -> Array:
        return jnp.swapaxes(array.reshape(experts, array.shape[1], -1, inputs), 1, 2).swapaxes(2, 3)

    def part(at: int | None) -> Part:
        codes, scales, zeros = (
            None if leaf is None else leaf if at is None else leaf[:, at]
            for leaf in (weight.codes, weight.scales, weight.zeros)
        )
        assert codes is not None and scales is not None
        return Part(
            codes=by_piece(codes, size),
            scales=by_piece(scales, 1),
            zeros=None if zeros is None else by_piece(zeros, 1).astype(jnp.float32),
        )

    return ExpertCodes(
        parts=tuple(part(at) for at in range(out_shape[0])) if is_split else (part(None),),
        is_split=is_split,
        is_float4=weight.storage.code == "float4_e2m1fn",
        is_rounded=weight.arithmetic.activations == "int8",
        cut_over=weight.cut_over,
        interpret=interpret,
    )


def refuses_codes(use: GroupedMatmulUse) -> str | None:
    """The reason why these products cannot be had, with the remedy; None: they can."""
    if use.storage is None:
        return None
    sizes = {use.storage.group} if use.storage.group is not None else {use.hidden_size, use.size}
    for size in sorted(sizes):
        if piece_of(size) is None:
            return (
                f"{size} inputs of an expert share a scale on one device, but their number must be a multiple of "
                f"{_LEAST_GROUP}; parallel.expert instead of parallel.tensor leaves experts whole, and "
                "model.quantization: none widens them"
            )
    return None
