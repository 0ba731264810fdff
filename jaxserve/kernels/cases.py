"""Real-world attention shapes by name: the same data for tests, benchmark and tuner.

Owns the cases and the batches made of them. Refuses results: what is right is decided by the oracle in the tests,
what is fast by the benchmark.

Why names: a figure or a bug report that says `bench125m/decode16` can be run again by anyone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, LayerCache, PagedAttention

# (tokens in this step, tokens in the cache once the step has written its own); decode rows first.
Rows = tuple[tuple[int, int], ...]

MIXES: dict[str, Rows] = {
    "decode1": ((1, 300),),
    "decode16": ((1, 256),) * 16,
    "ragged16": tuple((1, n) for n in (1, 2, 15, 16, 17, 33, 64, 65, 100, 127, 128, 129, 200, 350, 700, 1024)),
    "prefill": ((512, 512),),
    "mixed": ((1, 40), (1, 129), (1, 513), (7, 7), (64, 200), (100, 100)),
    "crumbs": ((1, 1), (1, 64), (2, 2), (2, 130), (3, 65), (31, 31), (33, 97)),
}
MODELS: dict[str, AttentionSpec] = {
    "bench125m": AttentionSpec(num_query_heads=12, num_kv_heads=4, head_dim=64, scale=64**-0.5),
    "demo": AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=64, scale=64**-0.5),
    "llama3-8b": AttentionSpec(num_query_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5),
    "qwen3-0.6b": AttentionSpec(num_query_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5),
    "mistral-window": AttentionSpec(num_query_heads=32, num_kv_heads=8, head_dim=128, scale=128**-0.5, window=96),
    "gemma2": AttentionSpec(
        num_query_heads=8, num_kv_heads=4, head_dim=256, scale=256**-0.5, window=128, soft_cap=50.0
    ),
    "gpt-oss": AttentionSpec(num_query_heads=64, num_kv_heads=8, head_dim=64, scale=64**-0.5, window=128),
    "bloom-alibi": AttentionSpec(num_query_heads=16, num_kv_heads=16, head_dim=64, scale=64**-0.5),
    "phi-odd": AttentionSpec(num_query_heads=6, num_kv_heads=2, head_dim=40, scale=40**-0.5),
}
_SINKS = ("gpt-oss",)
_ALIBI = ("bloom-alibi",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch of one model.

    Attributes:
      rows: (tokens in this step, context length) of each row.
      padding_rows, padding_tokens: added at the end, as a bucket would.
      cache_dtype: of keys and values; queries are float32.
    """

    name: str
    spec: AttentionSpec
    rows: Rows
    page_size: int
    sinks: bool = False
    alibi: bool = False
    cache_dtype: str = "float32"
    padding_rows: int = 0
    padding_tokens: int = 0

    @property
    def decode_only(self) -> bool:
        return all(q_len == 1 for q_len, _ in self.rows)

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the rows hold, the window taken into account."""
        window = self.spec.window or max(context for _, context in self.rows)
        tokens = sum(min(context, window + q_len - 1) for q_len, context in self.rows)
        return tokens * self.spec.num_kv_heads * self.spec.head_dim * 2 * jnp.dtype(self.cache_dtype).itemsize


def case(model: str, mix: str, page_size: int, cache_dtype: str = "float32") -> Case:
    """The case `model/mix/page_size`, its rows padded as a bucket pads them."""
    rows = MIXES[mix]
    num_tokens = sum(q_len for q_len, _ in rows)
    decode_only = all(q_len == 1 for q_len, _ in rows)
    return Case(
        name=f"{model}/{mix}/{page_size}" + ("" if cache_dtype == "float32" else f"/{cache_dtype}"),
        spec=MODELS[model],
        rows=rows,
        page_size=page_size,
        sinks=model in _SINKS,
        alibi=model in _ALIBI,
        cache_dtype=cache_dtype,
        padding_rows=0 if mix in ("decode1", "decode16", "ragged16", "prefill") else 2,
        padding_tokens=0 if decode_only or mix == "prefill" else -num_tokens % 32,
    )


CASES: dict[str, Case] = {
    c.name: c
    for c in (
        *(case("bench125m", mix, page) for mix in MIXES for page in (16, 64)),
        *(case("bench125m", mix, 128) for mix in ("decode16", "ragged16", "mixed")),
        *(case(model, "mixed", 16) for model in MODELS if model != "bench125m"),
        *(case(model, "ragged16", 32) for model in ("mistral-window", "gemma2", "gpt-oss", "bloom-alibi", "phi-odd")),
        *(case("demo", mix, 1) for mix in ("crumbs", "decode1")),
        *(case("demo", mix, 24) for mix in ("crumbs", "decode1")),
        *(case("qwen3-0.6b", mix, 64, "bfloat16") for mix in ("decode16", "crumbs")),
    )
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """What `attend` takes, and the whole sequences (`keys`, `values`: one [context, K, H] array for each row)."""

    q: Float[Array, "T N H"]
    k: Float[Array, "T K H"]
    v: Float[Array, "T K H"]
    cache: LayerCache
    batch: AttentionBatch
    sinks: Float[Array, " N"] | None
    alibi_slopes: Float[Array, " N"] | None
    keys: list[np.ndarray]
    values: list[np.ndarray]


def make_batch(case: Case, rng: np.random.Generator, spare_columns: int = 1) -> tuple[AttentionBatch, int]:
    """The batch of a case with shuffled page ids, and the number of pages of its cache (three of them unused)."""
    num_rows = len(case.rows) + case.padding_rows
    q_lens = [q_len for q_len, _ in case.rows] + [0] * case.padding_rows
    contexts = [context for _, context in case.rows] + [0] * case.padding_rows
    columns = [-(-context // case.page_size) for context in contexts]
    num_pages = sum(columns) + 3
    ids = iter((rng.permutation(num_pages) + 1).tolist())
    tables = np.zeros((num_rows, max(columns) + spare_columns), np.int32)
    for row, count in enumerate(columns):
        tables[row, :count] = [next(ids) for _ in range(count)]
    padding_tokens = case.padding_rows if case.decode_only else case.padding_tokens
    positions = np.concatenate(
        [np.arange(c - n, c) for n, c in zip(q_lens, contexts, strict=True)] + [np.zeros(padding_tokens)]
    )
    token_rows = np.concatenate([np.repeat(np.arange(num_rows), q_lens), np.full(padding_tokens, num_rows)])
    batch = AttentionBatch(
        positions=jnp.asarray(positions, jnp.int32),
        token_rows=jnp.asarray(token_rows, jnp.int32),
        q_starts=jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
        context_lens=jnp.asarray(contexts, jnp.int32),
        block_tables=jnp.asarray(tables),
        page_size=case.page_size,
        decode_only=case.decode_only,
    )
    return batch, num_pages


def make_inputs(case: Case, body: PagedAttention, seed: int = 0) -> Inputs:
    """Random inputs whose cache already holds the earlier tokens, written by the body's own `attend`."""
    rng = np.random.default_rng(seed)
    spec = case.spec
    batch, num_pages = make_batch(case, rng)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    def stored(context: int) -> np.ndarray:  # what the cache can hold of it
        exact = draw(context, spec.num_kv_heads, spec.head_dim)
        return np.asarray(jnp.asarray(exact, case.cache_dtype).astype(jnp.float32))

    keys = [stored(context) for _, context in case.rows]
    values = [stored(context) for _, context in case.rows]
    cache = body.init_cache(num_pages, case.page_size, spec.num_kv_heads, spec.head_dim, jnp.dtype(case.cache_dtype))
    cache = _fill(case, body, cache, batch, keys, values)
    num_tokens = batch.positions.shape[0]
    padding = draw(num_tokens - sum(n for n, _ in case.rows), spec.num_kv_heads, spec.head_dim)
    own = [(k[c - n :], v[c - n :]) for (n, c), k, v in zip(case.rows, keys, values, strict=True)]
    return Inputs(
        q=jnp.asarray(draw(num_tokens, spec.num_query_heads, spec.head_dim)),
        k=jnp.asarray(np.concatenate([*(k for k, _ in own), padding])),
        v=jnp.asarray(np.concatenate([*(v for _, v in own), padding])),
        cache=cache,
        batch=batch,
        sinks=jnp.asarray(draw(spec.num_query_heads)) if case.sinks else None,
        alibi_slopes=jnp.asarray(2.0 ** -np.linspace(1, 8, spec.num_query_heads), jnp.float32) if case.alibi else None,
        keys=keys,
        values=values,
    )


