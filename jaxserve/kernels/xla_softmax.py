"""One block of keys against some queries, folded into an online softmax: the inner step of XLA's attention.

The arithmetic is here: scores, masks, caps, biases, the running maximum and sums. The loops over rows and blocks are in
`xla_rows` and `xla_tiles`.

Letters beside the package's: L lanes (independent rows handled together), W pages of one block, M queries of a lane
that share a key head.

The sums look odd for a reason: a lane's result must not depend on how many lanes ride along, to the last bit, or a
request's tokens would change with its neighbours. XLA's CPU dots keep that promise, its reductions do not (they split
by the size of the whole array), so sums are written as dots or as explicit additions. docs/attention-cpu.md has the
test.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import AttentionSpec

# exp(_HIDDEN - _LOWEST) is 0, so a block in which a query sees nothing adds nothing, with no second mask.
_HIDDEN = -1e30
_LOWEST = -0.5e30
_MAX_WIDTH = 16  # pages of a block are added one by one in the program: more of them compile slowly
_EXACT = jax.lax.Precision.HIGHEST  # the default of TPUs and GPUs would round float32 operands
_SUM_COLUMNS = 8  # a dot with one column becomes a matrix-vector product, whose order of additions varies


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PageArrays:
    """The cache of one layer. Keys lie transposed: scores then stream over tokens, 1.3 times as fast as over H."""

    keys: Float[Array, "pages K H page"]
    values: Float[Array, "pages K page H"]


class Softmax(NamedTuple):
    """Running state of an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867)."""

    top: Float[Array, "L K M"]  # largest score so far
    total: Float[Array, "L K M"]  # sum of exp(score - top)
    mix: Float[Array, "L K M H"]  # sum of exp(score - top) * value


class Queries(NamedTuple):
    """Queries of some lanes, scaled, float32, repeated for each page of a block."""

    vectors: Float[Array, "L W K M H"]
    positions: Int[Array, "L M"]
    ends: Int[Array, " L"]  # keys from this position on are not read
    slopes: Float[Array, "K M"] | None
    sinks: Float[Array, "K M"] | None


def pages_per_block(page_size: int, block_tokens: int) -> int:
    """Number of pages that are read together, so that a block has about `block_tokens` tokens."""
    return min(max(1, block_tokens // page_size), _MAX_WIDTH)


def start(queries: Queries) -> Softmax:
    """The state before the first block. A sink is a score without a value: it starts the maximum."""
    lanes, _, kv_heads, per_head, head_dim = queries.vectors.shape
    shape = (lanes, kv_heads, per_head)
    top = jnp.full(shape, _LOWEST) if queries.sinks is None else jnp.broadcast_to(queries.sinks, shape)
    return Softmax(top, jnp.zeros(shape), jnp.zeros((*shape, head_dim)))


def fold(
    state: Softmax,
    queries: Queries,
    cache: PageArrays,
    page_ids: Int[Array, "L W"],
    first_position: Int[Array, " L"],
    spec: AttentionSpec,
) -> Softmax:
    """Adds the block of pages whose first token is at `first_position`. Pages past `queries.ends` may be any."""
    lanes, width, kv_heads, per_head, head_dim = queries.vectors.shape
    page_size = cache.values.shape[2]
    offsets = jnp.arange(width * page_size, dtype=jnp.int32).reshape(width, page_size)
    key_positions = first_position[:, None, None] + offsets  # [L, W, S]
    seen, distance = _visible(queries, key_positions, spec)  # [L, W, M, S]

    flat = lanes * width * kv_heads
    keys = cache.keys[page_ids].astype(jnp.float32).reshape(flat, head_dim, page_size)
    scores = jax.lax.dot_general(
        queries.vectors.reshape(flat, per_head, head_dim), keys, (((2,), (1,)), ((0,), (0,))), precision=_EXACT
    ).reshape(lanes, width, kv_heads, per_head, page_size)
    if spec.soft_cap is not None:
        scores = spec.soft_cap * jnp.tanh(scores / spec.soft_cap)
    if queries.slopes is not None:
        scores = scores + queries.slopes[None, None, :, :, None] * distance[:, :, None].astype(jnp.float32)
    scores = jnp.where(seen[:, :, None], scores, _HIDDEN)

    top = jnp.maximum(state.top, _over_pages(jnp.maximum, scores.max(-1)))
    weights = jnp.exp(scores - top[:, None, :, :, None])  # [L, W, K, M, S]
    shrink = jnp.exp(state.top - top)
    held = (key_positions < queries.ends[:, None, None])[:, :, None, :, None]
    # Slots past the end hold old numbers, NaN included, and 0 * NaN is NaN.
    values = jnp.where(held, cache.values[page_ids].astype(jnp.float32), 0.0).reshape(flat, page_size, head_dim)
    flat_weights = weights.reshape(flat, per_head, page_size)
    mixed = jax.lax.dot_general(flat_weights, values, (((2,), (1,)), ((0,), (0,))), precision=_EXACT)
    summed = jnp.dot(flat_weights, jnp.ones((page_size, _SUM_COLUMNS)), precision=_EXACT)[..., 0]
    shape = (lanes, width, kv_heads, per_head)
    return Softmax(
        top,
        state.total * shrink + _over_pages(jnp.add, summed.reshape(shape)),
        state.mix * shrink[..., None] + _over_pages(jnp.add, mixed.reshape(*shape, head_dim)),
    )


def finish(state: Softmax, queries: Queries) -> Float[Array, "L K M H"]:
    """The attention output. Zeros for a query that saw nothing."""
    total = state.total
    if queries.sinks is not None:
        total = total + jnp.exp(queries.sinks - state.top)
    return state.mix / jnp.where(total == 0, 1.0, total)[..., None]


def first_visible(first_query: Array, spec: AttentionSpec) -> Array:
    """The lowest position that the query at `first_query`, and so any later one, can see."""
    return jnp.zeros_like(first_query) if spec.window is None else jnp.maximum(first_query - spec.window + 1, 0)


def _visible(queries: Queries, key_positions: Array, spec: AttentionSpec) -> tuple[Array, Array]:
    distance = key_positions[:, :, None, :] - queries.positions[:, None, :, None]
    seen = (distance <= 0) & (key_positions < queries.ends[:, None, None])[:, :, None, :]
    if spec.window is not None:
        seen &= distance > -spec.window
    return seen, distance


def _over_pages(combine: Callable[[Array, Array], Array], parts: Float[Array, "L W ..."]) -> Float[Array, "L ..."]:
    return functools.reduce(combine, [parts[:, page] for page in range(parts.shape[1])])
