"""Contract of paged attention: the arrays, the equation, and what every implementation must do.

The types shared by all implementations and by the models are here. `Op.resolve` chooses an implementation, and each
has a cache layout of its own.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Types of numbers that a cache may hold.
CACHE_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
# The largest number of each type of eight bits; int8 leaves -128 out, so that x and -x are kept alike.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0, "int8": 127.0}
# Tokens of a page by backend, where the config gives none. The CPU's is measured: docs/attention-cpu.md.
PAGE_SIZES = {"cpu": 64, "gpu": 64, "tpu": 128}


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """The static parameters of one layer's attention.

    Attributes:
      num_query_heads, num_kv_heads: N, K; N is a multiple of K, query head n reads key/value head n // (N // K).
      head_dim: H.
      scale: multiplies the scores.
      window: a token at position p sees positions p - window + 1 .. p (HF's sliding window); None sees all.
      soft_cap: scores s become soft_cap * tanh(s / soft_cap); None is off.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    soft_cap: float | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionBatch:
    """One ragged batch of R rows and T tokens, decode rows first. The same for all layers that share block tables.

    Row r owns tokens [q_starts[r], q_starts[r + 1]); they are the LAST q_len tokens of its context, so the first of
    them is at position context_lens[r] - q_len. Padding rows have q_len 0 and context_lens 0; padding tokens (those
    from q_starts[R] on) belong to no row, write to the dummy page 0, and their output is unspecified but finite.

    Attributes:
      positions: position of each token in its sequence.
      token_rows: row of each token; R for padding tokens.
      q_starts: ascending, q_starts[0] == 0.
      context_lens: tokens of the row in the cache once this step has written its own.
      block_tables: page ids; entry c holds positions c * page_size ...; unused entries are 0, and so are those that
        are before the windows of all tokens of a row.
      page_size: tokens of a page (static).
      decode_only: every row has at most one token, and token t belongs to row t (static).
      prompt_lens: tokens of each row's request before those that it has generated, for implementations that choose
        pages (`PagedAttention.selects`); None for all others.
    """

    positions: Int[Array, " T"]
    token_rows: Int[Array, " T"]
    q_starts: Int[Array, " R+1"]
    context_lens: Int[Array, " R"]
    block_tables: Int[Array, "R P"]
    page_size: int = dataclasses.field(metadata={"static": True})
    decode_only: bool = dataclasses.field(metadata={"static": True})
    prompt_lens: Int[Array, " R"] | None = None


# The cache of one layer: any pytree of arrays, page axis first and head axis second in every leaf.
LayerCache = Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVScales:
    """The factors of stored numbers, one for each key/value head, for caches of eight bits. Float32, above 0."""

    keys: Float[Array, " K"]
    values: Float[Array, " K"]


def stored(x: Float[Array, "T K H"], scale: Float[Array, " K"] | None, dtype: jnp.dtype) -> Array:
    """`x / scale` as the cache keeps it: the nearest number of `dtype`, ties to even; what is too large becomes the
    largest. int8 has no NaN, and keeps 0 in its place."""
    if scale is not None:
        x = x.astype(jnp.float32) / scale[:, None]
    dtype = jnp.dtype(dtype)
    if dtype.name not in LARGEST:
        return x.astype(dtype)
    largest = LARGEST[dtype.name]
    held = jnp.clip(x.astype(jnp.float32), -largest, largest)
    if dtype == jnp.int8:
        held = jnp.round(jnp.where(jnp.isnan(held), 0.0, held))
    return held.astype(dtype)


def attend_by_kind(
    q: Float[Array, "T ..."],
    batch: AttentionBatch,
    attend_rows: Callable[[Array, Int[Array, " R"]], Array],
    attend_tiles: Callable[[Array], Array],
) -> Float[Array, "T ..."]:
    """Divides a batch into rows of one query and rows of several, for implementations that compute them apart.

    `attend_rows(q [R, ...], context_lens [R])` attends from the last token of each row; of rows of length 0 it may
    leave anything. `attend_tiles(q [T, ...])` attends from the tokens of rows of several queries; of all others it may
    leave anything, NaN included. Padding tokens give zeros.
    """
    q_lens = batch.q_starts[1:] - batch.q_starts[:-1]
    num_rows, num_tokens = q_lens.shape[0], q.shape[0]
    single_lens = jnp.where(q_lens == 1, batch.context_lens, 0)

    def along(mask: Array) -> Array:
        return mask.reshape(-1, *(1 for _ in q.shape[1:]))

    if batch.decode_only:
        assert num_tokens == num_rows, (q.shape, num_rows)
        return jnp.where(along(q_lens == 1), attend_rows(q, single_lens), 0)
    rows = attend_rows(q[jnp.minimum(batch.q_starts[:-1], num_tokens - 1)], single_lens)
    row = jnp.minimum(batch.token_rows, num_rows - 1)
    out = jnp.where(along(q_lens[row] == 1), rows[row], attend_tiles(q))
    return jnp.where(along(batch.token_rows < num_rows), out, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionUse:
    """A use of an implementation: all that is known of the calls before anything is compiled.

    `sinks`, `alibi`: the calls give them.
    """

    spec: AttentionSpec
    page_size: int
    query_dtype: str
    cache_dtype: str
    sinks: bool = False
    alibi: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostPages:
    """How an implementation lays out pages, for their bytes in host memory. Numbers are unsigned integers of the size
    of the cache's type, so that no bit of one can change.

    `read(leaves, page_size, head_dim) -> (keys, values)`: both [S, page_size, K, H], of S pages. `leaves` are those of
    `init_cache`, in the order of `jax.tree.leaves`. The results may be views of them.
    `write(keys, values) -> leaves` is the inverse, with 0 where there is padding.
    """

    read: Callable[[Sequence[np.ndarray], int, int], tuple[np.ndarray, np.ndarray]]
    write: Callable[[np.ndarray, np.ndarray], Sequence[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedAttention:
    """One implementation. `attend` writes k and v of the step into the cache, then attends.

        attend(q [T, N, H], k [T, K, H], v [T, K, H], cache, batch, spec, sinks=None [N], alibi_slopes=None [N],
               scales=None) -> (out [T, N, H] in q's dtype, cache)

        out[t, n] = sum_s softmax_s(cap(scale * q[t, n] . K[s, n // G]) + slope[n] * (s - p)) V[s, n // G]

    over positions s <= p of the same row (and within the window); softmax in float32; a sink adds exp(sink[n]) to the
    denominator only; K and V are what `stored` left of k and v, times `scales`. The caller donates the cache; an
    implementation must update it in place (no copy of its size).

    Scales are numbers of a head, so no implementation multiplies what it reads: stored numbers are widened, which is
    exact, and `scales.keys` is a factor of the queries or of the scores, before the cap and the slopes, `scales.values`
    one of the sum over positions or of the share that divides it. Both are float32 and the same for all rows: a row's
    numbers follow from its own numbers alone, with scales as without.

    `write(k, v, cache, batch, scales=None) -> cache` is the first half of `attend` alone.
    `init_cache(num_pages, page_size, num_kv_heads, head_dim, dtype)` gives zeros for num_pages + 1 pages (page 0 is
    the dummy). `copy_pages(cache, sources [C], targets [C])` copies whole pages; padding entries are (0, 0).
    `refuses(use)` says why the implementation cannot run a use, with the limit and the remedy, or None. `prepare(use)`
    makes ready what executables of that use call by name; it comes before any of them runs, those read from a disk
    included. `row_invariant`: a row's numbers have the same bits in every batch, step shape and cut of its prompt, on
    all that the implementation runs on (tested, not hoped). `host_pages`: the layout of its pages; None: it is not
    written down, and only the same implementation can use them.
    `selects`: generated tokens attend to chosen pages alone (`selection`), so batches must say which tokens those are
    (`AttentionBatch.prompt_lens`).
    """

    name: str
    attend: Callable[..., tuple[Float[Array, "T N H"], LayerCache]]
    write: Callable[..., LayerCache]
    init_cache: Callable[..., LayerCache]
    copy_pages: Callable[..., LayerCache]
    refuses: Callable[[AttentionUse], str | None]
    prepare: Callable[[AttentionUse], object] = lambda use: None
    row_invariant: bool = False
    host_pages: HostPages | None = None
    selects: bool = False
