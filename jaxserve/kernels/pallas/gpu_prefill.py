"""Rows of several queries each on Hopper GPUs: chunks of prompts, where the cost is multiplying.

A ragged batch is cut into work items; their kernel follows FlashAttention-3 (Shah et al. 2024, arXiv:2407.08608). Rows
of one query are in `gpu_decode`.

One program takes one work item, `tokens` successive tokens of a row, for `heads` query heads of one key/value head:

      rows of the two products            shared memory                       three warpgroups
    +---------------------------+       q  [2, block_q, H']                  0  rows 0 .. block_q - 1
    | head 0: token 0 .. BT - 1 |       K  [stages, block_kv, H']  <- TMA    1  the other rows
    | head 1: token 0 .. BT - 1 |       V  [stages, block_kv, H']  <- TMA    2  page ids, all copies (and, of a
    | ...                       |                                               cache of 8 bits, the widening)
    +---------------------------+

Scores, weights and sums stay in registers; the weights are the register operand of the second product. The two
warpgroups of rows work in ping-pong: while one multiplies, the other does its exponentials.

Why heads are packed: a piece of 7 tokens fills 28 rows of a tile rather than 7 of each of four, all rows of a tile
end near the same key, and a tile still reads no more keys per row than one of 128 tokens. Rows go head by head since a
head's tokens are then one rectangle of [T, N, H]: queries come and results go by TMA with no transposed copy.

Why tiles begin at multiples of 8 tokens of the batch, whatever the rows: queries come in a pattern of 8 by 128 bytes,
and a copy into a pattern cannot begin within one of its eights. It would bring zeros for what lies in the next.

Why a tile at a row's ends stores piecewise: the tokens around it are its neighbours'. A TMA store has a static number
of rows, so the 1 to BT - 1 rows left go out in pieces of 64, 32, .. 1 rows, each of which is stored or not; they leave
through memory without a pattern. At the end of the whole batch the tile moves back, so that no copy passes the array's
end.

Why the kernel has its own barriers: shared memory is written in three places only. The producer widens tiles, and
commits each before it starts the copy into the place that it has read. Tails of values are zeroed by the threads that
read them. Results take the place of the queries once both warpgroups have arrived at the last turn, which each thread
does after its last product of queries; pieces of results leave one another's place when their copies have been awaited.

Why keys are visited from the first visible page on, rather than from a multiple of the tile: pages before the window
may have been given away, and hold anything.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, AttentionUse, KVScales
from jaxserve.kernels.pallas import gpu_layout as layout
from jaxserve.kernels.pallas.gpu_layout import LOG2E, LOWEST, GpuPages, Interpret

_MATRIX, _ROWS = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA.reduce(1)
# Tokens of a batch that a copy (TMA) into the pattern of wgmma takes together: it starts at a multiple of them.
_ALIGNED = 8
_EDGE = 64  # columns that a tile at a row's end stores at a time
# Registers of a thread of the first two warpgroups, and of the third: one block of 384 threads starts with 168 each, so
# twice the first plus the second is at most 504, or the kernel waits for registers that never come.
_REGISTERS = (216, 72)
_REGISTERS_WIDE = (232, 40)  # head dims over 128: sums of 64 x 256 take 128 registers alone
_REGISTERS_WIDE_NARROW = (224, 56)  # the same with 8-bit caches, whose third warpgroup computes too


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PrefillBlocks:
    """Sizes of one program.

    Attributes:
      block_q: rows (a query head of a token) of one warpgroup: 64 or 128.
      block_kv: keys of a tile, a multiple of 64.
      stages: tiles of keys and values in flight.
      heads: query heads of a program; divides the query heads of a key/value head.
      landing: tiles of 8-bit keys and values on their way to the producer, for caches of 8 bits.
    """

    block_q: int
    block_kv: int
    stages: int
    heads: int
    landing: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of a work item: as many as fill the rows, in whole groups of 8."""
        return 2 * self.block_q // self.heads // _ALIGNED * _ALIGNED


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Segment:
    """Rows of one warpgroup that are successive tokens of one head, seen from the program."""

    row: int
    head: int
    token: int
    count: int


def _segments(blocks: PrefillBlocks) -> list[list[_Segment]]:
    """The rows of each warpgroup. A head's tokens may cross from one warpgroup to the next."""
    found: list[list[_Segment]] = [[], []]
    for head in range(blocks.heads):
        row, end = head * blocks.tokens, (head + 1) * blocks.tokens
        while row < end:
            group = row // blocks.block_q
            count = min(end, (group + 1) * blocks.block_q) - row
            token = row - head * blocks.tokens
            found[group].append(_Segment(row=row - group * blocks.block_q, head=head, token=token, count=count))
            row += count
    return found


