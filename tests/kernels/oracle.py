"""Attention of whole sequences in float64 numpy, written from the equation in `PagedAttention`'s docstring."""

import numpy as np

from jaxserve.kernels.paged_attention import AttentionSpec


def attend_row(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    spec: AttentionSpec,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
) -> np.ndarray:
    """Outputs [q_len, N, H] of the last q_len positions of one sequence with keys and values [context, K, H]."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    group = spec.num_query_heads // spec.num_kv_heads
    position = np.arange(len(keys) - len(q), len(keys))[:, None]
    distance = np.arange(len(keys)) - position
    seen = (distance <= 0) & (distance > -(spec.window or len(keys)))
    out = np.zeros_like(q)
    for n in range(spec.num_query_heads):
        scores = q[:, n] @ keys[:, n // group].T * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * np.tanh(scores / spec.soft_cap)
        if alibi_slopes is not None:
            scores = scores + float(alibi_slopes[n]) * distance
        weights = np.where(seen, np.exp(scores), 0.0)  # scores of order 10: float64 needs no maximum taken off
        total = weights.sum(-1, keepdims=True) + (0.0 if sinks is None else np.exp(float(sinks[n])))
        out[:, n] = weights @ values[:, n // group] / total
    return out
