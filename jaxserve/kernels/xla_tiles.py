"""Rows of several queries each: pieces of prompts, where the cost is multiplying.

A ragged batch is cut into tiles of queries here; the arithmetic is in `xla_softmax`.

Tiles start at the row's own first token. Shapes are static, so a tile may reach past the end of its row into the next;
that part of its result is thrown away, and a row's result does not depend on its place in the batch.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels import xla_softmax as softmax
from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec

_TILE = 16  # queries; 32 to 128 are as fast on long pieces, and 32 takes three times as long for a piece of 16
_BLOCK_TOKENS = 64


def attend_tiles(
    q: Float[Array, "T K G H"],
    batch: AttentionBatch,
    cache: softmax.PageArrays,
    spec: AttentionSpec,
    sinks: Float[Array, "K G"] | None,
    slopes: Float[Array, "K G"] | None,
) -> Float[Array, "T K G H"]:
    """Attention of all rows with more than one token; zeros elsewhere. `q` is float32 and scaled."""
    num_tokens, kv_heads, group, head_dim = q.shape
    page_size = batch.page_size
    width = softmax.pages_per_block(page_size, _BLOCK_TOKENS)
    block = width * page_size
    by_head = jnp.pad(q.transpose(1, 0, 2, 3), ((0, 0), (0, _TILE), (0, 0), (0, 0)))  # [K, T + tile, G, H]
    tile_sinks, tile_slopes = (x if x is None else jnp.tile(x, (1, _TILE)) for x in (sinks, slopes))

    def tile(row: Array, q_len: Array, offset: Array, out: Array) -> Array:
        context = batch.context_lens[row]
        token = batch.q_starts[row] + offset
        first = context - q_len + offset  # position of the tile's first query
        end = jnp.minimum(first + _TILE, context)
        vectors = jax.lax.dynamic_slice_in_dim(by_head, token, _TILE, 1).reshape(1, 1, kv_heads, -1, head_dim)
        queries = softmax.Queries(
            jnp.broadcast_to(vectors, (1, width, *vectors.shape[2:])),
            (first + jnp.repeat(jnp.arange(_TILE, dtype=jnp.int32), group))[None],
            end[None],
            tile_slopes,
            tile_sinks,
        )
        begin = softmax.first_visible(first, spec) // page_size

        def advance(c: Array, state: softmax.Softmax) -> softmax.Softmax:
            columns = begin + c * width + jnp.arange(width, dtype=jnp.int32)
            page_ids = jnp.where(columns * page_size < end, batch.block_tables.at[row, columns].get(mode="clip"), 0)
            return softmax.fold(state, queries, cache, page_ids[None], columns[:1] * page_size, spec)

        num_blocks = (end - begin * page_size + block - 1) // block
        state = jax.lax.fori_loop(0, num_blocks, advance, softmax.start(queries))
        new = softmax.finish(state, queries).reshape(kv_heads, _TILE, group, head_dim)
        old = jax.lax.dynamic_slice_in_dim(out, token, _TILE, 1)
        own = (jnp.arange(_TILE) + offset < q_len)[None, :, None, None]
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(own, new, old), token, 1)

    def row_tiles(row: Array, out: Array) -> Array:
        q_len = batch.q_starts[row + 1] - batch.q_starts[row]
        num_tiles = jnp.where(q_len > 1, (q_len + _TILE - 1) // _TILE, 0)
        return jax.lax.fori_loop(0, num_tiles, lambda j, o: tile(row, q_len, j * _TILE, o), out)

    out = jax.lax.fori_loop(0, batch.context_lens.shape[0], row_tiles, jnp.zeros_like(by_head))
    return out[:, :num_tokens].transpose(1, 0, 2, 3)