def default_blocks(use: AttentionUse) -> PrefillBlocks:
    """Sizes for a use that was not measured: the tiles of FlashAttention-3, as deep as shared memory allows."""
    lanes = layout.padded_head_dim(use.spec.head_dim)
    block_kv = 128 if lanes <= 128 and _holds_pages(128, use.page_size) else 64
    return _depths(use, block_q=64, block_kv=block_kv)[-1]


def candidates(use: AttentionUse) -> list[PrefillBlocks]:
    """Sizes worth measuring: all that fit in shared memory and, by count, in registers."""
    lanes = layout.padded_head_dim(use.spec.head_dim)
    found = []
    for block_q in (64, 128):
        for block_kv in (64, 128, 256):
            registers = block_q * (lanes + block_kv + block_kv // 2) // 128  # sums, scores and weights of a thread
            if registers <= 200 and _holds_pages(block_kv, use.page_size):
                found += _depths(use, block_q, block_kv)
    return found


def _depths(use: AttentionUse, block_q: int, block_kv: int) -> list[PrefillBlocks]:
    """Blocks of one size with all depths of pipeline that fit in shared memory, or the least one."""
    narrow = jnp.dtype(use.cache_dtype).itemsize == 1
    depths = ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 2)) if narrow else ((1, 1), (2, 1), (3, 1), (4, 1))
    heads = _best_heads(use, block_q)
    found = [
        PrefillBlocks(block_q=block_q, block_kv=block_kv, stages=stages, heads=heads, landing=landing)
        for stages, landing in depths
    ]
    return [b for b in found if shared_memory_bytes(use, b) <= layout.SHARED_MEMORY_BYTES] or found[:1]


def _holds_pages(block_kv: int, page_size: int) -> bool:
    """Whether a tile is whole pages, or a page whole tiles."""
    return block_kv % page_size == 0 or page_size % block_kv == 0


