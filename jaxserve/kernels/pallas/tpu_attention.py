"""Ragged paged attention on TPUs (Mosaic): pages are copied by hand, two blocks in flight, one core walks a work list.

The kernel, its work lists and its block sizes are here. The cache is written by `tpu_write`; a batch is divided into
rows of one query and rows of several by `tpu_implementation`.

One program of the grid is one *item*: a tile of queries and one row (sequence) that has tokens in that tile.

    item:      tile 0, row 5 |  tile 0, row 6 |  tile 1, row 6 |  tile 2, row 6   ...
    queries:   [K, M, lanes]    the tile stays in VMEM while its items follow one another
    blocks:    [b0][b1]         [b0][b1][b2]     [b0][b1][b2][b3]                 one block in use, the next one coming
    in b1:     [page|page|page|page][page|page|page|page][page|page|....|....]    compute blocks; the last is half empty
    page ids:  128 or more at a time from HBM into SMEM, also one piece ahead

So a table of any length costs a few KiB of SMEM, nothing waits for a page whose turn was known before, and the last
block of an item already fetches the first of the next. A block is megabytes, since a copy takes about a microsecond
to begin; a compute block is as many tokens as keep the units busy. Only pages that a query of the item sees are copied.
A tile of one token is the decode variant: its M rows are the query heads that share a key head. A longer tile packs
(head of the group, token) into M, so that the matrix unit sees hundreds of rows whatever the group size.

What is counted in the compiler's schedule and kept short: a page lies in VMEM as it does in HBM, so its copy is one
contiguous piece whose address is one shift (`tpu_layout` says what that takes); page ids are an array of one dimension
for the same reason; one wait serves a whole block; and values that are not the row's are zeroed where they lie, so that
no product has to select them.

Each head is a 2-d product with no relayout, since the pages of a head are plain matrices one below the other. Copies
bound decode; prompts are bound by products, and two rules keep the matrix units at work there:

- Several heads lie abreast in one run of code without a branch, and the scores of a head stand in it before the softmax
  of the head before. For the compiler fills the units from such a run alone, and it keeps the order of products: the
  matrix units multiply one head while the vector units raise the other.
- A statistic of a row (maximum, sum) is a register of 128 lanes, the maximum the same in all of them, the sum spread
  over them. So nothing is broadcast, and sums are taken across lanes once for an item, not once for a compute block.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, AttentionUse, KVScales
from jaxserve.kernels.pallas.tpu_layout import LANES, PageShape
from jaxserve.kernels.pallas.tpu_scalars import div, div_up, power_of_two, power_of_two_above, short_turns

_LOG2E = math.log2(math.e)
_IDS = 128  # page ids of one piece at least: the narrowest row that can be copied into SMEM
_HIDDEN = -1e30  # exp2(_HIDDEN - _LOWEST) is 0: a query that sees nothing of a block adds nothing
_LOWEST = -0.5e30
_DECODE_ABREAST = 8  # heads whose code is laid out one after the other; more of them loop
_PREFILL_ABREAST = 4  # of their scores most lie in VMEM
_LEAST_TILE = 16  # tokens of a tile of several: the rows of bfloat16 that the hardware moves together


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Sizes of one variant.

    Attributes:
      block_q: tokens of a tile of queries, a power of two; 1 is the decode variant.
      pages: pages that are copied as one block, a power of two.
      compute: pages of a compute block, a power of two; several of them make a block of `pages`.
    """

    block_q: int
    pages: int
    compute: int

    def within(self, columns: int, num_tokens: int) -> "Blocks":
        """No larger than a block table of `columns` pages, and a step of `num_tokens` tokens, need."""
        most = power_of_two_above(columns)
        return Blocks(
            block_q=min(self.block_q, max(_LEAST_TILE, power_of_two_above(num_tokens))),
            pages=min(self.pages, most),
            compute=min(self.compute, most),
        )


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


