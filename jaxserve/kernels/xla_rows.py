"""Rows of one query each: decode, where the cost is reading the cache.

The order in which pages of many rows of different length are visited is here, the arithmetic in `xla_softmax`.

There are two loops: all rows together keep every core busy, but run as long as the longest row; one row at a time costs
exactly its own length, but uses about one core. So all rows advance together while more than half of them have pages
left, and the longer ones go on alone. No row waits for a neighbour more than twice its share of work.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels import xla_softmax as softmax
from jaxserve.kernels.paged_attention import AttentionSpec

_BLOCK_TOKENS = 128  # small pages are read several at a time, up to this many tokens


def attend_rows(
    q: Float[Array, "R K G H"],
    context_lens: Int[Array, " R"],
    block_tables: Int[Array, "R P"],
    cache: softmax.PageArrays,
    spec: AttentionSpec,
    sinks: Float[Array, "K G"] | None,
    slopes: Float[Array, "K G"] | None,
) -> Float[Array, "R K G H"]:
    """Attention of each row's last token (position context_lens - 1). Rows of length 0 give zeros.

    `q` is float32 and scaled.
    """
    num_rows = q.shape[0]
    page_size = cache.values.shape[2]
    width = softmax.pages_per_block(page_size, _BLOCK_TOKENS)
    block = width * page_size
    begin = softmax.first_visible(jnp.maximum(context_lens - 1, 0), spec) // page_size  # first page of each row
    num_blocks = (context_lens - begin * page_size + block - 1) // block  # [R]

    def queries_of(q: Array, context_lens: Array) -> softmax.Queries:
        vectors = jnp.broadcast_to(q[:, None], (q.shape[0], width, *q.shape[1:]))
        positions = jnp.broadcast_to(context_lens[:, None] - 1, (q.shape[0], q.shape[2]))
        return softmax.Queries(vectors, positions, context_lens, slopes, sinks)

    def advance(c: Array, state: softmax.Softmax, queries: softmax.Queries, rows: Array) -> softmax.Softmax:
        columns = (begin[rows] + c * width)[:, None] + jnp.arange(width, dtype=jnp.int32)  # [L, W]
        used = columns * page_size < queries.ends[:, None]
        # A row that has ended reads the dummy page, which stays in the nearest memory.
        page_ids = jnp.where(used, block_tables.at[rows[:, None], columns].get(mode="clip"), 0)
        return softmax.fold(state, queries, cache, page_ids, columns[:, 0] * page_size, spec)

    queries = queries_of(q, context_lens)
    order = jnp.argsort(num_blocks, descending=True)
    common = num_blocks[order[num_rows // 2]]
    every_row = jnp.arange(num_rows, dtype=jnp.int32)
    state = jax.lax.fori_loop(0, common, lambda c, s: advance(c, s, queries, every_row), softmax.start(queries))
    if num_rows > 1:
        num_longer = (num_blocks > common).sum()

        def alone(i: Array, state: softmax.Softmax) -> softmax.Softmax:
            row = order[i][None]
            queries = queries_of(q[row], context_lens[row])
            own = jax.tree.map(lambda x: x[row], state)
            own = jax.lax.fori_loop(common, num_blocks[row[0]], lambda c, s: advance(c, s, queries, row), own)
            return jax.tree.map(lambda x, y: jax.lax.dynamic_update_slice_in_dim(x, y, row[0], 0), state, own)

        state = jax.lax.fori_loop(0, num_longer, alone, state)
    return softmax.finish(state, queries)