def _best_heads(use: AttentionUse, block_q: int) -> int:
    """The most heads that leave the fewest rows empty."""
    group = use.spec.num_query_heads // use.spec.num_kv_heads
    rows = 2 * block_q
    fits = [n for n in range(1, group + 1) if group % n == 0 and rows // n >= 8]
    return max(fits, key=lambda n: (rows // n // 8 * 8 * n, n))


def shared_memory_bytes(use: AttentionUse, blocks: PrefillBlocks) -> int:
    """Shared memory of one program, rounded up."""
    lanes = layout.padded_head_dim(use.spec.head_dim)
    size = layout.tile_bytes((2 * blocks.block_q, lanes), jnp.bfloat16)
    size += 2 * layout.tile_bytes((blocks.stages * blocks.block_kv, lanes), jnp.bfloat16)
    size += layout.tile_bytes((2 * blocks.block_q, _EDGE), jnp.bfloat16)
    if jnp.dtype(use.cache_dtype).itemsize == 1:
        size += 2 * layout.tile_bytes((blocks.landing * blocks.block_kv, lanes), use.cache_dtype)
    return size + layout.REDUCTION_BYTES + 1024  # barriers


# --- the work list ---------------------------------------------------------------------------------------------------

# Columns of the work list.
_ROW, _TOKEN, _POSITION, _FROM, _TO, _FIRST_KEY, _TILES, _CONTEXT = range(8)


def max_items(num_tokens: int, num_rows: int, tokens: int) -> int:
    """A bound on the work items of any batch of this size: a row, and the padding, fills all of its items but the first
    and the last, and lacks at most `tokens` + 6 tokens in these two."""
    return (num_tokens + (min(num_rows, num_tokens // 2) + 1) * (tokens + _ALIGNED - 2)) // tokens


def work_list(
    batch: AttentionBatch, spec: AttentionSpec, num_tokens: int, tokens: int, block_kv: int
) -> Int[Array, "W 8"]:
    """One line per work item; a line with `_TO` == 0 is no work. Tokens of no row get lines that see no key.

    The line's tile is tokens `_TOKEN` .. of the batch, a multiple of `_ALIGNED`, at positions `_POSITION` .. of its row
    (less than 0 for what lies before it); `_FROM` .. `_TO` of them are its own. It visits `_TILES` tiles of keys from
    position `_FIRST_KEY` on.

    Rows with more keys to read come first, and so do the last tiles of each row, so that no long item starts late.
    Ranks and sums are comparisons of all with all: a sort is many launches, and rows are few.
    """
    assert num_tokens % _ALIGNED == 0 and tokens % _ALIGNED == 0, (num_tokens, tokens)
    num_rows = batch.context_lens.shape[0]
    starts = batch.q_starts.astype(jnp.int32)  # the last one starts the padding, which is treated as one more row
    ends = jnp.concatenate([starts[1:], jnp.full((1,), num_tokens, jnp.int32)])
    lens = ends - starts
    is_row = jnp.arange(num_rows + 1, dtype=jnp.int32) < num_rows
    contexts = jnp.concatenate([batch.context_lens.astype(jnp.int32), jnp.zeros((1,), jnp.int32)])
    begins = starts // _ALIGNED * _ALIGNED
    tiles = jnp.where((lens == 0) | (is_row & (lens == 1)), 0, (ends - begins + tokens - 1) // tokens)

    reach = contexts if spec.window is None else jnp.minimum(contexts, spec.window + tokens)
    index = jnp.arange(num_rows + 1, dtype=jnp.int32)
    before = (reach[None] > reach[:, None]) | ((reach[None] == reach[:, None]) & (index[None] < index[:, None]))
    rank = before.sum(1, dtype=jnp.int32)
    order = (jnp.where(rank[:, None] == index[None], index[:, None], 0)).sum(0, dtype=jnp.int32)

    item = jnp.arange(max_items(num_tokens, num_rows, tokens), dtype=jnp.int32)
    item_ends = jnp.cumsum(tiles[order], dtype=jnp.int32)
    place = jnp.minimum((item_ends[None] <= item[:, None]).sum(1, dtype=jnp.int32), num_rows)
    row = order[place]
    used = item < item_ends[-1]

    begin = begins[row] + jnp.where(used, (item_ends[place] - 1 - item) * tokens, 0)
    token = jnp.minimum(begin, num_tokens - tokens)  # no copy passes the array's end
    own_from, own_to = jnp.maximum(begin, starts[row]) - token, jnp.minimum(begin + tokens, ends[row]) - token
    position = contexts[row] - ends[row] + token
    end = position + own_to  # one past the last key that any of them sees
    first = jnp.zeros_like(end) if spec.window is None else position + own_from - spec.window + 1
    grain = min(batch.page_size, block_kv)
    first = jnp.maximum(first, 0) // grain * grain
    kv_tiles = jnp.where(contexts[row] > 0, (end - first + block_kv - 1) // block_kv, 0)
    columns = {
        _ROW: jnp.minimum(row, num_rows - 1),
        _TOKEN: token,
        _POSITION: position,
        _FROM: own_from,
        _TO: own_to,
        _FIRST_KEY: first,
        _TILES: kv_tiles,
        _CONTEXT: contexts[row],
    }
    return jnp.where(used[:, None], jnp.stack([columns[c] for c in range(8)], axis=1), 0)


@functools.partial(jax.jit, static_argnames=("spec", "blocks", "interpret"))
def attend_tiles(
    q: Float[Array, "T N H"],
    batch: AttentionBatch,
    cache: GpuPages,
    spec: AttentionSpec,
    blocks: PrefillBlocks,
    *,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    scales: KVScales | None = None,
    interpret: Interpret = None,
) -> Float[Array, "T N H"]:
    """Attention of all rows with more than one token, in q's dtype; zeros for padding tokens, anything elsewhere."""
    num_tokens, heads, head_dim = q.shape
    lanes = cache.keys.shape[-1]
    tokens = blocks.tokens
    assert spec.num_query_heads // spec.num_kv_heads % blocks.heads == 0, (spec, blocks)
    spare = max(tokens, -(-num_tokens // _ALIGNED) * _ALIGNED) - num_tokens
    if spare or lanes > head_dim:
        q = jnp.pad(q, ((0, spare), (0, 0), (0, lanes - head_dim)))
    items = work_list(batch, spec, num_tokens + spare, tokens, blocks.block_kv)
    # A tile may begin at any page and reach past the row's last one.
    tables = jnp.pad(batch.block_tables, ((0, 0), (0, layout.copies_per_tile(batch.page_size, blocks.block_kv))))
    key_scales, value_scales = (None, None) if scales is None else (scales.keys, scales.values)
    ones = jnp.ones((spec.num_kv_heads,), jnp.float32)
    factors = jnp.stack([ones if x is None else x.astype(jnp.float32) for x in (key_scales, value_scales)])
    biases = jnp.stack(
        [jnp.zeros((heads,), jnp.float32) if x is None else x.astype(jnp.float32) for x in (sinks, alibi_slopes)]
    )
    kernel = _Kernel(
        spec=spec,
        blocks=blocks,
        page_size=batch.page_size,
        lanes=lanes,
        narrow=cache.dtype.itemsize == 1,
        has_scales=scales is not None,
        has_sinks=sinks is not None,
        has_slopes=alibi_slopes is not None,
        interpret=interpret,
    )
    out = layout.launch(
        kernel.body,
        out_type=jax.ShapeDtypeStruct(q.shape, q.dtype),
        grid={"item": items.shape[0], "heads": heads // blocks.heads},
        scratch=kernel.scratch(q.dtype, cache.dtype),
        warpgroups=3,
        own_barriers=True,
        interpret=interpret,
    )(items, tables, factors * jnp.array([[spec.scale], [1.0]]), biases * LOG2E, q, cache.keys, cache.values)
    return out[:num_tokens, :, :head_dim]


# --- the kernel ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Refs:
    """The arguments of the program."""

    items: Any
    tables: Any
    factors: Any  # [2, K]: what scores are multiplied with, and what values are
    biases: Any  # [2, N]: sinks and slopes, for powers of 2
    q: Any
    keys: Any
    values: Any
    out: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Shared:
    """Shared memory and barriers of a program, in the order of `_Kernel.scratch`."""

    q: Any  # [2, block_q, H']; the results leave through it
    keys: Any  # [stages, block_kv, H']
    values: Any
    edge: Any  # [2, block_q, _EDGE], rows one after another
    q_full: Any
    keys_full: Any  # [stages]
    values_full: Any
    keys_free: Any
    values_free: Any
    turn: Any  # the two warpgroups of rows swap the tensor cores
    clean: Any  # the tail of the last tile of values was zeroed
    landing: tuple[Any, ...]  # of 8-bit caches: keys [landing, block_kv, H'], values, and a barrier for each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """One line of the work list, and which heads. Its numbers are read where they are used: registers are scarce."""

    items: Any
    line: Array
    head: Array
    kv_head: Array

    def __getitem__(self, column: int) -> Array:
        return self.items[self.line, column]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """The static parameters of a launch."""

    spec: AttentionSpec
    blocks: PrefillBlocks
    page_size: int
    lanes: int
    narrow: bool
    has_scales: bool
    has_sinks: bool
    has_slopes: bool
    interpret: Interpret

    @property
    def weight_dtype(self) -> jnp.dtype:
        """Of weights and values, which meet in one product.

        All numbers of 8 bits are float16s, and so are weights, with 3 more bits than in bfloat16; bfloat16 values may
        be too large.
        """
        return jnp.dtype(jnp.float16 if self.narrow else jnp.bfloat16)

    @property
    def registers(self) -> tuple[int, int]:
        if self.lanes <= 128:
            return _REGISTERS
        return _REGISTERS_WIDE_NARROW if self.narrow else _REGISTERS_WIDE

    def scratch(self, query_dtype: jnp.dtype, cache_dtype: jnp.dtype) -> tuple[Any, ...]:
        b = self.blocks
        tiles = [layout.tile_type((b.stages, b.block_kv, self.lanes), d) for d in (query_dtype, self.weight_dtype)]
        copies = layout.copies_per_tile(self.page_size, b.block_kv)
        full = plgpu.Barrier(num_arrivals=1 if self.narrow else copies, num_barriers=b.stages)
        free = plgpu.Barrier(num_arrivals=2, num_barriers=b.stages)
        landing: tuple[Any, ...] = ()
        if self.narrow:
            narrow = layout.tile_type((b.landing, b.block_kv, self.lanes), cache_dtype, 64)
            landed = plgpu.Barrier(num_arrivals=copies, num_barriers=b.landing)
            landing = (narrow, narrow, landed, landed)
        return (
            layout.tile_type((2, b.block_q, self.lanes), query_dtype),
            *tiles,
            plgpu.SMEM((2, b.block_q, _EDGE), query_dtype),
            plgpu.Barrier(num_arrivals=sum(len(s) for s in _segments(b))),
            full,
            full,
            free,
            free,
            plgpu.Barrier(num_arrivals=2),
            plgpu.Barrier(num_arrivals=1),
            landing,
        )

    def body(self, *args: Any) -> None:
        refs, shared = _Refs(*args[:8]), _Shared(*args[8:])
        head = lax.axis_index("heads") * self.blocks.heads
        group = self.spec.num_query_heads // self.spec.num_kv_heads
        item = _Item(items=refs.items, line=lax.axis_index("item"), head=head, kv_head=lax.div(head, jnp.int32(group)))
        warpgroup = lax.axis_index("wg")
        many, few = self.registers

        @pl.when(warpgroup < 2)
        def _() -> None:
            plgpu.set_max_registers(many, action="increase")
            pl.when(item[_TO] > 0)(lambda: self.consume(refs, shared, item, warpgroup))

        @pl.when(warpgroup == 2)
        def _() -> None:
            plgpu.set_max_registers(few, action="decrease")
            pl.when(item[_TO] > 0)(lambda: self.produce(refs, shared, item))

    # The third warpgroup.

    def produce(self, refs: _Refs, shared: _Shared, item: _Item) -> None:
        token, tiles = item[_TOKEN], item[_TILES]
        for group, segments in enumerate(_segments(self.blocks)):
            for s in segments:
                source = refs.q.at[pl.ds(token + s.token, s.count), item.head + s.head]
                plgpu.copy_gmem_to_smem(source, shared.q.at[group, pl.ds(s.row, s.count)], shared.q_full)
        if self.narrow:
            self.produce_widened(refs, shared, item)
            return

        @pl.loop(0, tiles)
        def _(t: Array) -> None:
            slot = lax.rem(t, jnp.int32(self.blocks.stages))
            first, page_ids = self.first_of(item, t), self.page_ids(refs, item, t)
            pl.when(t >= self.blocks.stages)(lambda: plgpu.barrier_wait(shared.keys_free.at[slot]))
            layout.copy_tile(refs.keys, page_ids, item.kv_head, first, shared.keys.at[slot], shared.keys_full.at[slot])
            pl.when(t >= self.blocks.stages)(lambda: plgpu.barrier_wait(shared.values_free.at[slot]))
            layout.copy_tile(
                refs.values, page_ids, item.kv_head, first, shared.values.at[slot], shared.values_full.at[slot]
            )

    def first_of(self, item: _Item, t: Array) -> Array:
        """The first key of the item's tile `t`."""
        return item[_FIRST_KEY] + t * self.blocks.block_kv

    def page_ids(self, refs: _Refs, item: _Item, t: Array) -> list[Array]:
        first = self.first_of(item, t)
        return layout.tile_page_ids(refs.tables, item[_ROW], first, self.page_size, self.blocks.block_kv)

    def produce_widened(self, refs: _Refs, shared: _Shared, item: _Item) -> None:
        """Tiles land as they are stored; this warpgroup writes them a second time in 16 bits."""
        landed_keys, landed_values, keys_landed, values_landed = shared.landing
        depth, stages = jnp.int32(self.blocks.landing), jnp.int32(self.blocks.stages)
        both = (
            (refs.keys, landed_keys, keys_landed, shared.keys, shared.keys_full, shared.keys_free),
            (refs.values, landed_values, values_landed, shared.values, shared.values_full, shared.values_free),
        )
        tiles = item[_TILES]
        for early in range(self.blocks.landing):

            @pl.when(early < tiles)
            def _(early: int = early) -> None:
                first, page_ids = self.first_of(item, jnp.int32(early)), self.page_ids(refs, item, jnp.int32(early))
                for pages, landing, landed, *_ in both:
                    layout.copy_tile(pages, page_ids, item.kv_head, first, landing.at[early], landed.at[early])

        @pl.loop(0, tiles)
        def _(t: Array) -> None:
            here, slot = lax.rem(t, depth), lax.rem(t, stages)
            held = item[_CONTEXT] - self.first_of(item, t)
            following = jnp.minimum(t + depth, tiles - 1)
            next_first, next_ids = self.first_of(item, following), self.page_ids(refs, item, following)
            more = t + depth < tiles
            for is_values, (pages, landing, landed, wide, full, free) in enumerate(both):
                plgpu.barrier_wait(landed.at[here])
                pl.when(t >= stages)(functools.partial(plgpu.barrier_wait, free.at[slot]))
                self.widen(landing.at[here], wide.at[slot], held if is_values else None)
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[slot])
                pl.when(more)(
                    functools.partial(
                        layout.copy_tile, pages, next_ids, item.kv_head, next_first, landing.at[here], landed.at[here]
                    )
                )

    def widen(self, narrow: Any, wide: Any, held: Array | None) -> None:
        """wide = narrow, keys as bfloat16 (`held` is None) and values as float16 with rows from `held` on zeroed.

        In pieces, since this warpgroup has few registers.
        """
        shape = (64, 64)
        for row in range(0, self.blocks.block_kv, 64):
            for lane in range(0, self.lanes, 64):
                piece = (pl.ds(row, 64), pl.ds(lane, 64))
                numbers = layout.cast(narrow.at[piece][...], _PAIRS, self.interpret)
                numbers = layout.widen(numbers) if held is None else numbers.astype(self.weight_dtype)
                if held is not None:
                    at = layout.iota(shape, 0, _PAIRS, self.interpret)
                    numbers = jnp.where(at < held - row, numbers, jnp.zeros((), numbers.dtype))
                wide.at[piece][...] = numbers

    # The first and second warpgroup.

    def consume(self, refs: _Refs, shared: _Shared, item: _Item, warpgroup: Array) -> None:
        b, spec = self.blocks, self.spec
        row = layout.iota((b.block_q,), 0, _ROWS, self.interpret) + warpgroup * b.block_q
        token = row
        for head in range(1, b.heads):
            token = jnp.where(row >= head * b.tokens, row - head * b.tokens, token)
        position = token + item[_POSITION]  # of each row's query
        slope = self.by_head(refs.biases, 1, item, row) if self.has_slopes else None
        if self.has_sinks:  # a score without a value: it starts the maximum and the sum
            top, total = self.by_head(refs.biases, 0, item, row), self.full((b.block_q,), 1.0, _ROWS)
        else:
            top, total = self.full((b.block_q,), LOWEST, _ROWS), self.full((b.block_q,), 0.0, _ROWS)
        acc = self.full((b.block_q, self.lanes), 0.0, _MATRIX)
        tiles, first_key = item[_TILES], item[_FIRST_KEY]
        key_factor = refs.factors[0, item.kv_head] if self.has_scales else spec.scale
        step = functools.partial(self.step, refs, shared, item, tiles, warpgroup, position, slope, key_factor)

        plgpu.barrier_wait(shared.q_full)
        pl.when(tiles > 0)(lambda: plgpu.barrier_wait(shared.keys_full.at[0]))
        pl.when(warpgroup == 1)(lambda: self.ping_pong(shared))
        first_query = item[_POSITION] + item[_FROM]
        full_to = lax.div(jnp.maximum(first_query + 1 - first_key, 0), jnp.int32(b.block_kv))
        full_to = jnp.minimum(full_to, tiles)
        state = (acc, top, total)
        full_from: Any = 0
        if spec.window is not None:
            last_query = item[_POSITION] + item[_TO] - 1
            hidden = jnp.maximum(last_query - spec.window + 1 - first_key, 0)
            full_from = jnp.minimum(lax.div(hidden + b.block_kv - 1, jnp.int32(b.block_kv)), tiles - 1)
            full_from = jnp.maximum(full_from, 0)  # the last tile has a loop of its own
            full_to = jnp.maximum(full_from, full_to)
            state = lax.fori_loop(0, full_from, functools.partial(step, masked=True, may_be_last=False), state)
        state = lax.fori_loop(full_from, full_to, functools.partial(step, masked=False, may_be_last=False), state)
        acc, _, total = lax.fori_loop(full_to, tiles, functools.partial(step, masked=True, may_be_last=True), state)
        pl.when(warpgroup == 0)(lambda: self.ping_pong(shared))

        factor = (refs.factors[1, item.kv_head] if self.has_scales else 1.0) / jnp.where(total == 0.0, 1.0, total)
        out = (acc * lax.broadcast_in_dim(factor, acc.shape, [0])).astype(refs.out.dtype)
        self.store(refs, shared, item, warpgroup, out)

    def full(self, shape: tuple[int, ...], value: float, registers: Any) -> Array:
        return layout.full(shape, value, registers, self.interpret)

    def by_head(self, numbers: Any, kind: int, item: _Item, row: Array) -> Float[Array, " block_q"]:
        """Each row's number of its head."""
        found = lax.broadcast_in_dim(numbers[kind, item.head], row.shape, [])
        for head in range(1, self.blocks.heads):
            found = jnp.where(row >= head * self.blocks.tokens, numbers[kind, item.head + head], found)
        return layout.cast(found, _ROWS, self.interpret)

    def ping_pong(self, shared: _Shared) -> None:
        plgpu.barrier_arrive(shared.turn)
        plgpu.barrier_wait(shared.turn)

    def step(
        self,
        refs: _Refs,
        shared: _Shared,
        item: _Item,
        tiles: Array,
        warpgroup: Array,
        position: Int[Array, " block_q"],
        slope: Float[Array, " block_q"] | None,
        key_factor: Any,
        t: Array,
        state: tuple[Array, Array, Array],
        *,
        masked: bool,
        may_be_last: bool,
    ) -> tuple[Array, Array, Array]:
        """One tile of keys folded into the online softmax (arXiv:1805.02867), in powers of 2.

        Either warpgroup holds the turn while it multiplies, and gives it up for its exponentials.
        """
        acc, top, total = state
        slot = lax.rem(t, jnp.int32(self.blocks.stages))
        used_again = t + self.blocks.stages < tiles
        raw = layout.product(
            shared.q.at[warpgroup],
            shared.keys.at[slot],
            self.interpret,
            transpose_b=True,
            meanwhile=lambda: self.ping_pong(shared),
        )
        pl.when(used_again)(lambda: plgpu.barrier_arrive(shared.keys_free.at[slot]))

        scores, factor = self.scores(item, raw, t, position, slope, key_factor, masked)
        new_top = jnp.maximum(top, scores.max(axis=1) * factor)
        shrink = jnp.exp2(top - new_top)
        weights = jnp.exp2(scores * factor - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        acc = acc * lax.broadcast_in_dim(shrink, acc.shape, [0])
        total = total * shrink
        operand = weights.astype(self.weight_dtype)

        def wait_for_values() -> None:
            plgpu.barrier_arrive(shared.turn)
            plgpu.barrier_wait(shared.values_full.at[slot])
            if may_be_last and not self.narrow:
                held = item[_CONTEXT] - self.first_of(item, t)
                pl.when(held < self.blocks.block_kv)(lambda: self.clean_values(shared, slot, held, warpgroup))
            plgpu.barrier_wait(shared.turn)

        # Sums hide in the wait. Head dim 256 has them after it on most tiles, as JAX's own kernel does; a tile that is
        # masked may have values to clean, and no registers left to keep the weights for later.
        if self.lanes <= 128 or masked or self.narrow:
            total = total + weights.sum(axis=1)
            acc, total, new_top, operand = lax.optimization_barrier((acc, total, new_top, operand))
            wait_for_values()
        else:
            wait_for_values()
            total = total + weights.sum(axis=1)

        def wait_for_keys() -> None:
            following = lax.rem(t + 1, jnp.int32(self.blocks.stages))
            pl.when(t + 1 < tiles)(lambda: plgpu.barrier_wait(shared.keys_full.at[following]))

        acc = layout.accumulate(acc, operand, shared.values.at[slot], self.interpret, meanwhile=wait_for_keys)
        pl.when(used_again)(lambda: plgpu.barrier_arrive(shared.values_free.at[slot]))
        return acc, new_top, total

    def scores(
        self,
        item: _Item,
        raw: Float[Array, "block_q block_kv"],
        t: Array,
        position: Int[Array, " block_q"],
        slope: Float[Array, " block_q"] | None,
        key_factor: Any,
        masked: bool,
    ) -> tuple[Float[Array, "block_q block_kv"], Any]:
        """Scores and what to multiply them with so that they are powers of 2; -inf where nothing is seen."""
        scores, rest = raw, key_factor * LOG2E
        if self.spec.soft_cap is not None:
            # cap * tanh(x / cap); lax.tanh's one instruction is off by 5e-4 of the cap, these two by 1e-7.
            root = lax.rsqrt(1.0 + jnp.exp2(raw * (key_factor * (2 * LOG2E / self.spec.soft_cap))))
            scores, rest = (self.spec.soft_cap * LOG2E) * (1.0 - 2.0 * (root * root)), 1.0
        if not (masked or slope is not None):
            return scores, rest
        column = layout.iota(raw.shape, 1, _MATRIX, self.interpret)
        behind = position - self.first_of(item, t)  # the column of the row's own token
        if slope is not None:
            distance = column.astype(jnp.float32) - _spread(behind.astype(jnp.float32), raw.shape)
            scores, rest = scores * rest + _spread(slope, raw.shape) * distance, 1.0
        if masked:
            seen = column <= _spread(behind, raw.shape)
            if self.spec.window is not None:
                seen = seen & (column > _spread(behind - self.spec.window, raw.shape))
            scores = jnp.where(seen, scores, -jnp.inf)
        return scores, rest

    def clean_values(self, shared: _Shared, slot: Array, held: Array, warpgroup: Array) -> None:
        """Zeroes the rows past the row's end: weights there are 0, but 0 * NaN is NaN.

        The first warpgroup does it for both. It is half a step ahead of the other, and waits for nothing here.
        """

        @pl.when(warpgroup == 0)
        def _() -> None:
            for row in range(0, self.blocks.block_kv, 64):

                @pl.when(held < row + 64)
                def _(row: int = row) -> None:
                    for lane in range(0, self.lanes, 64):
                        piece = shared.values.at[slot, pl.ds(row, 64), pl.ds(lane, 64)]
                        at = layout.iota((64, 64), 0, _MATRIX, self.interpret)
                        numbers = layout.cast(piece[...], _MATRIX, self.interpret)
                        piece[...] = jnp.where(at < held - row, numbers, jnp.zeros((), numbers.dtype))

            plgpu.commit_smem()
            plgpu.barrier_arrive(shared.clean)

        # Its turn comes after that too, but only as long as warpgroups take turns in this order.
        pl.when(warpgroup == 1)(lambda: plgpu.barrier_wait(shared.clean))

    def store(self, refs: _Refs, shared: _Shared, item: _Item, warpgroup: Array, out: Array) -> None:
        token, own_from, own_to = item[_TOKEN], item[_FROM], item[_TO]
        whole = (own_from == 0) & (own_to == self.blocks.tokens)

        @pl.when(whole)
        def _() -> None:
            shared.q.at[warpgroup][...] = out
            plgpu.commit_smem()
            self.for_segments(warpgroup, functools.partial(self.store_segment, refs, shared, item, token))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(jnp.logical_not(whole))
        def _() -> None:
            for lane in range(0, self.lanes, _EDGE):
                shared.edge.at[warpgroup][...] = out[:, lane : lane + _EDGE]
                plgpu.commit_smem()
                pieces = functools.partial(self.store_pieces, refs, shared, item, token, own_from, own_to, lane)
                self.for_segments(warpgroup, pieces)
                plgpu.wait_smem_to_gmem(0)

    def for_segments(self, warpgroup: Array, act: Callable[[int, _Segment], None]) -> None:
        for group, segments in enumerate(_segments(self.blocks)):

            @pl.when(warpgroup == group)
            def _(group: int = group, segments: list[_Segment] = segments) -> None:
                for segment in segments:
                    act(group, segment)

    def store_segment(self, refs: _Refs, shared: _Shared, item: _Item, token: Array, group: int, s: _Segment) -> None:
        target = refs.out.at[pl.ds(token + s.token, s.count), item.head + s.head]
        plgpu.copy_smem_to_gmem(shared.q.at[group, pl.ds(s.row, s.count)], target)

    def store_pieces(
        self,
        refs: _Refs,
        shared: _Shared,
        item: _Item,
        token: Array,
        own_from: Array,
        own_to: Array,
        lane: int,
        group: int,
        s: _Segment,
    ) -> None:
        """The item's own rows of a segment, in pieces of 2^i rows: one for each bit of their number."""
        at = jnp.clip(own_from - s.token, 0, s.count)
        left = jnp.clip(own_to - s.token, 0, s.count) - at
        for size in (128, 64, 32, 16, 8, 4, 2, 1):
            if size > s.count:
                continue

            @pl.when(lax.rem(lax.div(left, jnp.int32(size)), jnp.int32(2)) == 1)
            def _(at: Array = at, size: int = size) -> None:
                source = shared.edge.at[group, pl.ds(s.row + at, size)]
                tokens = pl.ds(token + s.token + at, size)
                plgpu.copy_smem_to_gmem(source, refs.out.at[tokens, item.head + s.head, pl.ds(lane, _EDGE)])

            at = at + lax.rem(lax.div(left, jnp.int32(size)), jnp.int32(2)) * size


def _spread(rows: Array, shape: tuple[int, ...]) -> Array:
    return lax.broadcast_in_dim(rows, shape, [0])


# Four neighbours in one thread: 32 bits of an 8-bit cache at a time, 64 of the widened one.
_PAIRS = plgpu.Layout.WGMMA_UPCAST_2X