@functools.partial(jax.jit, static_argnames=("use", "blocks", "interpret"))
def attend(
    q: Float[Array, "tiles K M lanes"],
    cache: Float[Array, "pages K planes rows 128"],
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
    assert cache.shape[1:] == (kv_heads, shape.planes, shape.rows, LANES), (cache.shape, shape)
    assert rows % blocks.block_q == 0 and lanes == shape.query_lanes, (q.shape, blocks, shape)
    columns = block_tables.shape[1]
    ids = max(_IDS, blocks.pages)
    tables = jnp.pad(block_tables, ((0, 0), (0, -columns % ids))).reshape(-1, ids)
    offsets = shape.slot_positions(blocks.compute)[None]
    static = _Static(
        spec=spec,
        shape=shape,
        blocks=blocks,
        ids=ids,
        pieces=-(-columns // ids),
        rows=rows,
        exact=q.dtype == jnp.float32,
    )
    tile = pl.BlockSpec((None, kv_heads, rows, lanes), lambda i, _, tiles, *__: (tiles[i], 0, 0, 0))
    biases = [
        jnp.broadcast_to(x[..., None].astype(jnp.float32), (*x.shape, LANES)) for x in (sinks, slopes) if x is not None
    ]
    ones = jnp.ones(kv_heads, jnp.float32)
    key_scales, value_scales = (ones, ones) if scales is None else (scales.keys, scales.values)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=11,
        grid=(jnp.maximum(work.count[0], 1),),
        in_specs=[
            tile,
            pl.BlockSpec(memory_space=pltpu.HBM),
            pl.BlockSpec(memory_space=pltpu.HBM),
            *(_constant(x.shape) for x in (offsets, *biases)),
        ],
        out_specs=tile,
        scratch_shapes=[
            pltpu.VMEM((2 * blocks.pages, kv_heads, shape.planes, shape.rows, LANES), cache.dtype),
            pltpu.SMEM((2 * ids,), jnp.int32),
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
            # Page ids are those of the scheduler's tables, and a check costs more than the copy that it guards.
            disable_bounds_checks=True,
        ),
        cost_estimate=_cost(q, cache, block_tables, use, blocks),
        interpret=False if interpret is None else interpret,
        name=f"paged_attention_{'decode' if blocks.block_q == 1 else 'prefill'}",
    )(
        work.count, work.tile, work.row, work.begin, work.end, work.low, work.first, work.last, work.shift,
        key_scales, value_scales,
        q, tables, cache, offsets, *biases,
    )  # fmt: skip


def _constant(shape: tuple[int, ...]) -> pl.BlockSpec:
    return pl.BlockSpec(shape, lambda *_: (0,) * len(shape))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Static:
    """The static parameters of the program."""

    spec: AttentionSpec
    shape: PageShape
    blocks: Blocks
    ids: int  # page ids of a piece
    pieces: int  # of a row of the table
    rows: int  # M
    exact: bool  # float32 all the way

    @property
    def block_tokens(self) -> int:
        return self.blocks.pages * self.shape.page_size

    @property
    def compute_tokens(self) -> int:
        return self.blocks.compute * self.shape.page_size

    @property
    def product_dtype(self):
        return jnp.float32 if self.exact else jnp.bfloat16

    @property
    def abreast(self) -> int:
        """Heads whose code is laid out one after the other, so that the schedule can mix them; a divisor of K."""
        most = _DECODE_ABREAST if self.blocks.block_q == 1 else 1 if self.exact else _PREFILL_ABREAST
        return max(n for n in range(1, most + 1) if self.spec.num_kv_heads % n == 0)


def _kernel(static: _Static, has_sinks: bool, has_slopes: bool, *refs):
    names = iter(refs)
    item = _Items(*(next(names) for _ in range(9)))
    key_scales, value_scales, q, tables, cache, key_offsets = (next(names) for _ in range(6))
    sinks = next(names) if has_sinks else None
    slopes = next(names) if has_slopes else None
    out, buffer, ids, state, mix, top, total, page_sems, id_sems = names
    i = pl.program_id(0)
    copies = _Copies(static, item, tables, cache, buffer, ids, state, page_sems, id_sems)
    fold = functools.partial(_fold, static, item, i, q, buffer, key_offsets, slopes, key_scales, mix, top, total)

    @pl.when((i == 0) & (item.count[0] > 0))
    def _():
        state[0] = 0
        state[1] = 1
        copies.start_ids(0, copies.piece_of(item.begin[0]), 0)
        copies.start_block(0, item.begin[0], 0)

    def clear(heads) -> None:
        for h in heads:
            top[h] = jnp.full_like(top[h], _LOWEST) if sinks is None else sinks[h] * _LOG2E
            total[h] = jnp.full_like(total[h], 0.0 if sinks is None else 1 / LANES)
            mix[h] = jnp.zeros_like(mix[h])

    pl.when(i == 0)(lambda: _each_head(static, clear))

    stop = jnp.where(item.count[0] > 0, item.blocks_end(i, static.block_tokens), 0)

    def advance(c, slot):
        last_block, last_item = c + 1 == stop, i + 1 == item.count[0]
        next_item = jnp.where(last_block, jnp.minimum(i + 1, item.count[0] - 1), i)

        @pl.when(~(last_block & last_item))
        def _():
            copies.start_block(next_item, jnp.where(last_block, item.begin[next_item], c + 1), 1 - slot)

        copies.wait_block(i, c, slot)
        clean = functools.partial(_clean, static, item, i, c, buffer, slot)
        inside = _compute_blocks(static, item, i, c)
        clean(inside)
        lax.fori_loop(*inside, lambda s, _: fold(c, s, slot), None)
        return 1 - slot

    state[0] = lax.fori_loop(item.begin[i], stop, advance, state[0])
    after = item.tile[jnp.clip(i + 1, 0, jnp.maximum(item.count[0] - 1, 0))]

    @pl.when((i + 1 == item.count[0]) | (after != item.tile[i]))
    def _():
        def finish(heads) -> None:
            for h in heads:
                weight = total[h].sum(-1, keepdims=True)
                scale = value_scales[h] / jnp.where(weight == 0.0, 1.0, weight)
                out[h] = (mix[h] * scale).astype(out.dtype)
            clear(heads)  # for the next tile: here the unit that stores has little else to do

        _each_head(static, finish)


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
        return div_up(self.end[i], block_tokens)


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
        return div(block * self.static.blocks.pages, self.static.ids)

    def start_ids(self, i, piece, half) -> None:
        self._ids(i, piece, half).start()

    def _ids(self, i, piece, half):
        source = self.tables.at[self.item.row[i] * self.static.pieces + piece]
        return pltpu.make_async_copy(
            source, self.ids.at[pl.ds(half * self.static.ids, self.static.ids)], self.id_sems.at[half]
        )

    def start_block(self, i, c, slot) -> None:
        """Starts the pages of block c of item i; on the way, takes over the piece of page ids that holds them."""
        piece, first_id = self.piece_of(c), (c * self.static.blocks.pages) & (self.static.ids - 1)

        @pl.when((c == self.item.begin[i]) | (first_id == 0))
        def _():
            half = 1 - self.state[1]
            self.state[1] = half
            self._ids(i, piece, half).wait()
            self._start_next_ids(i, piece, 1 - half)

        first_id += self.state[1] * self.static.ids
        begin, end = self.pages_of(i, c)
        to = slot * self.static.blocks.pages

        def start(at, k) -> None:
            self._page(self.ids[first_id + at + k], to + at + k, slot).start()

        short_turns(begin, end, start)

    def _start_next_ids(self, i, piece, half) -> None:
        last_piece = self.piece_of(self.item.blocks_end(i, self.static.block_tokens) - 1) == piece
        next_item = jnp.where(last_piece, jnp.minimum(i + 1, self.item.count[0] - 1), i)
        next_piece = jnp.where(last_piece, self.piece_of(self.item.begin[next_item]), piece + 1)

        @pl.when(~(last_piece & (i + 1 == self.item.count[0])))
        def _():
            self.start_ids(next_item, next_piece, half)

    def wait_block(self, i, c, slot) -> None:
        """One wait for a full block; for others, one for each power of two in the number of pages."""
        begin, end = self.pages_of(i, c)
        count, pages = end - begin, self.static.blocks.pages
        pl.when(count == pages)(lambda: self._await(pages, slot))

        @pl.when(count != pages)
        def _():
            for bit in range(pages.bit_length() - 1):
                pl.when((count & (1 << bit)) != 0)(functools.partial(self._await, 1 << bit, slot))

    def _await(self, pages: int, slot) -> None:
        """A semaphore counts bytes, so this waits for any `pages` copies, whatever their places in the buffer."""
        some = self.buffer.at[pl.ds(0, pages)]
        pltpu.make_async_copy(some, some, self.page_sems.at[slot]).wait()

    def pages_of(self, i, c):
        """Which pages [begin, end) of block c any query of item i sees, counted from the block's first."""
        page_size, pages = self.static.shape.page_size, self.static.blocks.pages
        begin = jnp.maximum(div(self.item.low[i], page_size) - c * pages, 0)
        return begin, jnp.minimum(div_up(self.item.end[i], page_size) - c * pages, pages)

    def _page(self, page, place, slot):
        return pltpu.make_async_copy(self.cache.at[page], self.buffer.at[place], self.page_sems.at[slot])


def _compute_blocks(static: _Static, item: _Items, i, c):
    """Which compute blocks [begin, end) of block c any query of item i sees."""
    start, tokens = c * static.block_tokens, static.compute_tokens
    begin = div(jnp.maximum(item.low[i] - start, 0), tokens)
    return begin, div_up(jnp.minimum(item.end[i] - start, static.block_tokens), tokens)


def _clean(static: _Static, item: _Items, i, c, buffer, slot, inside) -> None:
    """Zeros in place of the values that compute blocks `inside` of block c hold beside those of item i.

    They would be multiplied by zero, but they may be NaN: slots after the end of the row, lines that fill up a page,
    and what earlier blocks left where this one copies nothing.
    """
    shape, compute, start = static.shape, static.blocks.compute, c * static.block_tokens
    first = slot * static.blocks.pages

    def clear(page, k) -> None:
        place = buffer.at[first + page + k, :, shape.value_planes]
        place[...] = jnp.zeros(place.shape, place.dtype)

    def keep(page, lines) -> None:
        def heads(some) -> None:
            for h in some:
                place = buffer.at[first + page, h, shape.value_planes]
                line = lax.broadcasted_iota(jnp.int32, place.shape, 1)
                # Through 32 bits, which every dtype of a cache fits into and every generation can select.
                place[...] = jnp.where(line < lines, place[...].astype(jnp.float32), 0.0).astype(place.dtype)

        _each_head(static, heads)

    tokens = jnp.minimum(item.end[i] - start, static.block_tokens)
    full = div(tokens, shape.page_size)
    torn = tokens - full * shape.page_size
    pl.when(torn != 0)(lambda: keep(full, torn))
    short_turns(full + (torn != 0).astype(jnp.int32), inside[1] * compute, clear)
    if static.spec.window is not None:
        copied = div(jnp.maximum(item.low[i] - start, 0), shape.page_size)
        short_turns(inside[0] * compute, copied, clear)
    if shape.rows != shape.page_size:
        lax.fori_loop(inside[0] * compute, full, lambda page, _: keep(page, shape.page_size), None)


def _each_head(static: _Static, some: Callable[[Sequence[Array | int]], None]) -> None:
    """Calls `some` with all heads, `abreast` at a time."""
    kv_heads, abreast = static.spec.num_kv_heads, static.abreast
    if kv_heads == abreast:
        some(range(kv_heads))
    else:
        lax.fori_loop(0, kv_heads // abreast, lambda n, _: some([n * abreast + k for k in range(abreast)]), None)


def _fold(static: _Static, item, i, q, buffer, key_offsets, slopes, key_scales, mix, top, total, c, part, slot) -> None:
    """Adds compute block `part` of block c to the online softmax of every head.

    Compute blocks that all queries see whole need no mask.
    """
    spec, shape, block_q = static.spec, static.shape, static.blocks.block_q
    pages, tokens = static.blocks.compute, static.compute_tokens
    first = slot * static.blocks.pages + part * pages
    start = c * static.block_tokens + part * tokens
    whole = (
        (shape.rows == shape.page_size)
        & (start >= item.low[i])
        & (start + tokens <= item.shift[i] + item.first[i] + 1)
        & (item.first[i] == 0)
        & (item.last[i] == block_q)
    )
    if spec.window is not None:  # the tile's last query must see the block's first key
        whole &= start > item.shift[i] + item.last[i] - 1 - spec.window

    def heads(some: Sequence[Array | int], masked: bool) -> None:
        def scores(h) -> tuple[Array, Array]:
            """Products of the queries with the block's keys [M, S], and the block's values [S, lanes]."""
            planes = [buffer[pl.ds(first, pages), h, plane].reshape(-1, LANES) for plane in range(shape.planes)]
            keys, values = (x.astype(static.product_dtype) for x in shape.split(planes))
            return _dot(q[h], keys, 1, static.exact), values

        following = scores(some[0])
        for n, h in enumerate(some):
            (score, values), following = following, scores(some[n + 1]) if n + 1 < len(some) else following
            columns = [
                _column(static, item, i, score[:, lane : lane + LANES], start, key_offsets[:, lane : lane + LANES],
                        None if slopes is None else slopes[h], key_scales[h], masked)
                for lane in range(0, score.shape[1], LANES)
            ]  # fmt: skip
            old = top[h]
            new = jnp.maximum(old, _lane_maximum(columns))
            weights = [jnp.exp2(column - new[:, : column.shape[1]]) for column in columns]
            shrink = jnp.exp2(old - new)
            top[h] = new
            total[h] = total[h] * shrink + _lane_sums(weights)
            weight = jnp.concatenate([w.astype(static.product_dtype) for w in weights], axis=1)
            wide = jnp.concatenate([shrink] * (shape.query_lanes // LANES), axis=1)
            mix[h] = mix[h] * wide + _dot(weight, values, 0, static.exact)

    if block_q == 1:  # a mask of a few rows hides behind the products
        _each_head(static, functools.partial(heads, masked=True))
    else:
        pl.when(whole)(lambda: _each_head(static, functools.partial(heads, masked=False)))
        pl.when(~whole)(lambda: _each_head(static, functools.partial(heads, masked=True)))


def _column(static: _Static, item, i, score, start, offset, slope, key_scale, masked: bool) -> Array:
    """Scores of at most 128 keys, [M, W], in units of log2: scaled, with their bias, those that are not seen hidden.

    `offset` [1, W] are the places of the keys from `start`; `slope` [M, 128] or None.
    """
    spec, block_q, width = static.spec, static.blocks.block_q, score.shape[1]
    score = _scaled(score, spec, key_scale)
    if not masked and slope is None:
        return score
    if block_q == 1:
        at = item.shift[i] - start
    else:
        token = lax.broadcasted_iota(jnp.int32, score.shape, 0) & (block_q - 1)
        own = (token >= item.first[i]) & (token < item.last[i])
        at = jnp.where(own, token + item.shift[i], -1) - start  # [M, W]: where a query is, seen from the first key
    if slope is not None:
        score += (slope[:, :width] * _LOG2E) * (offset - at).astype(jnp.float32)
    if masked:
        seen = offset <= at
        if spec.window is not None:
            seen &= offset > at - spec.window
        score = jnp.where(seen, score, _HIDDEN)
    return score


def _lane_maximum(columns: Sequence[Array]) -> Array:
    """The maximum of each row, [M, 128], the same in all lanes."""
    full = [column for column in columns if column.shape[1] == LANES]
    joined = [*([functools.reduce(jnp.maximum, full)] if full else []), *columns[len(full) :]]
    most = functools.reduce(jnp.maximum, [column.max(-1, keepdims=True) for column in joined])
    return jnp.broadcast_to(most, (most.shape[0], LANES))


def _lane_sums(columns: Sequence[Array]) -> Array:
    """[M, 128] whose lanes add up to the sum of each row."""
    full = [column for column in columns if column.shape[1] == LANES]
    rest = [
        jnp.broadcast_to(column.sum(-1, keepdims=True) / LANES, (column.shape[0], LANES))
        for column in columns[len(full) :]
    ]
    return functools.reduce(jnp.add, full + rest)


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
    """M: query heads of a key head times tokens of a tile, a multiple of the 8 rows of a register."""
    group = spec.num_query_heads // spec.num_kv_heads
    return -(-group * block_q // 8) * 8


def vmem_bytes(use: AttentionUse, blocks: Blocks) -> int:
    """Bytes that the kernel holds in VMEM at once: tiles in and out, each twice; two blocks of pages; state; scores."""
    spec, shape = use.spec, PageShape.of(use)
    kv_heads, lanes, rows = spec.num_kv_heads, shape.query_lanes, tile_rows(spec, blocks.block_q)
    part = blocks.compute * shape.rows
    tiles = 4 * kv_heads * rows * lanes * jnp.dtype(use.query_dtype).itemsize
    pages = 2 * blocks.pages * _page_bytes(use)
    state = kv_heads * rows * (lanes + 2 * 128) * 4
    biases = 2 * kv_heads * rows * 128 * 4
    scores = _PREFILL_ABREAST * rows * part * 4 + 3 * part * shape.planes * LANES * 4
    return tiles + pages + state + biases + scores


def default_blocks(variant: str, use: AttentionUse) -> Blocks:
    """Sizes without a measurement.

    A copy takes about a microsecond to begin, in which the fastest chip moves 4 MB: blocks are as large as that.
    """
    spec, decode = use.spec, variant == "decode"
    pages = power_of_two(4 * 2**20 // _page_bytes(use))
    # A single head leaves the units idle between its two products: longer compute blocks hide that.
    tokens = max(512, 2048 // spec.num_kv_heads) if decode else 512
    compute = min(pages, power_of_two(tokens // use.page_size))
    if decode:
        return Blocks(block_q=1, pages=pages, compute=compute)
    group = spec.num_query_heads // spec.num_kv_heads
    rows = 1024 if spec.num_kv_heads == 1 else 512  # a single head has no other beside it, and needs the more rows
    block_q = power_of_two(max(_LEAST_TILE, min(rows // 4, rows // group, 4096 // (group * spec.num_kv_heads))))
    return Blocks(block_q=block_q, pages=pages, compute=compute)


def _page_bytes(use: AttentionUse) -> int:
    shape = PageShape.of(use)
    return use.spec.num_kv_heads * shape.planes * shape.rows * LANES * jnp.dtype(use.cache_dtype).itemsize


def candidates(variant: str, use: AttentionUse) -> Iterator[Blocks]:
    """Sizes that are worth timing, in no order; some may not fit."""
    tiles, fetched = ((1,), (1, 2, 4, 8, 16)) if variant == "decode" else ((16, 32, 64, 128, 256), (1, 4))
    for pages in sorted({power_of_two(mib * 2**20 // _page_bytes(use)) for mib in fetched}):
        for compute in (2**n for n in range(10) if 128 <= 2**n * use.page_size <= 4096):
            if compute <= pages:
                for block_q in tiles:
                    yield Blocks(block_q=block_q, pages=pages, compute=compute)
