"""Ragged paged attention on TPUs (Mosaic): pages are copied by hand, two blocks in flight, one core walks a work list.

The kernel, its work lists and its block sizes are here. The cache is written by `tpu_write`; a batch is divided into
rows of one query and rows of several by `tpu_implementation`.

One program of the grid is one *item*: a tile of queries and one row (sequence) that has tokens in that tile.

    item:      tile 0, row 5 |  tile 0, row 6 |  tile 1, row 6 |  tile 2, row 6   ...
    queries:   [K, M, lanes]    the tile stays in VMEM while its items follow one another
    pages:     [b0][b1]         [b0][b1][b2]     [b0][b1][b2][b3]                 one block in use, the next one coming
    page ids:  128 at a time from HBM into SMEM, also one piece ahead

So a table of any length costs 1 KiB of SMEM, nothing waits for a page whose turn was known before, and the last block
of an item already fetches the first of the next. A tile of one token is the decode variant: its M rows are the query
heads that share a key head. A longer tile packs (head of the group, token) into M, so that the matrix unit sees
hundreds of rows whatever the group size.

Why one head after the other and not all at once: a block of keys lies [K, tokens, lanes] in VMEM, so each head is a
plain 2-d product with no relayout, and the order costs nothing since copies, not products, bound decode.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, AttentionUse, KVScales
from jaxserve.kernels.pallas.tpu_layout import PageShape

_LOG2E = math.log2(math.e)
_IDS = 128  # page ids of one piece: the narrowest row that can be copied into SMEM
_HIDDEN = -1e30  # exp2(_HIDDEN - _LOWEST) is 0: a query that sees nothing of a block adds nothing
_LOWEST = -0.5e30
_UNROLL = 8  # heads whose code is laid out one after the other; more of them loop


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Sizes of one variant.

    Attributes:
      block_q: tokens of a tile of queries, a power of two; 1 is the decode variant.
      pages: pages of a block, a power of two up to 128.
    """

    block_q: int
    pages: int


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The items of one call, those of a tile side by side; entries from `count` on are not visited, but the first is
    where there is none: it names a tile and a row that are there.

    Attributes:
      tile, row: which queries, which sequence.
      begin: first block of keys that any of its queries sees.
      end: position after the last key that any of its queries sees.
      low: lowest position that any of its queries sees.
      first, last: tokens of the tile that belong to the row, [first, last).
      shift: position of the tile's token 0, were it the row's.
    """

    count: Int[Array, " 1"]
    tile: Int[Array, " W"]
    row: Int[Array, " W"]
    begin: Int[Array, " W"]
    end: Int[Array, " W"]
    low: Int[Array, " W"]
    first: Int[Array, " W"]
    last: Int[Array, " W"]
    shift: Int[Array, " W"]


def decode_work(context_lens: Int[Array, " R"], spec: AttentionSpec, block_tokens: int) -> Work:
    """One item for each row of context_lens > 0, whose one query is the row's last token."""
    num_rows = context_lens.shape[0]
    active = context_lens > 0
    row = jnp.nonzero(active, size=num_rows, fill_value=0)[0].astype(jnp.int32)
    end = context_lens[row]
    low = _lowest(end - 1, spec)
    return Work(
        count=active.sum(dtype=jnp.int32)[None],
        tile=row,
        row=row,
        begin=low // block_tokens,
        end=end,
        low=low,
        first=jnp.zeros_like(row),
        last=jnp.ones_like(row),
        shift=end - 1,
    )


