"""The exact results in float64 numpy: attention of whole sequences, from the equation in `PagedAttention`, and products
of rows with the matrices of their experts.

Attention has none of the tricks of the implementations (no pages, no online softmax, no masks that cancel). It is
slow, so callers pick a few queries of long rows. The measure of error is here too.
"""

import numpy as np

from jaxserve.kernels.cases import Case, Inputs
from jaxserve.kernels.paged_attention import AttentionSpec

# Largest `relative_error` of an implementation, by the dtype of queries.
TOLERANCE = {"bfloat16": 2e-3, "float32": 1e-5}


def attend_row(
    q: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    spec: AttentionSpec,
    sinks: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    positions: np.ndarray | None = None,
) -> np.ndarray:
    """Outputs [q_len, N, H] of queries at `positions` (default: the last q_len) of one sequence [context, K, H]."""
    q, keys, values = (np.asarray(x).astype(np.float64) for x in (q, keys, values))
    group = spec.num_query_heads // spec.num_kv_heads
    if positions is None:
        positions = np.arange(len(keys) - len(q), len(keys))
    distance = np.arange(len(keys)) - positions[:, None]
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


def grouped_products(x: np.ndarray, experts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Rows [M, in], sorted by expert, times experts [E, *out, in] as [M, *out]; zeros for rows past all groups."""
    out, end = np.zeros((len(x), *experts.shape[1:-1])), 0
    for expert, size in zip(experts, sizes, strict=True):
        begin, end = end, end + size
        if size:
            rows, wide = x[begin:end].astype(np.float64), expert.astype(np.float64)
            out[begin:end] = np.tensordot(rows, wide, (1, wide.ndim - 1))
    return out


def relative_error(case: Case, inputs: Inputs, out: np.ndarray, max_queries: int | None = None) -> float:
    """The relative error of `out`: the root mean square over tokens of each token's error, or half the worst token's.

    A token's error is ||out - exact|| / ||exact||, norms over [N, H], less what rounding the exact result to the dtype
    of `out` costs by itself (1.65e-3 for bfloat16; independent errors add in squares). What remains is the
    implementation's arithmetic. `max_queries` bounds how many tokens of each row are compared; the first and the last
    always are. NaN or infinity anywhere in `out`, padding included, gives infinity.
    """
    dtype = out.dtype
    out = np.asarray(out).astype(np.float64)
    if not np.isfinite(out).all():
        return float("inf")
    squares, token = [], 0
    for row, (q_len, context) in enumerate(case.rows):
        chosen = _spread(q_len, max_queries)
        exact = attend_row(
            np.asarray(inputs.q[token : token + q_len].astype("float32"))[chosen],
            np.asarray(inputs.keys[row]),
            np.asarray(inputs.values[row]),
            case.spec,
            None if inputs.sinks is None else np.asarray(inputs.sinks),
            None if inputs.alibi_slopes is None else np.asarray(inputs.alibi_slopes),
            positions=context - q_len + chosen,
        )
        rounding = exact.astype(dtype).astype(np.float64) - exact
        found = out[token : token + q_len][chosen] - exact
        size = np.square(exact).sum((1, 2))
        squares.append(np.maximum(np.square(found).sum((1, 2)) - np.square(rounding).sum((1, 2)), 0.0) / size)
        token += q_len
    errors = np.sqrt(np.concatenate(squares))
    return max(float(np.sqrt(np.mean(np.square(errors)))), float(errors.max()) / 2)


def _spread(q_len: int, max_queries: int | None) -> np.ndarray:
    if max_queries is None or q_len <= max_queries:
        return np.arange(q_len)
    return np.unique(np.linspace(0, q_len - 1, max_queries).astype(int))
