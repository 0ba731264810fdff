"""Attention for training: whole sequences, packed into rows, and differentiable.

It is a `PagedAttention`, so that the very layers of the engine are trained; a layer's "cache" is the keys and values
that it made in earlier steps of the same call. A head is trained as it will be used (EAGLE-3's training-time test): in
step j it reads its own output of step j - 1 in place of the target's features, and sees

    the keys of step 0 of the places up to its own,         as the target's features are known there
    the keys of steps 1 .. j of its own place,              as its own guesses are all that is behind that

where the query of place t in step j stands at position t + j, and so does the key of that step.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, KVScales, PagedAttention

Step = tuple[Array, Array]  # keys and values [T, K, H] of one step
_FAR = -1e30  # a score that weighs nothing; not -inf, whose gradient is NaN in a row that sees nothing


def packed_attention(row_len: int) -> PagedAttention:
    """Attention over T = rows * `row_len` tokens in rows of several sequences each.

    A token sees those of its row that have its `token_rows`, at or before it, and of them those in the window.
    """

    def attend(
        q: Float[Array, "T N H"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K H"],
        cache: tuple[Step, ...],
        batch: AttentionBatch,
        spec: AttentionSpec,
        sinks: Float[Array, " N"] | None = None,
        alibi_slopes: Float[Array, " N"] | None = None,
        scales: KVScales | None = None,
    ) -> tuple[Float[Array, "T N H"], tuple[Step, ...]]:
        assert scales is None, "a training step has no cache of eight bits"
        kv_heads, head_dim, step = spec.num_kv_heads, spec.head_dim, len(cache)
        group = spec.num_query_heads // kv_heads
        rows = q.shape[0] // row_len
        steps = (*cache, (k, v))

        def by_row(x: Array) -> Array:
            return x.reshape(rows, row_len, *x.shape[1:])

        query = by_row(q).reshape(rows, row_len, kv_heads, group, head_dim)
        segment, place = by_row(batch.token_rows), jnp.arange(row_len)
        distance = place[:, None] - place[None, :]  # [L, L]
        seen = (segment[:, :, None] == segment[:, None, :]) & (distance >= 0)  # [B, L, L]
        if spec.window is not None:
            seen &= distance + step < spec.window
        first = _scores("btkgh,bskh->bkgts", query, by_row(steps[0][0]), spec)
        if alibi_slopes is not None:
            slopes = alibi_slopes.reshape(kv_heads, group, 1, 1)
            first = first - slopes * (distance + step).astype(jnp.float32)
        scores = [jnp.where(seen[:, None, None], first, _FAR)]
        for number, (keys, _) in enumerate(steps[1:], start=1):
            own = _scores("btkgh,btkh->bkgt", query, by_row(keys), spec)[..., None]
            if alibi_slopes is not None:
                own = own - alibi_slopes.reshape(kv_heads, group, 1, 1) * float(step - number)
            scores.append(own if spec.window is None or step - number < spec.window else jnp.full_like(own, _FAR))
        if sinks is not None:
            sink = sinks.astype(jnp.float32).reshape(kv_heads, group, 1, 1)
            scores.append(jnp.broadcast_to(sink, (*first.shape[:-1], 1)))
        weights = jax.nn.softmax(jnp.concatenate(scores, axis=-1), axis=-1).astype(q.dtype)
        out = jnp.einsum("bkgts,bskh->btkgh", weights[..., :row_len], by_row(steps[0][1]))
        for number, (_, values) in enumerate(steps[1:]):
            own = weights[..., row_len + number]
            out = out + jnp.einsum("bkgt,btkh->btkgh", own, by_row(values))
        return out.reshape(q.shape), steps

    def never(*_: Any) -> Any:
        raise AssertionError("training has no pages")

    return PagedAttention(
        name="packed",
        attend=attend,
        write=never,
        init_cache=never,
        copy_pages=never,
        refuses=lambda use: None,
    )


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