def prefill_work(batch: AttentionBatch, spec: AttentionSpec, block_q: int, block_tokens: int) -> Work:
    """One item for each tile that a row of several tokens touches: at most T / block_q + R of them."""
    num_rows, num_tokens = batch.context_lens.shape[0], batch.positions.shape[0]
    starts, stops = batch.q_starts[:-1], batch.q_starts[1:]
    first_tile = starts // block_q
    tiles = jnp.where(stops - starts > 1, (stops - 1) // block_q - first_tile + 1, 0)
    ends = jnp.cumsum(tiles)
    item = jnp.arange(-(-num_tokens // block_q) + min(num_rows, num_tokens // 2), dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, item, side="right").astype(jnp.int32), num_rows - 1)
    # The grid has a turn even when no row has several tokens, and its tile must be one of the array.
    tile = jnp.clip(first_tile[row] + item - (ends - tiles)[row], 0, -(-num_tokens // block_q) - 1)
    token = tile * block_q
    first = jnp.clip(starts[row] - token, 0, block_q)
    last = jnp.clip(stops[row] - token, 0, block_q)
    shift = batch.context_lens[row] - stops[row] + token
    low = _lowest(shift + first, spec)
    return Work(
        count=ends[-1:].astype(jnp.int32),
        tile=tile.astype(jnp.int32),
        row=row,
        begin=low // block_tokens,
        end=shift + last,
        low=low,
        first=first,
        last=last,
        shift=shift,
    )


def _lowest(position: Array, spec: AttentionSpec) -> Array:
    return jnp.zeros_like(position) if spec.window is None else jnp.maximum(position - spec.window + 1, 0)


def attend(
    q: Float[Array, "tiles K M lanes"],
    cache: Float[Array, "pages K rows 2xlanes"],
    block_tables: Int[Array, "R P"],
    work: Work,
    use: AttentionUse,
    blocks: Blocks,
    *,
    sinks: Float[Array, "K M"] | None,
    slopes: Float[Array, "K M"] | None,
    scales: KVScales | None,
    interpret: pltpu.InterpretParams | None,
) -> Float[Array, "tiles K M lanes"]:
    """Attention of all items of `work`; tiles that no item names are left as they were found, NaN perhaps.

    Row m of a tile is token m % block_q of head m // block_q of the group. Queries lie in the lanes as keys do
    (`PageShape.query_lanes`), and so do outputs as values.
    """
    spec, shape = use.spec, PageShape.of(use)
    _, kv_heads, rows, lanes = q.shape
    assert cache.shape[1:] == (kv_heads, shape.rows, shape.lanes), (cache.shape, shape)
    assert rows % blocks.block_q == 0 and lanes == shape.query_lanes, (q.shape, blocks, shape)
    columns = block_tables.shape[1]
    tables = jnp.pad(block_tables, ((0, 0), (0, -columns % _IDS))).reshape(-1, 1, _IDS)
    per_row = -(-columns // _IDS)
    block_rows = blocks.pages * shape.rows
    offsets = shape.slot_positions(blocks.pages)
    static = _Static(
        spec=spec, shape=shape, blocks=blocks, ids_per_row=per_row, rows=rows, exact=q.dtype == jnp.float32
    )
    tile = pl.BlockSpec((None, kv_heads, rows, lanes), lambda i, _, tiles, *__: (tiles[i], 0, 0, 0))
    biases = [x[..., None].astype(jnp.float32) for x in (sinks, slopes) if x is not None]
    ones = jnp.ones(kv_heads, jnp.float32)
    key_scales, value_scales = (ones, ones) if scales is None else (scales.keys, scales.values)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=11,
        grid=(jnp.maximum(work.count[0], 1),),
        in_specs=[
            tile,
            pl.BlockSpec(memory_space=pltpu.HBM),
            pl.BlockSpec(memory_space=pltpu.HBM),
            *(_constant(x.shape) for x in (offsets[None], offsets[:, None], *biases)),
        ],
        out_specs=tile,
        scratch_shapes=[
            pltpu.VMEM((2, kv_heads, block_rows, shape.lanes), cache.dtype),
            pltpu.SMEM((2, 1, _IDS), jnp.int32),
            pltpu.SMEM((2,), jnp.int32),
            pltpu.VMEM((kv_heads, rows, lanes), jnp.float32),
            pltpu.VMEM((kv_heads, rows, 128), jnp.float32),
            pltpu.VMEM((kv_heads, rows, 128), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )
    body = functools.partial(_kernel, static, sinks is not None, slopes is not None)
    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid_spec=grid,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),
            vmem_limit_bytes=vmem_bytes(use, blocks) * 5 // 4,
        ),
        cost_estimate=_cost(q, cache, block_tables, use, blocks),
        interpret=False if interpret is None else interpret,
        name=f"paged_attention_{'decode' if blocks.block_q == 1 else 'prefill'}",
    )(
        work.count, work.tile, work.row, work.begin, work.end, work.low, work.first, work.last, work.shift,
        key_scales, value_scales,
        q, tables, cache, offsets[None], offsets[:, None], *biases,
    )  # fmt: skip


def _constant(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """The static parameters of the program."""

    spec: AttentionSpec
    shape: PageShape
    blocks: Blocks
    ids_per_row: int  # pieces of 128 page ids of a row of the table
    rows: int  # M
    exact: bool  # float32 all the way

    @property
    def block_tokens(self) -> int:
        return self.blocks.pages * self.shape.page_size


def _kernel(static: _Static, has_sinks: bool, has_slopes: bool, *refs):
    names = iter(refs)
    item = _Items(*(next(names) for _ in range(9)))
    key_scales, value_scales, q, tables, cache, key_offsets, value_offsets = (next(names) for _ in range(7))
    sinks = next(names) if has_sinks else None
    slopes = next(names) if has_slopes else None
    out, buffer, ids, state, mix, top, total, page_sems, id_sems = names
    i = pl.program_id(0)
    copies = _Copies(static, item, tables, cache, buffer, ids, state, page_sems, id_sems)
    fold = functools.partial(
        _fold, static, item, i, q, buffer, key_offsets, value_offsets, slopes, key_scales, mix, top, total
    )

    @pl.when((i == 0) & (item.count[0] > 0))
    def _():
        state[0] = 0
        state[1] = 1
        copies.start_ids(0, copies.piece_of(item.begin[0]), 0)
        copies.start_block(0, item.begin[0], 0)

    before = item.tile[jnp.maximum(i - 1, 0)]

    @pl.when((i == 0) | (before != item.tile[i]))
    def _():
        top[...] = jnp.full_like(top, _LOWEST) if sinks is None else jnp.broadcast_to(sinks[...], top.shape) * _LOG2E
        total[...] = jnp.full_like(total, 0.0 if sinks is None else 1.0)
        mix[...] = jnp.zeros_like(mix)

    stop = jnp.where(item.count[0] > 0, item.blocks_end(i, static.block_tokens), 0)

    def advance(c, slot):
        last_block, last_item = c + 1 == stop, i + 1 == item.count[0]
        next_item = jnp.where(last_block, jnp.minimum(i + 1, item.count[0] - 1), i)

        @pl.when(~(last_block & last_item))
        def _():
            copies.start_block(next_item, jnp.where(last_block, item.begin[next_item], c + 1), 1 - slot)

        copies.wait_block(i, c, slot)
        fold(c, slot)
        return 1 - slot

    state[0] = lax.fori_loop(item.begin[i], stop, advance, state[0])
    after = item.tile[jnp.clip(i + 1, 0, jnp.maximum(item.count[0] - 1, 0))]

    @pl.when((i + 1 == item.count[0]) | (after != item.tile[i]))
    def _():
        for h in range(static.spec.num_kv_heads):
            weight = total[h, :, :1]
            scale = value_scales[h] / jnp.where(weight == 0.0, 1.0, weight)
            out[h] = (mix[h] * scale).astype(out.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class _Items:
    """References to the arrays of `Work` in SMEM."""

    count: Array
    tile: Array
    row: Array
    begin: Array
    end: Array
    low: Array
    first: Array
    last: Array
    shift: Array

    def blocks_end(self, i, block_tokens: int):
        return lax.div(self.end[i] + (block_tokens - 1), block_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class _Copies:
    """Starts and awaits copies from HBM. `state` holds the slot of pages and the half of `ids` now in use."""

    static: _Static
    item: _Items
    tables: Array
    cache: Array
    buffer: Array
    ids: Array
    state: Array
    page_sems: Array
    id_sems: Array

    def piece_of(self, block):
        return lax.div(block * self.static.blocks.pages, _IDS)

    def start_ids(self, i, piece, half) -> None:
        self._ids(i, piece, half).start()

    def _ids(self, i, piece, half):
        source = self.tables.at[self.item.row[i] * self.static.ids_per_row + piece]
        return pltpu.make_async_copy(source, self.ids.at[half], self.id_sems.at[half])

    def start_block(self, i, c, slot) -> None:
        """Starts the pages of block c of item i; on the way, takes over the piece of page ids that holds them."""
        piece, blocks = self.piece_of(c), self.static.blocks

        @pl.when((c == self.item.begin[i]) | (lax.rem(c * blocks.pages, _IDS) == 0))
        def _():
            half = 1 - self.state[1]
            self.state[1] = half
            self._ids(i, piece, half).wait()
            self._start_next_ids(i, piece, 1 - half)

        half = self.state[1]

        def start(j, _):
            page = self.ids[half, 0, lax.rem(c * blocks.pages, _IDS) + j]
            self._page(page, j, slot).start()

        lax.fori_loop(0, self._num_pages(i, c), start, None)

    def _start_next_ids(self, i, piece, half) -> None:
        last_piece = self.piece_of(self.item.blocks_end(i, self.static.block_tokens) - 1) == piece
        next_item = jnp.where(last_piece, jnp.minimum(i + 1, self.item.count[0] - 1), i)
        next_piece = jnp.where(last_piece, self.piece_of(self.item.begin[next_item]), piece + 1)

        @pl.when(~(last_piece & (i + 1 == self.item.count[0])))
        def _():
            self.start_ids(next_item, next_piece, half)

    def wait_block(self, i, c, slot) -> None:
        lax.fori_loop(0, self._num_pages(i, c), lambda j, _: self._page(0, j, slot).wait(), None)

    def _num_pages(self, i, c):
        page_size, pages = self.static.shape.page_size, self.static.blocks.pages
        used = lax.div(self.item.end[i] + (page_size - 1), page_size)
        return jnp.minimum(used - c * pages, pages)

    def _page(self, page, j, slot):
        rows = self.static.shape.rows
        target = self.buffer.at[slot, :, pl.ds(pl.multiple_of(j * rows, rows), rows), :]
        return pltpu.make_async_copy(self.cache.at[page], target, self.page_sems.at[slot])


def _fold(
    static: _Static, item, i, q, buffer, key_offsets, value_offsets, slopes, key_scales, mix, top, total, c, slot
) -> None:
    """Adds block c to the online softmax of every head; blocks that all queries see whole need no mask."""
    start = c * static.block_tokens
    block_q = static.blocks.block_q
    whole = (
        (static.shape.rows == static.shape.page_size)
        & (start >= item.low[i])
        & (start + static.block_tokens <= item.shift[i] + item.first[i] + 1)
        & (item.first[i] == 0)
        & (item.last[i] == block_q)
    )
    if static.spec.window is not None:  # the tile's last query must see the block's first key
        whole &= start > item.shift[i] + item.last[i] - 1 - static.spec.window

    def positions():
        token = lax.broadcasted_iota(jnp.int32, (static.rows, 1), 0) & (block_q - 1)
        own = (token >= item.first[i]) & (token < item.last[i])
        return jnp.where(own, token + item.shift[i], -1)  # [M, 1]

    def head(h, masked: bool) -> None:
        block = buffer[slot, h]  # [S, lanes of both]
        keys, values = static.shape.split(block)
        compute = jnp.float32 if static.exact else jnp.bfloat16
        keys = keys.astype(compute)
        score = _dot(q[h], keys, 1, static.exact)  # [M, S]
        score = _scaled(score, static.spec, key_scales[h])
        query_at = positions()
        key_at = key_offsets[...] + start  # [1, S]
        if slopes is not None:
            score += (slopes[h] * _LOG2E) * (key_at - query_at).astype(jnp.float32)
        if masked:
            seen = key_at <= query_at
            if static.spec.window is not None:
                seen &= key_at > query_at - static.spec.window
            score = jnp.where(seen, score, _HIDDEN)
            # Numbers outside may be NaN, and 0 * NaN is NaN.
            value_at = value_offsets[...] + start
            held = (value_at >= item.low[i]) & (value_at < item.end[i])  # [S, 1]
            values = jnp.where(held, values.astype(jnp.float32), 0.0)
        values = values.astype(compute)
        old = top[h, :, :1]
        new = jnp.maximum(old, score.max(-1, keepdims=True))
        weights = jnp.exp2(score - new)
        shrink = jnp.exp2(old - new)
        total[h] = jnp.broadcast_to(total[h, :, :1] * shrink + weights.sum(-1, keepdims=True), total.shape[1:])
        mix[h] = mix[h] * shrink + _dot(weights.astype(compute), values, 0, static.exact)
        top[h] = jnp.broadcast_to(new, top.shape[1:])

    def heads(masked: bool) -> None:
        kv_heads = static.spec.num_kv_heads
        if kv_heads <= _UNROLL and block_q == 1:
            for h in range(kv_heads):
                head(h, masked)
        else:
            lax.fori_loop(0, kv_heads, lambda h, _: head(h, masked), None)

    pl.when(whole)(lambda: heads(masked=False))
    pl.when(~whole)(lambda: heads(masked=True))


def _scaled(score: Array, spec: AttentionSpec, key_scale: Array) -> Array:
    """In units of log2, so that the softmax needs exp2 alone."""
    if spec.soft_cap is None:
        return score * (spec.scale * _LOG2E * key_scale)
    return (spec.soft_cap * _LOG2E) * jnp.tanh(score * (spec.scale / spec.soft_cap * key_scale))


def _dot(x: Array, y: Array, contracted: int, exact: bool) -> Array:
    return lax.dot_general(
        x,
        y,
        (((1,), (contracted,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else lax.Precision.DEFAULT,
        preferred_element_type=jnp.float32,
    )


def _cost(q: Array, cache: Array, block_tables: Array, use: AttentionUse, blocks: Blocks) -> pl.CostEstimate:
    """For XLA's schedule: every row as long as its table and the pool allow, which is what a full server holds."""
    spec, num_rows = use.spec, block_tables.shape[0]
    num_pages = min(block_tables.size, cache.shape[0] - 1)
    page_bytes = cache.nbytes // cache.shape[0]
    # Each tile of a long prompt reads its row again; decode reads every row once.
    reads = 1 if blocks.block_q == 1 else -(-q.shape[0] // num_rows)
    pairs = q.shape[0] * blocks.block_q * num_pages * use.page_size // num_rows
    return pl.CostEstimate(
        flops=4 * pairs * spec.num_query_heads * spec.head_dim,
        transcendentals=pairs * spec.num_query_heads,
        bytes_accessed=reads * num_pages * page_bytes + 2 * q.nbytes,
    )


# --- sizes ----------------------------------------------------------------------------------------------------------


def tile_rows(spec: AttentionSpec, block_q: int) -> int:
    """M: query heads of a key head times tokens of a tile, a multiple of the 16 rows that bfloat16 packs."""
    group = spec.num_query_heads // spec.num_kv_heads
    return -(-group * block_q // 16) * 16


def vmem_bytes(use: AttentionUse, blocks: Blocks) -> int:
    """Bytes that the kernel holds in VMEM at once: tiles in and out, each twice; two blocks of pages; state; scores."""
    spec, shape = use.spec, PageShape.of(use)
    kv_heads, lanes, rows = spec.num_kv_heads, shape.query_lanes, tile_rows(spec, blocks.block_q)
    block = blocks.pages * shape.rows
    tiles = 4 * kv_heads * rows * lanes * jnp.dtype(use.query_dtype).itemsize
    pages = 2 * kv_heads * block * shape.lanes * jnp.dtype(use.cache_dtype).itemsize
    state = kv_heads * rows * (lanes + 2 * 128) * 4
    biases = 2 * kv_heads * rows * 128 * 4
    scores = 4 * rows * block * 4 + 3 * block * shape.lanes * 4
    return tiles + pages + state + biases + scores


def default_blocks(variant: str, use: AttentionUse) -> Blocks:
    """Sizes without a measurement: blocks of about 512 tokens, fewer where many heads make them large."""
    spec, shape = use.spec, PageShape.of(use)
    token_bytes = spec.num_kv_heads * shape.lanes * jnp.dtype(use.cache_dtype).itemsize
    tokens = max(shape.page_size, min(512, 4 * 2**20 // token_bytes))
    pages = max(1, min(_IDS, 2 ** int(math.log2(tokens / shape.page_size))))
    if variant == "decode":
        return Blocks(block_q=1, pages=pages)
    group = spec.num_query_heads // spec.num_kv_heads
    block_q = 2 ** int(math.log2(max(16, min(128, 512 // group, 4096 // (group * spec.num_kv_heads)))))
    return Blocks(block_q=block_q, pages=pages)


def candidates(variant: str, use: AttentionUse) -> Iterator[Blocks]:
    """Sizes that are worth timing, in no order; some may not fit."""
    for pages in (2**n for n in range(8) if 128 <= 2**n * use.page_size <= 2048):
        for block_q in (1,) if variant == "decode" else (16, 32, 64, 128, 256):
            yield Blocks(block_q=block_q, pages=pages)