def _fill(
    case: Case,
    body: PagedAttention,
    cache: LayerCache,
    batch: AttentionBatch,
    keys: list[np.ndarray],
    values: list[np.ndarray],
) -> LayerCache:
    """Writes the earlier tokens of all rows as one batch of prefills, since only the body knows its layout."""
    earlier = [context - n for n, context in case.rows]
    lens = np.array(earlier + [0] * case.padding_rows)
    num_tokens = max(1, int(lens.sum()))
    rows = np.repeat(np.arange(len(lens)), lens)
    blank = np.zeros((num_tokens - len(rows), case.spec.num_kv_heads, case.spec.head_dim), np.float32)
    prefill = AttentionBatch(
        positions=jnp.asarray(np.concatenate([np.arange(n) for n in lens] + [np.zeros(len(blank))]), jnp.int32),
        token_rows=jnp.asarray(np.concatenate([rows, np.full(len(blank), len(lens))]), jnp.int32),
        q_starts=jnp.asarray(np.concatenate([[0], np.cumsum(lens)]), jnp.int32),
        context_lens=jnp.asarray(lens, jnp.int32),
        block_tables=batch.block_tables,
        page_size=case.page_size,
        decode_only=False,
    )
    k = jnp.asarray(np.concatenate([*(x[:n] for x, n in zip(keys, earlier, strict=True)), blank]))
    v = jnp.asarray(np.concatenate([*(x[:n] for x, n in zip(values, earlier, strict=True)), blank]))
    q = jnp.zeros((num_tokens, case.spec.num_query_heads, case.spec.head_dim))
    return jax.jit(body.attend, static_argnums=5, donate_argnums=3)(q, k, v, cache, prefill, case.spec)[1]
