"""Attention for training: whole sequences, packed into rows, and differentiable.

It is a `PagedAttention`, so that the very layers of the engine are trained; what a layer has for a "cache" is the keys
and values of the same call. A decoder attends over its rows and leaves nothing (`None`). A draft head is run as it
drafts (EAGLE-3's training-time test): the keys of all places are written first, from the target's features, and then
drafts begin at many places at once. Step j of a draft that begins at place t reads the head's own output of step j - 1,
and sees

    the keys of all places up to t,         as the target's features are known there
    its own keys of steps 1 .. j,           as its own guesses are all that is behind them

where step j stands at position t + j. Step 0 is place t itself, whose key has been written.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, KVScales, PagedAttention

_FAR = -1e30  # a score that weighs nothing; not -inf, whose gradient is NaN in a row that sees nothing


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """The "cache" of a head that drafts from S places of each of B rows of L tokens.

    Attributes:
      places: where in its row each draft begins.
      segments: of all tokens of the rows.
      keys, values: of all places; None before they are written.
      own: keys and values [B * S, K, H] of each step after the first.
      begun: step 0 has been made (static).
    """

    places: Int[Array, "B S"]
    segments: Int[Array, "B L"]
    keys: Float[Array, "B*L K H"] | None = None
    values: Float[Array, "B*L K H"] | None = None
    own: tuple[tuple[Array, Array], ...] = ()
    begun: bool = dataclasses.field(default=False, metadata={"static": True})


def packed_attention(row_len: int) -> PagedAttention:
    """Attention over T = B * `row_len` tokens in rows of several sequences each.

    A token sees those of its row that have its `token_rows`, at or before it, and of them those in the window.
    """

    def attend(
        q: Float[Array, "M N H"],
        k: Float[Array, "M K H"],
        v: Float[Array, "M K H"],
        cache: Drafting | None,
        batch: AttentionBatch,
        spec: AttentionSpec,
        sinks: Float[Array, " N"] | None = None,
        alibi_slopes: Float[Array, " N"] | None = None,
        scales: KVScales | None = None,
    ) -> tuple[Float[Array, "M N H"], Drafting | None]:
        assert scales is None, "a training step has no cache of eight bits"
        if cache is None:
            segments = batch.token_rows.reshape(-1, row_len)
            places = jnp.broadcast_to(jnp.arange(row_len), segments.shape)
            return _attend(q, k, v, (), places, segments, spec, sinks, alibi_slopes), None
        assert cache.keys is not None and cache.values is not None, "keys are written before drafts begin"
        own = (*cache.own, (k, v)) if cache.begun else ()
        out = _attend(q, cache.keys, cache.values, own, cache.places, cache.segments, spec, sinks, alibi_slopes)
        return out, dataclasses.replace(cache, own=own, begun=True)

    def write(
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cache: Drafting,
        batch: AttentionBatch,
        scales: KVScales | None = None,
    ) -> Drafting:
        return dataclasses.replace(cache, keys=k, values=v)

    def never(*_: Any) -> Any:
        raise AssertionError("training has no pages")

    return PagedAttention(
        name="packed",
        attend=attend,
        write=write,
        init_cache=never,
        copy_pages=never,
        refuses=lambda use: None,
    )


def _attend(
    q: Float[Array, "B*S N H"],
    keys: Float[Array, "B*L K H"],
    values: Float[Array, "B*L K H"],
    own: tuple[tuple[Array, Array], ...],
    places: Int[Array, "B S"],
    segments: Int[Array, "B L"],
    spec: AttentionSpec,
    sinks: Float[Array, " N"] | None,
    alibi_slopes: Float[Array, " N"] | None,
) -> Float[Array, "B*S N H"]:
    """From queries `len(own)` positions behind `places` of their rows."""
    (rows, row_len), step, kv_heads = segments.shape, len(own), spec.num_kv_heads
    group = spec.num_query_heads // kv_heads
    query = q.reshape(rows, -1, kv_heads, group, spec.head_dim)
    keys, values = (x.reshape(rows, row_len, *x.shape[1:]) for x in (keys, values))
    slopes = None if alibi_slopes is None else alibi_slopes.reshape(kv_heads, group, 1, 1)
    distance = places[:, :, None] - jnp.arange(row_len)  # [B, S, L]
    seen = (distance >= 0) & (jnp.take_along_axis(segments, places, axis=1)[:, :, None] == segments[:, None, :])
    if spec.window is not None:
        seen &= distance + step < spec.window
    scores = _scores("btkgh,bskh->bkgts", query, keys, spec)
    if slopes is not None:
        scores = scores - slopes * (distance + step).astype(jnp.float32)[:, None, None]
    parts = [jnp.where(seen[:, None, None], scores, _FAR)]
    for number, (key, _) in enumerate(own, start=1):
        back = step - number  # positions from the query to this key
        one = _scores("btkgh,btkh->bkgt", query, key.reshape(rows, -1, *key.shape[1:]), spec)[..., None]
        one = one if slopes is None else one - slopes * float(back)
        parts.append(one if spec.window is None or back < spec.window else jnp.full_like(one, _FAR))
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(kv_heads, group, 1, 1)
        parts.append(jnp.broadcast_to(sink, (*scores.shape[:-1], 1)))
    weights = jax.nn.softmax(jnp.concatenate(parts, axis=-1), axis=-1).astype(q.dtype)
    out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :row_len], values)
    for number, (_, value) in enumerate(own):
        value = value.reshape(rows, -1, *value.shape[1:])
        out = out + jnp.einsum("bkgt,btkh->btkgh", weights[..., row_len + number], value)
    return out.reshape(q.shape)


def _scores(equation: str, query: Array, keys: Array, spec: AttentionSpec) -> Array:
    """Scaled, capped scores, float32."""
    scores = jnp.einsum(equation, query, keys, preferred_element_type=jnp.float32) * spec.scale
    return scores if spec.soft_cap is None else spec.soft_cap * jnp.tanh(scores / spec.soft_cap)


def packed_batch(segments: Array, positions: Array, num_segments: int) -> AttentionBatch:
    """The batch of rows whose tokens belong to `segments` [T] (`num_segments`: padding) at `positions` [T]."""
    return AttentionBatch(
        positions=positions,
        token_rows=segments,
        q_starts=jnp.zeros(num_segments + 1, jnp.int32),
        context_lens=jnp.zeros(num_segments, jnp.int32),
        block_tables=jnp.zeros((num_segments, 1), jnp.int32),
        page_size=1,
        decode_only=False,
    )
