"""Rows of one query each on Hopper: decode, where the cost is reading the cache once.

The rows are cut into splits along their keys (split-K, as in flash decoding), and a kernel attends over one split. The
splits of a row are combined in `gpu_combine`; rows of several queries are in `gpu_prefill`.

    row 0  | tile | tile | tile | tile | tile | tile |      a split is some tiles (64 tokens each) of one row; splits of
           '---- split 0 ----' '---- split 1 -----'         all rows form a flat list of static length, counted out on
    row 1  | tile |            row 2 (empty)                the device, so that any mix of lengths fills the card
           split 2             no split

    program (split, kv head)
      producer warpgroup:  page ids of the next tile -> wait until a slot of the ring is free -> copies (TMA)
      compute warpgroup:   for each tile
          S^T [64, G] = K [64, H] Q^T       tokens are the 64 rows of the wgmma, the G query heads of one kv head its
          P^T [64, G] = exp2(S^T - max)     columns: with the heads as rows, 64 - G of them would be padding
          O^T [H, G] += V^T P^T
      leaves O^T (not divided), max and sum of each split; `combine` reads those of one row and writes its output

Why P is two numbers of bfloat16, the rounded weight and what the rounding left: rounding weights to 8 bits would cost
as much as rounding the output does, and the tensor cores have time to spare here.

Why the kernel has its own barriers: of the seven that Mosaic would put into a tile, three are needed. Weights and
widened tiles are written again by the next tile, and two things stand between: each warp waits for its products before
it goes on, and the maximum over tokens, which is a barrier of the warpgroup, comes before the next weights (and before
the next widened values; widened keys are read before the maximum of their own tile). What is written is committed
before a product reads it. The producer reads nothing from shared memory.

Why tails of V are zeroed in shared memory: their weight is 0, but what lies past a row's end may be NaN, and 0 * NaN
is NaN. Keys need nothing: a score that is not seen is overwritten, whatever it is.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import AttentionSpec, AttentionUse, KVScales
from jaxserve.kernels.pallas import gpu_layout as layout
from jaxserve.kernels.pallas.gpu_combine import combine, split_types
from jaxserve.kernels.pallas.gpu_layout import TILE, GpuPages, Interpret

_ACC = plgpu.Layout.WGMMA  # [64 or H, G]
_COLUMN = plgpu.Layout.WGMMA.reduce(0)  # [G]: one number a head
_CARD = 264  # programs that an H100 or H200 holds: two on each of its 132 multiprocessors
_MAX_ACC = 8192  # numbers of O^T: 64 registers of each thread of the compute warpgroup


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecodeBlocks:
    """Sizes of the decode kernel.

    Attributes:
      stages: tiles of keys and values in flight.
      programs: at most about this many, however long the rows are: each row may be cut into its share of them.
      min_tiles: but a row of no more than this many tiles stays whole (a longer one may be halved).
    """

    stages: int
    programs: int
    min_tiles: int


def padded_group(spec: AttentionSpec) -> int:
    """Query heads of a kv head, as columns of a wgmma: 8, 16, 32 and so on."""
    group = spec.num_query_heads // spec.num_kv_heads
    return max(8, 1 << (group - 1).bit_length())


def shared_memory_bytes(use: AttentionUse, blocks: DecodeBlocks) -> int:
    """Shared memory of one program, at most: small parts are rounded up, and ALiBi slopes always counted."""
    group, lanes = padded_group(use.spec), layout.padded_head_dim(use.spec.head_dim)
    total = 2 * blocks.stages * layout.tile_bytes((TILE, lanes), use.cache_dtype)
    if use.cache_dtype != "bfloat16":
        total += 2 * layout.tile_bytes((TILE, lanes), "bfloat16")
    total += layout.tile_bytes((group, lanes), "bfloat16") + layout.tile_bytes((2, group, TILE), "bfloat16")
    total += layout.tile_bytes((lanes, group), "float32") + layout.tile_bytes((2, group), "float32")
    return total + layout.REDUCTION_BYTES + 2048  # ALiBi slopes, barriers


def default_blocks(use: AttentionUse) -> DecodeBlocks:
    """Two programs on each multiprocessor where their rings fit: one computes while the other waits for memory. Where
    there is room for one alone, its ring is as deep as fits."""
    half = layout.SHARED_MEMORY_BYTES // 2 - 1024  # a block costs 1 KB more than it asks for
    for room in (half, layout.SHARED_MEMORY_BYTES):
        if fits := [n for n in (2, 3, 4) if shared_memory_bytes(use, _blocks(n)) <= room]:
            return _blocks(fits[-1])
    return _blocks(2)


# 16 times `_CARD`, so that one long row among many short ones is cut finely enough; programs without a split end at
# once. `scripts/tune_kernels.py` times fewer, on equal rows, which need no cuts.
def _blocks(stages: int, programs: int = 4224, min_tiles: int = 8) -> DecodeBlocks:
    return DecodeBlocks(stages=stages, programs=programs, min_tiles=min_tiles)


def candidates(use: AttentionUse) -> list[DecodeBlocks]:
    """Sizes worth measuring that fit in shared memory."""
    return [
        blocks
        for stages in (2, 3, 4, 6)
        for programs in (1056, 2112, 4224)
        for min_tiles in (4, 8, 16)
        if shared_memory_bytes(use, blocks := _blocks(stages, programs, min_tiles)) <= layout.SHARED_MEMORY_BYTES
    ]


def refuses_decode(use: AttentionUse, blocks: DecodeBlocks) -> str | None:
    """Why the kernel cannot run, or None."""
    lanes = layout.padded_head_dim(use.spec.head_dim)
    if padded_group(use.spec) * lanes > _MAX_ACC:
        return (
            f"{use.spec.num_query_heads // use.spec.num_kv_heads} query heads for each kv head of {use.spec.head_dim}, "
            f"but GPU kernels take {_MAX_ACC // lanes}; kernels.paged_attention: xla_batched runs it"
        )
    needed = shared_memory_bytes(use, blocks)
    if needed > layout.SHARED_MEMORY_BYTES:
        return (
            f"decode with {blocks} needs {needed} bytes of shared memory, but a block has "
            f"{layout.SHARED_MEMORY_BYTES}; lower its stages in the tuned table"
        )
    return None


# --- splits ----------------------------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Splits:
    """The flat list, and the place of each row's splits in it. Splits past the last row's have count 0."""

    rows: Int[Array, " W"]
    first_tiles: Int[Array, " W"]
    counts: Int[Array, " W"]
    row_starts: Int[Array, " R"]
    row_counts: Int[Array, " R"]


def cut_rows(
    context_lens: Int[Array, " R"], window: int | None, max_tiles: int, num_kv_heads: int, blocks: DecodeBlocks
) -> Splits:
    """Cuts each row into splits of nearly equal length, no more of them than its share of `blocks.programs`.

    `max_tiles` is what a block table holds. The list has R + programs / K entries at most. A cut depends on the row's
    own length and on static sizes (R among them), never on its neighbours: a row gives the same bits in any crowd of
    one bucket. What that costs is balance where one row is much longer than the others. More splits than the card
    holds would only make the combination longer.
    """
    num_rows = context_lens.shape[0]
    visible = max_tiles if window is None else min(max_tiles, window // TILE + 2)
    share = min(_up(blocks.programs, num_kv_heads * num_rows), _up(_CARD, num_kv_heads))
    begin = jnp.maximum(context_lens - window, 0) // TILE if window else jnp.zeros_like(context_lens)
    tiles = (context_lens + TILE - 1) // TILE - begin  # [R]
    longest = jnp.maximum(blocks.min_tiles, _up(tiles, share))
    # Rounding up twice: first the number of splits, then their common length, which may need fewer of them.
    size = jnp.maximum((tiles + (parts := _up(tiles, longest)) - 1) // jnp.maximum(parts, 1), 1)
    parts = _up(tiles, size)
    ends = jnp.cumsum(parts)
    split = jnp.arange(num_rows * min(share, _up(visible, blocks.min_tiles)), dtype=jnp.int32)
    row = jnp.minimum((split[:, None] >= ends).sum(1, dtype=jnp.int32), num_rows - 1)
    first = (split - (ends - parts)[row]) * size[row]
    count = jnp.where(split < ends[-1], jnp.clip(tiles[row] - first, 0, size[row]), 0)
    return Splits(
        rows=row,
        first_tiles=(begin[row] + first).astype(jnp.int32),
        counts=count.astype(jnp.int32),
        row_starts=(ends - parts).astype(jnp.int32),
        row_counts=parts.astype(jnp.int32),
    )


def _up(x: Any, y: Any) -> Any:
    return (x + y - 1) // y


# --- the op ----------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("spec", "blocks", "interpret"))
def attend_rows(
    q: Float[Array, "R N H"],
    context_lens: Int[Array, " R"],
    block_tables: Int[Array, "R P"],
    cache: GpuPages,
    spec: AttentionSpec,
    blocks: DecodeBlocks,
    *,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    scales: KVScales | None = None,
    interpret: Interpret = None,
) -> Float[Array, "R N H"]:
    """Attention of each row's last token (position context_lens - 1), in q's dtype. Rows of length 0 give zeros."""
    num_rows, kv_heads = q.shape[0], spec.num_kv_heads
    group, padded, lanes = spec.num_query_heads // kv_heads, padded_group(spec), layout.padded_head_dim(spec.head_dim)

    def by_head(x: Array | None, scale: float) -> Array | None:
        if x is None:
            return None
        return jnp.pad(x.astype(jnp.float32).reshape(kv_heads, group) * scale, ((0, 0), (0, padded - group)))

    grouped = q.astype(jnp.bfloat16).reshape(num_rows, kv_heads, group, spec.head_dim)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, padded - group), (0, lanes - spec.head_dim)))
    tables = layout.pad_tables(block_tables, cache.page_size)
    splits = cut_rows(context_lens, spec.window, -(-tables.shape[1] * cache.page_size // TILE), kv_heads, blocks)
    partials = _attend_splits(
        grouped,
        splits,
        context_lens.astype(jnp.int32),
        tables,
        cache,
        spec,
        blocks.stages,
        slopes=by_head(alibi_slopes, layout.LOG2E),
        key_scales=None if scales is None else scales.keys.astype(jnp.float32),
        interpret=interpret,
    )
    out = combine(
        *partials,
        splits.row_starts,
        splits.row_counts,
        sinks=by_head(sinks, layout.LOG2E),
        value_scales=None if scales is None else scales.values.astype(jnp.float32),
        interpret=interpret,
    )
    return out[:, :, :group, : spec.head_dim].reshape(q.shape).astype(q.dtype)


def _attend_splits(
    q: Float[Array, "R K G H"],
    splits: Splits,
    context_lens: Int[Array, " R"],
    tables: Int[Array, "R P"],
    cache: GpuPages,
    spec: AttentionSpec,
    stages: int,
    *,
    slopes: Float[Array, "K G"] | None,
    key_scales: Float[Array, " K"] | None,
    interpret: Interpret,
) -> tuple[Float[Array, "W K H G"], Float[Array, "W K 2 G"]]:
    """O^T, not divided, of each split; and the largest score (log2 units) and the sum of each head."""
    _, kv_heads, group, lanes = q.shape
    num_splits, page_size, narrow = splits.rows.shape[0], cache.page_size, cache.dtype.itemsize == 1
    options = {"slopes": None if slopes is None else layout.copyable(slopes), "key_scales": key_scales}
    options = {name: x for name, x in options.items() if x is not None}

    def decode_splits(
        rows_ref, firsts_ref, counts_ref, lens_ref, tables_ref, q_ref, keys_ref, values_ref, *refs
    ) -> None:
        option_refs = dict(zip(options, refs, strict=False))
        out_ref, stats_ref, smem, barriers = refs[len(options) :]
        split, head = lax.axis_index("split"), lax.axis_index("head")
        count, row = counts_ref[split], rows_ref[split]
        first = firsts_ref[split] * TILE

        def produce() -> None:
            plgpu.copy_gmem_to_smem(q_ref.at[row, head], smem["q"], barriers["q"])
            if slopes is not None:
                plgpu.copy_gmem_to_smem(option_refs["slopes"].at[head], smem["slopes"], barriers["q"])

            def tile(t: Array, page_ids: list[Array]) -> list[Array]:
                # Page ids of the next tile are on their way while this one waits for its slot.
                following = first + jnp.minimum(t + 1, count - 1) * TILE
                next_ids = layout.tile_page_ids(tables_ref, row, following, page_size)
                slot, start = lax.rem(t, jnp.int32(stages)), first + t * TILE
                pl.when(t >= stages)(lambda: plgpu.barrier_wait(barriers["free"].at[slot]))
                for pages_ref, name in ((keys_ref, "keys"), (values_ref, "values")):
                    layout.copy_tile(pages_ref, page_ids, head, start, smem[name].at[slot], barriers[name].at[slot])
                return next_ids

            lax.fori_loop(0, count, tile, layout.tile_page_ids(tables_ref, row, first, page_size))

        def compute() -> None:
            length = lens_ref[row]
            plgpu.barrier_wait(barriers["q"])
            step = functools.partial(
                _fold_tile,
                smem=smem,
                barriers=barriers,
                first=first,
                count=count,
                visible=(jnp.maximum(length - spec.window, 0) if spec.window else jnp.int32(0), length),
                factor=spec.scale * option_refs["key_scales"][head] if key_scales is not None else spec.scale,
                slopes=None if slopes is None else layout.load(smem["slopes"].at[pl.ds(0, group)], _COLUMN, interpret),
                spec=spec,
                narrow=narrow,
                interpret=interpret,
            )
            acc, top, sums = lax.fori_loop(
                0,
                count,
                step,
                (
                    layout.full((lanes, group), 0.0, _ACC, interpret),
                    layout.full((group,), layout.LOWEST, _COLUMN, interpret),
                    layout.full((TILE, group), 0.0, _ACC, interpret),
                ),
            )
            smem["out"][...] = acc
            smem["stats"].at[0][...] = top
            smem["stats"].at[1][...] = sums.sum(axis=0)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(smem["out"], out_ref.at[split, head])
            plgpu.copy_smem_to_gmem(smem["stats"], stats_ref.at[split, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(count > 0)
        def _() -> None:
            warpgroup = lax.axis_index("wg")
            pl.when(warpgroup == 0)(compute)
            pl.when(warpgroup == 1)(produce)

    copies = layout.copies_per_tile(page_size)
    ring = plgpu.Barrier(num_arrivals=copies, num_barriers=stages)
    smem = {
        "q": layout.tile_type((group, lanes), jnp.bfloat16),
        "keys": layout.tile_type((stages, TILE, lanes), cache.dtype, max_swizzle=64 * cache.dtype.itemsize),
        "values": layout.tile_type((stages, TILE, lanes), cache.dtype, max_swizzle=64 * cache.dtype.itemsize),
        "weights": layout.tile_type((2, group, TILE), jnp.bfloat16),
        "out": layout.tile_type((lanes, group), jnp.float32),
        "stats": plgpu.SMEM((2, group), jnp.float32),
    }
    if narrow:
        smem["wide_keys"] = layout.tile_type((TILE, lanes), jnp.bfloat16)
        smem["wide_values"] = layout.tile_type((TILE, lanes), jnp.bfloat16)
    if slopes is not None:
        smem["slopes"] = plgpu.SMEM(options["slopes"].shape[1:], jnp.float32)
    barriers = {
        "q": plgpu.Barrier(num_arrivals=1 if slopes is None else 2),
        "keys": ring,
        "values": ring,
        "free": plgpu.Barrier(num_barriers=stages),
    }
    return layout.launch(
        decode_splits,
        out_type=split_types(num_splits, kv_heads, lanes, group),
        grid={"split": num_splits, "head": kv_heads},
        scratch=(smem, barriers),
        warpgroups=2,
        own_barriers=True,
        interpret=interpret,
    )(
        splits.rows,
        splits.first_tiles,
        splits.counts,
        context_lens,
        tables,
        q,
        cache.keys,
        cache.values,
        *options.values(),
    )


def _fold_tile(
    t: Array,
    carry: tuple[Array, Array, Array],
    *,
    smem: dict[str, Any],
    barriers: dict[str, Any],
    first: Array,
    count: Array,
    visible: tuple[Array, Array],
    factor: Array | float,
    slopes: Float[Array, " G"] | None,
    spec: AttentionSpec,
    narrow: bool,
    interpret: Interpret,
) -> tuple[Array, Array, Array]:
    """Adds tile t to (O^T, running maximum, sums of each token slot). `visible` is the range of positions seen."""
    acc, top, sums = carry
    stages = smem["keys"].shape[0]
    slot, start = lax.rem(t, jnp.int32(stages)), first + t * TILE
    low, high = visible

    plgpu.barrier_wait(barriers["keys"].at[slot])
    keys = smem["keys"].at[slot]
    if narrow:
        _widen(keys, smem["wide_keys"], interpret)
        keys = smem["wide_keys"]
    scores = layout.product(keys, smem["q"], interpret, transpose_b=True) * factor  # [64, G]
    if spec.soft_cap is not None:
        scores = layout.soft_capped(scores, spec.soft_cap)
    scores = scores * layout.LOG2E
    positions = layout.iota(scores.shape, 0, _ACC, interpret) + start
    if slopes is not None:
        distance = (positions - (high - 1)).astype(jnp.float32)
        scores = scores + distance * lax.broadcast_in_dim(slopes, scores.shape, [1])
    seen = positions < high
    if spec.window is not None:
        seen = seen & (positions >= low)
    scores = jnp.where(seen, scores, layout.HIDDEN)

    new_top = jnp.maximum(top, scores.max(axis=0))
    shrink = jnp.exp2(top - new_top)
    weights = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
    # Summed over tokens once, at the end: a sum across warps for each tile would cost a trip through shared memory.
    sums = sums * lax.broadcast_in_dim(shrink, sums.shape, [1]) + weights
    acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [1])
    coarse = weights.astype(jnp.bfloat16)
    fine = (weights - coarse.astype(jnp.float32)).astype(jnp.bfloat16)
    layout.store_transposed(smem["weights"].at[0], coarse, interpret)
    layout.store_transposed(smem["weights"].at[1], fine, interpret)

    plgpu.barrier_wait(barriers["values"].at[slot])
    values = smem["values"].at[slot]
    edge = (start + TILE > high) | (start < low)
    if narrow:
        _widen(values, smem["wide_values"], interpret)
        values = smem["wide_values"]
    pl.when(edge)(functools.partial(_zero_unseen, values, start, visible, interpret))
    plgpu.commit_smem()
    coarse_ref, fine_ref = smem["weights"].at[0], smem["weights"].at[1]
    acc = layout.accumulate(acc, values, coarse_ref, interpret, more=(fine_ref,), transpose_a=True, transpose_b=True)
    pl.when(t + stages < count)(lambda: plgpu.barrier_arrive(barriers["free"].at[slot]))
    return acc, new_top, sums


def _widen(narrow: Any, wide: Any, interpret: Interpret) -> None:
    """wide = narrow. A commit for each part, past which the compiler moves no load: both parts at once take 164
    registers of a thread, and with more than 128 a multiprocessor holds one program instead of two."""
    for source, target in zip(_columns(narrow), _columns(wide), strict=True):
        target[...] = layout.widen(layout.load(source, _ACC, interpret))
        plgpu.commit_smem()


def _zero_unseen(values: Any, start: Array, visible: tuple[Array, Array], interpret: Interpret) -> None:
    low, high = visible
    for part in _columns(values):
        positions = layout.iota(part.shape, 0, _ACC, interpret) + start
        x = layout.load(part, _ACC, interpret)
        part[...] = jnp.where((positions >= low) & (positions < high), x, jnp.zeros_like(x))


def _columns(tile: Any) -> list[Any]:
    """A tile in parts of 64 lanes: what goes through registers at once."""
    return [tile.at[:, pl.ds(lane, 64)] for lane in range(0, tile.shape[1], 64)]
