"""Paged attention in plain XLA for GPUs and TPUs that no kernel of their own supports: few loop turns, large products.

A turn of a loop costs an accelerator tens of microseconds whatever it computes, so each one gathers thousands of keys
and multiplies them in one batched product. (The loops of `xla_attention` are cut for the caches of a CPU: 33,024 turns
for a prompt of 8,192 tokens.)

Rows of one query: the contexts of all rows are cut into splits of about 512 tokens (split-K, as in Flash-Decoding), and
each turn takes the next splits of the flat list, up to 2**24 numbers of keys: ceil(splits / lanes) turns, so a long row
among short ones makes nobody wait. 64 rows of 4,096 tokens with 8 key heads of 128 take 16 turns of 32 splits.

Rows of several queries: one tile of queries after the other, each against blocks of about 1,024 keys from its window or
the start to its own end. A tile has 128 to 1,024 queries, so that query heads x queries x keys are about 2**23 scores:
with 32 heads 256 queries, and a prompt of 8,192 tokens takes 32 tiles and 144 turns.

The temporaries are those of one turn, in bfloat16 64 MiB of gathered keys and values for rows, and in tiles 32 MiB of
float32 scores and half of that of weights; beside them a float32 output for each row of one query, and a copy of the
queries and of the output. They do not grow with the length of contexts, and with rows only by their own queries.

`jax.nn.dot_product_attention` is not used: it takes contiguous keys, so whole contexts would have to be gathered, and
it returns no softmax statistics by which blocks could be combined. cuDNN's paged attention, which JAX has no public
function for, knows neither sinks nor soft caps nor eight bits, and needs the library on the machine that compiles.

Letters beside the package's: L lanes (splits or tiles computed together), S tokens of a block, M queries of a lane
that share a key head, G query heads of a key head.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.paged_attention import (
    AttentionBatch,
    AttentionSpec,
    AttentionUse,
    HostPages,
    KVScales,
    PagedAttention,
    attend_by_kind,
    stored,
)
from jaxserve.kernels.xla_attention import copy_pages, slots_of
from jaxserve.kernels.xla_softmax import first_visible

_SPLIT_TOKENS = 512
_SPLIT_NUMBERS = 2**24  # of keys, gathered in one turn
_FEW_SPLITS = 16  # lanes of a batch with fewer rows: a long row fills them alone, and a short one wastes little
_BLOCK_TOKENS = 1024
_TILE_SCORES = 2**23
_TILE_LIMITS = (128, 1024)  # queries: as many as a tensor core's tile has rows; a small loss beyond the causal edge
_TPU_LANES = 128  # of a register: XLA:TPU keeps narrower lines in another order than it scatters and gathers them
# exp(_HIDDEN - _LOWEST) is 0, so a block in which a query sees nothing adds nothing, with no second mask.
_HIDDEN = -1e30
_LOWEST = -0.5e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVPages:
    """The cache of one layer. A page of one head is one contiguous block, which a gather moves in wide loads, and lies
    as the products want it: no transposition of keys between the gather and the matrix units."""

    keys: Float[Array, "pages K page H"]
    values: Float[Array, "pages K page H"]


class Sums(NamedTuple):
    """Softmax sums over some of the keys of a query; those over other keys are added by `_merge`."""

    top: Float[Array, "L K M"]  # largest score
    total: Float[Array, "L K M"]  # sum of exp(score - top)
    mix: Float[Array, "L K M H"]  # sum of exp(score - top) * value


class Queries(NamedTuple):
    """Queries of some lanes, in the dtype of the products."""

    vectors: Float[Array, "L K M H"]
    positions: Int[Array, "L M"]
    ends: Int[Array, " L"]  # keys from this position on are not the lane's


class Scoring(NamedTuple):
    """How products of queries and keys become scores, and sums the output."""

    spec: AttentionSpec
    factors: Float[Array, " K"]  # the scale of scores, times the keys' own
    slopes: Float[Array, "K G"] | None
    sinks: Float[Array, "K G"] | None
    value_scales: Float[Array, " K"] | None


def init_cache(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, dtype: jnp.dtype) -> KVPages:
    """Zeros for num_pages + 1 pages; page 0 is the dummy."""
    shape = (num_pages + 1, num_kv_heads, page_size, head_dim)
    return KVPages(keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))


def read_pages(leaves: Sequence[np.ndarray], page_size: int, head_dim: int) -> tuple[np.ndarray, np.ndarray]:
    """`HostPages.read`."""
    keys, values = leaves
    assert keys.shape[2:] == (page_size, head_dim), (keys.shape, page_size, head_dim)
    return keys.swapaxes(1, 2), values.swapaxes(1, 2)


def write_pages(keys: np.ndarray, values: np.ndarray) -> Sequence[np.ndarray]:
    """`HostPages.write`."""
    return keys.swapaxes(1, 2), values.swapaxes(1, 2)


def write(k: Array, v: Array, cache: KVPages, batch: AttentionBatch, scales: KVScales | None = None) -> KVPages:
    """`PagedAttention.write`: a scatter of single lines, one for each token and head.

    All indices are of one leading axis: XLA:TPU would copy the cache into another layout to scatter over two.
    """
    _, kv_heads, page_size, head_dim = cache.keys.shape
    page_ids, slots = slots_of(batch)
    heads = jnp.arange(kv_heads, dtype=jnp.int32)
    lines = (page_ids[:, None] * kv_heads + heads) * page_size + slots[:, None]  # [T, K]

    def put(pages: Array, x: Array, scale: Array | None) -> Array:
        flat = pages.reshape(-1, head_dim)
        return flat.at[lines].set(stored(x, scale, pages.dtype)).reshape(pages.shape)

    key_scale, value_scale = (None, None) if scales is None else (scales.keys, scales.values)
    return KVPages(keys=put(cache.keys, k, key_scale), values=put(cache.values, v, value_scale))


def attend(
    q: Float[Array, "T N H"],
    k: Float[Array, "T K H"],
    v: Float[Array, "T K H"],
    cache: KVPages,
    batch: AttentionBatch,
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    scales: KVScales | None = None,
) -> tuple[Float[Array, "T N H"], KVPages]:
    """`PagedAttention.attend`. Products in the dtype of `q`, of full precision where that or the cache is float32, with
    float32 sums."""
    kv_heads, group = spec.num_kv_heads, spec.num_query_heads // spec.num_kv_heads
    cache = write(k, v, cache, batch, scales)
    wide = jnp.float32 in (q.dtype, cache.keys.dtype)
    grouped = q.astype(jnp.float32 if wide else q.dtype).reshape(-1, kv_heads, group, spec.head_dim)
    sinks, slopes = (x if x is None else x.astype(jnp.float32).reshape(kv_heads, group) for x in (sinks, alibi_slopes))
    factors = jnp.full(kv_heads, spec.scale) if scales is None else spec.scale * scales.keys
    scoring = Scoring(spec, factors, slopes, sinks, None if scales is None else scales.values)

    out = attend_by_kind(
        grouped,
        batch,
        lambda q, lens: attend_rows(q, lens, batch.block_tables, cache, scoring),
        lambda q: attend_tiles(q, batch, cache, scoring),
    )
    return out.reshape(q.shape).astype(q.dtype), cache


def attend_rows(
    q: Float[Array, "R K G H"],
    context_lens: Int[Array, " R"],
    block_tables: Int[Array, "R P"],
    cache: KVPages,
    scoring: Scoring,
) -> Float[Array, "R K G H"]:
    """Attention of each row's last token (position context_lens - 1), float32. Rows of length 0 give zeros."""
    num_rows, kv_heads, group, head_dim = q.shape
    page_size = cache.keys.shape[2]
    width = _block_pages(_SPLIT_TOKENS, page_size, block_tables)
    split = width * page_size
    most_splits = num_rows * -(-block_tables.shape[1] // width)
    lanes = max(1, min(_SPLIT_NUMBERS // (split * kv_heads * head_dim), max(num_rows, _FEW_SPLITS), most_splits))

    begin = first_visible(jnp.maximum(context_lens - 1, 0), scoring.spec) // page_size  # first page of each row
    num_splits = (context_lens - begin * page_size + split - 1) // split
    ends = jnp.cumsum(num_splits)  # of each row's splits in the flat list

    def advance(turn: Array, state: Sums) -> Sums:
        item = turn * lanes + jnp.arange(lanes, dtype=jnp.int32)
        owns = (item < ends[:, None]) & (item >= (ends - num_splits)[:, None])  # [R, L]
        row = jnp.argmax(owns, axis=0)  # of lanes past the end of the list, 0
        own_end = jnp.where(owns.any(0), context_lens[row], 0)
        columns = (begin[row] + (item - (ends - num_splits)[row]) * width)[:, None] + jnp.arange(width)
        page_ids = _page_ids(block_tables, row[:, None], columns, own_end[:, None], page_size)
        positions = jnp.broadcast_to(own_end[:, None] - 1, (lanes, group))
        queries = Queries(q[row], positions, own_end)
        return _merge(state, _of_rows(_attend_block(queries, cache, page_ids, columns[:, 0], scoring), owns, row))

    num_turns = (ends[-1] + lanes - 1) // lanes
    return _finish(jax.lax.fori_loop(0, num_turns, advance, _no_sums(num_rows, kv_heads, group, head_dim)), scoring)


def attend_tiles(
    q: Float[Array, "T K G H"],
    batch: AttentionBatch,
    cache: KVPages,
    scoring: Scoring,
) -> Float[Array, "T K G H"]:
    """Attention of all rows with more than one token; any finite numbers elsewhere."""
    num_tokens, kv_heads, group, head_dim = q.shape
    page_size = batch.page_size
    width = _block_pages(_BLOCK_TOKENS, page_size, batch.block_tables)
    block = width * page_size
    tile = _tile_queries(num_tokens, kv_heads * group)
    q = jnp.pad(q, ((0, tile), (0, 0), (0, 0), (0, 0)))

    q_lens = batch.q_starts[1:] - batch.q_starts[:-1]
    num_tiles = jnp.where(q_lens > 1, (q_lens + tile - 1) // tile, 0)
    ends = jnp.cumsum(num_tiles)  # of each row's tiles in the flat list

    def one_tile(item: Array, out: Array) -> Array:
        row = jnp.argmax(item < ends)
        offset = (item - (ends - num_tiles)[row]) * tile
        token, context = batch.q_starts[row] + offset, batch.context_lens[row]
        first = context - q_lens[row] + offset  # position of the tile's first query
        end = jnp.minimum(first + tile, context)
        vectors = jax.lax.dynamic_slice_in_dim(q, token, tile).transpose(1, 0, 2, 3)
        queries = Queries(
            vectors.reshape(1, kv_heads, tile * group, head_dim),
            (first + jnp.repeat(jnp.arange(tile, dtype=jnp.int32), group))[None],
            end[None],
        )
        begin = first_visible(first, scoring.spec) // page_size

        def advance(turn: Array, state: Sums) -> Sums:
            columns = (begin + turn * width + jnp.arange(width))[None]
            page_ids = _page_ids(batch.block_tables, row, columns, end, page_size)
            return _merge(state, _attend_block(queries, cache, page_ids, columns[:, 0], scoring))

        num_turns = (end - begin * page_size + block - 1) // block
        state = jax.lax.fori_loop(0, num_turns, advance, _no_sums(1, kv_heads, tile * group, head_dim))
        found = _finish(state, scoring).reshape(kv_heads, tile, group, head_dim).transpose(1, 0, 2, 3)
        # What lies behind the row's end belongs to later rows, whose own tiles or splits are stored after this.
        return jax.lax.dynamic_update_slice_in_dim(out, found.astype(out.dtype), token, 0)

    return jax.lax.fori_loop(0, ends[-1], one_tile, jnp.zeros_like(q))[:num_tokens]


def _tile_queries(num_tokens: int, num_heads: int) -> int:
    """Queries of a tile: a power of two, and no more than a bucket of few tokens has."""
    lowest, highest = _TILE_LIMITS
    wanted = max(lowest, min(highest, _TILE_SCORES // (num_heads * _BLOCK_TOKENS)))
    return min(1 << (wanted.bit_length() - 1), 1 << (num_tokens - 1).bit_length())


def _block_pages(tokens: int, page_size: int, tables: Int[Array, "R P"]) -> int:
    """Pages of a block of about `tokens` tokens, and no more than a row can have."""
    return max(1, min(tokens // page_size, tables.shape[1]))


def _page_ids(tables: Array, row: Array, columns: Array, end: Array, page_size: int) -> Int[Array, "L W"]:
    """The pages of some columns; the dummy page, which stays in the nearest memory, for those from `end` on."""
    return jnp.where(columns * page_size < end, tables.at[row, columns].get(mode="clip"), 0)


def _attend_block(
    queries: Queries, cache: KVPages, page_ids: Int[Array, "L W"], first_column: Int[Array, " L"], scoring: Scoring
) -> Sums:
    """The sums over the W pages of each lane. Pages past `queries.ends` may be any."""
    spec, dtype = scoring.spec, queries.vectors.dtype
    page_size, width = cache.keys.shape[2], page_ids.shape[1]
    tokens = jnp.arange(width * page_size, dtype=jnp.int32)
    key_positions = first_column[:, None] * page_size + tokens  # [L, S]
    held = key_positions < queries.ends[:, None]
    distance = key_positions[:, None, :] - queries.positions[:, :, None]  # [L, M, S]
    seen = (distance <= 0) & held[:, None, :]
    if spec.window is not None:
        seen &= distance > -spec.window

    # Slots past the end hold old numbers, NaN included, and 0 * NaN is NaN; scores of such keys are overwritten.
    keys = _gather(cache.keys, page_ids).astype(dtype)
    values = jnp.where(held[:, None, :, None], _gather(cache.values, page_ids).astype(dtype), 0)
    scores = _product("lkmh,lksh->lkms", queries.vectors, keys) * scoring.factors[:, None, None]
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    if scoring.slopes is not None:
        slopes = _for_queries(scoring.slopes, queries.vectors.shape[2])
        scores = scores + slopes[:, :, None] * distance[:, None].astype(jnp.float32)
    scores = jnp.where(seen[:, None], scores, _HIDDEN)
    top = jnp.maximum(scores.max(-1), _LOWEST)
    weights = jnp.exp(scores - top[..., None]).astype(dtype)  # rounded before the sum: one error in both, not two
    return Sums(top, weights.sum(-1, dtype=jnp.float32), _product("lkms,lksh->lkmh", weights, values))


def _for_queries(by_head: Float[Array, "K G"], per_head: int) -> Float[Array, "K M"]:
    """A number of each query head, for all M queries of a key head: those of one token stand together."""
    return jnp.tile(by_head, (1, per_head // by_head.shape[1]))


def _gather(pages: Array, page_ids: Int[Array, "L W"]) -> Float[Array, "L K S H"]:
    """The pages of each lane, one behind the other."""
    found = pages.at[page_ids].get(mode="clip").swapaxes(1, 2)  # [L, K, W, page, H]
    return found.reshape(*found.shape[:2], -1, found.shape[-1])


def _product(equation: str, a: Array, b: Array) -> Array:
    """Sums in float32. Operands in float32 are not rounded, as GPUs and TPUs would by default."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.float32)


def _no_sums(lanes: int, kv_heads: int, per_head: int, head_dim: int) -> Sums:
    shape = (lanes, kv_heads, per_head)
    return Sums(jnp.full(shape, _LOWEST), jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def _merge(a: Sums, b: Sums) -> Sums:
    top = jnp.maximum(a.top, b.top)
    of_a, of_b = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Sums(top, a.total * of_a + b.total * of_b, a.mix * of_a[..., None] + b.mix * of_b[..., None])


def _of_rows(sums: Sums, owns: Bool[Array, "R L"], row: Int[Array, " L"]) -> Sums:
    """The sums of lanes added up for the rows that own them. By products: a GPU's scatter adds in any order."""
    top = jnp.where(owns[:, :, None, None], sums.top, _LOWEST).max(1)  # [R, K, M]
    share = jnp.exp(sums.top - top[row])  # of a lane that no row owns: of sums that are 0
    owned = owns.astype(jnp.float32)
    return Sums(
        top,
        _product("rl,lkm->rkm", owned, sums.total * share),
        _product("rl,lkmh->rkmh", owned, sums.mix * share[..., None]),
    )


def _finish(sums: Sums, scoring: Scoring) -> Float[Array, "L K M H"]:
    """The attention output; zeros for a query that saw nothing. A sink is a score without a value."""
    if scoring.sinks is not None:
        sinks = _for_queries(scoring.sinks, sums.top.shape[2])
        sink = Sums(jnp.broadcast_to(sinks, sums.top.shape), jnp.ones_like(sums.total), jnp.zeros_like(sums.mix))
        sums = _merge(sums, sink)
    out = sums.mix / jnp.where(sums.total == 0, 1.0, sums.total)[..., None]
    return out if scoring.value_scales is None else out * scoring.value_scales[:, None, None]


def make_attention(device: Device) -> PagedAttention:
    """The implementation for a device; only what it refuses depends on that."""
    return PagedAttention(
        name="xla_batched",
        attend=attend,
        write=write,
        init_cache=init_cache,
        copy_pages=copy_pages,
        refuses=functools.partial(_refuses, device),
        host_pages=HostPages(read=read_pages, write=write_pages),
    )


def _refuses(device: Device, use: AttentionUse) -> str | None:
    """`PagedAttention.refuses`: what a TPU could not update in place. All else runs everywhere."""
    if device.backend != "tpu" or use.spec.head_dim % _TPU_LANES == 0:
        return None
    return (
        f"on TPUs it takes head dims that are multiples of {_TPU_LANES}, and this is {use.spec.head_dim}: XLA would "
        "copy the cache in every layer of every step; kernels.paged_attention: xla is slow there, but takes it"
    )
