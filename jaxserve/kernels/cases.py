"""Real-world shapes by name, most of attention: the same data for tests, benchmark, tuner and device check.

Results are judged elsewhere: their error by `oracle`, their speed by the benchmark.

Cases have names since a figure or a bug report that says `llama3-8b-tp1/decode64/64` can then be run again by anyone.
They have two sizes: a case of the `REAL` table holds the batch of a busy server, and `small(case)` is the same case
with shorter rows (each keeps its kind: on a page edge, one token, all of a prompt, a piece of one) for interpreters,
which take a second for what a chip does in a microsecond.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxserve.kernels.paged_attention import (
    AttentionBatch,
    AttentionSpec,
    AttentionUse,
    KVScales,
    LayerCache,
    PagedAttention,
    stored,
)
from jaxserve.kernels.storage import FLOAT, Arithmetic, Storage

# (tokens in this step, tokens in the cache once the step has written its own); decode rows first.
Rows = tuple[tuple[int, int], ...]

MIXES: dict[str, Rows] = {
    "decode1": ((1, 300),),
    "decode16": ((1, 256),) * 16,
    "ragged16": tuple((1, n) for n in (1, 2, 15, 16, 17, 33, 64, 65, 100, 127, 128, 129, 200, 350, 700, 1024)),
    "prefill": ((512, 512),),
    "mixed": ((1, 40), (1, 129), (1, 513), (7, 7), (64, 200), (100, 100)),
    "short": ((1, 1), (1, 64), (2, 2), (2, 130), (3, 65), (31, 31), (33, 97)),
    # Batches of a busy server.
    "decode64": ((1, 4096),) * 64,
    "prefill8k": ((8192, 8192),),
    "busy": (*((1, 2048),) * 48, (300, 300), (512, 512), (1024, 4096)),
    "ragged": (
        *((1, n) for n in (1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1000, 2047, 2048, 5000, 9000, 32768)),
        *((2, 2), (3, 1025), (17, 2065), (128, 128), (129, 129), (700, 9000)),
    ),
    "row128k": ((1, 128 * 1024),),
}
_SMALL: dict[str, Rows] = {
    "decode64": ((1, 130), (1, 128), (1, 64), (1, 257)),
    "prefill8k": ((200, 200),),
    "busy": ((1, 40), (1, 129), (1, 200), (7, 7), (64, 200), (50, 50)),
    "ragged": ((1, 1), (1, 2), (1, 15), (1, 16), (1, 17), (1, 64), (1, 65), (1, 300), (2, 2), (3, 66), (33, 97)),
    "row128k": ((1, 1025),),
}


def _spec(heads: int, kv_heads: int, head_dim: int, window: int | None = None, cap: float | None = None):
    return AttentionSpec(
        num_query_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=head_dim**-0.5,
        window=window,
        soft_cap=cap,
    )


MODELS: dict[str, AttentionSpec] = {
    "bench125m": _spec(12, 4, 64),
    "demo": _spec(4, 2, 64),
    "llama3-8b": _spec(32, 8, 128),
    "qwen3-0.6b": _spec(16, 8, 128),
    "mistral-window": _spec(32, 8, 128, window=96),
    "gemma2": _spec(8, 4, 256, window=128, cap=50.0),
    "gpt-oss": _spec(64, 8, 64, window=128),
    "bloom-alibi": _spec(16, 16, 64),
    "phi-odd": _spec(6, 2, 40),
    # One device's share at tensor parallelism 1, 4 and 8.
    "llama3-8b-tp1": _spec(32, 8, 128),
    "llama3-8b-tp4": _spec(8, 2, 128),
    "llama3-8b-tp8": _spec(4, 1, 128),
    "llama3-70b-tp1": _spec(64, 8, 128),
    "llama3-70b-tp4": _spec(16, 2, 128),
    "llama3-70b-tp8": _spec(8, 1, 128),
    "qwen3-8b": _spec(32, 8, 128),
    "qwen3-32b": _spec(64, 8, 128),
    "mistral-7b": _spec(32, 8, 128, window=4096),
    "gemma2-9b": _spec(16, 8, 256, window=4096, cap=50.0),
    "mpt-7b-alibi": _spec(32, 32, 128),
    "phi3-mini": _spec(32, 32, 96, window=2047),
}
_SINKS = ("gpt-oss",)
_ALIBI = ("bloom-alibi", "mpt-7b-alibi")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One batch of one model.

    Attributes:
      rows: (tokens in this step, context length) of each row.
      padding_rows, padding_tokens: added at the end, as a bucket would.
      mixed: run by the mixed step even if every row has one token.
      query_dtype: of queries and output.
      cache_dtype: of keys and values; those of eight bits come with random scales.
    """

    name: str
    spec: AttentionSpec
    rows: Rows
    page_size: int
    sinks: bool = False
    alibi: bool = False
    query_dtype: str = "float32"
    cache_dtype: str = "float32"
    padding_rows: int = 0
    padding_tokens: int = 0
    mixed: bool = False

    @property
    def decode_only(self) -> bool:
        return not self.mixed and all(q_len == 1 for q_len, _ in self.rows)

    @property
    def use(self) -> AttentionUse:
        return AttentionUse(
            spec=self.spec, page_size=self.page_size, query_dtype=self.query_dtype, cache_dtype=self.cache_dtype
        )

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that the rows hold, the window taken into account."""
        window = self.spec.window or max(context for _, context in self.rows)
        tokens = sum(min(context, window + q_len - 1) for q_len, context in self.rows)
        return tokens * self.spec.num_kv_heads * self.spec.head_dim * 2 * jnp.dtype(self.cache_dtype).itemsize

    @property
    def flops(self) -> int:
        """Multiplications and additions of both products over the pairs (query, key) that see each other."""
        window = self.spec.window or max(context for _, context in self.rows)
        pairs = sum(min(p + 1, window) for n, context in self.rows for p in range(context - n, context))
        return 4 * pairs * self.spec.num_query_heads * self.spec.head_dim


def case(model: str, mix: str, page_size: int, cache_dtype: str = "float32", query_dtype: str = "float32") -> Case:
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
        query_dtype=query_dtype,
        cache_dtype=cache_dtype,
        padding_rows=0 if mix in ("decode1", "decode16", "ragged16", "prefill", "decode64", "prefill8k") else 2,
        padding_tokens=0 if decode_only or mix == "prefill" else -num_tokens % 32,
    )


def _real(model: str, mix: str, page_size: int = 64, cache_dtype: str = "bfloat16") -> Case:
    return case(model, mix, page_size, cache_dtype, "float32" if cache_dtype == "float32" else "bfloat16")


def small(case: Case) -> Case:
    """The same case with rows that an interpreter computes in seconds; a window shrinks along."""
    mix = case.name.split("/")[1]
    rows = _SMALL[mix]
    window = case.spec.window if case.spec.window is None else min(case.spec.window, 100)
    return dataclasses.replace(
        case,
        name=f"{case.name}/small",
        spec=dataclasses.replace(case.spec, window=window),
        rows=rows,
        padding_tokens=0 if case.decode_only else -sum(n for n, _ in rows) % 32,
    )


def _named(*cases: Case) -> dict[str, Case]:
    return {c.name: c for c in cases}


# For the XLA implementation on a CPU.
CASES: dict[str, Case] = _named(
    *(case("bench125m", mix, page) for mix in tuple(MIXES)[:6] for page in (16, 64)),
    *(case("bench125m", mix, 128) for mix in ("decode16", "ragged16", "mixed")),
    *(case(model, "mixed", 16) for model in tuple(MODELS)[1:9]),
    *(case(model, "ragged16", 32) for model in ("mistral-window", "gemma2", "gpt-oss", "bloom-alibi", "phi-odd")),
    *(case("demo", mix, 1) for mix in ("short", "decode1")),
    *(case("demo", mix, 24) for mix in ("short", "decode1")),
    *(case("qwen3-0.6b", mix, 64, "bfloat16") for mix in ("decode16", "short")),
    *(case("demo", mix, 16, dtype) for mix in ("short", "decode1") for dtype in ("int8", "float8_e4m3fn")),
    case("demo", "short", 16, "float8_e5m2"),
)
_REAL_MODELS = (
    *(f"llama3-{size}-tp{degree}" for size in ("8b", "70b") for degree in (1, 4, 8)),
    *("qwen3-0.6b", "qwen3-8b", "qwen3-32b", "mistral-7b", "gemma2-9b", "mpt-7b-alibi", "gpt-oss", "phi3-mini"),
)
_REAL_MIXES = ("decode64", "prefill8k", "busy", "ragged", "row128k")
# For implementations on accelerators; whole on hardware, `small` in interpreters.
REAL: dict[str, Case] = _named(
    *(_real(model, mix) for model in _REAL_MODELS for mix in _REAL_MIXES),
    *(_real("llama3-8b-tp1", mix, page) for mix in ("decode64", "busy") for page in (16, 24, 128)),
    *(
        _real("llama3-8b-tp4", mix, 32, dtype)
        for mix in ("decode64", "busy")
        for dtype in ("float8_e4m3fn", "float8_e5m2", "int8")
    ),
    *(_real("gpt-oss", mix, 128, "float8_e4m3fn") for mix in ("decode64", "busy")),
    *(_real(model, "busy", 16, "float32") for model in ("llama3-8b-tp4", "gemma2-9b", "gpt-oss", "phi3-mini")),
    *(_real(model, "ragged", 128, "float32") for model in ("llama3-8b-tp8", "mpt-7b-alibi")),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MatmulCase:
    """Rows [rows, *in_shape] times one weight [*out_shape, *in_shape], both in `dtype`, or the weight in codes; with
    `adapters` also the product to which the adapters of rows are added."""

    name: str
    rows: int
    out_shape: tuple[int, ...]
    in_shape: tuple[int, ...]
    dtype: str
    storage: Storage | None = None
    arithmetic: Arithmetic = FLOAT
    adapters: bool = False


_MATMUL_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "demo/qkv": ((2, 4, 64), (256,)),
    "demo/out": ((256,), (4, 64)),
    "bench125m/gate_up": ((2, 2048), (768,)),
    "llama3-8b-tp8/qkv": ((1, 6, 128), (4096,)),
    "llama3-8b-tp8/down": ((4096,), (1792,)),
}
MATMUL_CASES: dict[str, MatmulCase] = {
    f"{name}/{rows}/{dtype}": MatmulCase(
        name=f"{name}/{rows}/{dtype}", rows=rows, out_shape=out_shape, in_shape=in_shape, dtype=dtype
    )
    for name, (out_shape, in_shape) in _MATMUL_SHAPES.items()
    for rows in (1, 16, 65)
    for dtype in ("float32", "bfloat16")
}


# Of Llama-3.1-8B on one device; gate and up are of a quarter of it, since float64 holds them too.
_CODED_SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "llama3.1-8b/qkv": ((8, 6, 128), (4096,)),
    "llama3.1-8b/out": ((4096,), (32, 128)),
    "llama3.1-8b-tp4/gate_up": ((2, 3584), (4096,)),
    "llama3.1-8b/down": ((4096,), (14336,)),
}
_CODED: dict[str, tuple[Storage, Arithmetic]] = {
    "int4-g128": (Storage(code="int4", group=128), FLOAT),
    "int4-g32": (Storage(code="int4", group=32), FLOAT),
    "int8": (Storage(code="int8"), FLOAT),
    "int8-a8": (Storage(code="int8"), Arithmetic(activations="int8")),
    "fp8": (Storage(code="float8_e4m3fn"), FLOAT),
}
CODED_MATMUL_CASES: dict[str, MatmulCase] = {
    f"{name}/{rows}/{codes}": MatmulCase(
        name=f"{name}/{rows}/{codes}",
        rows=rows,
        out_shape=out_shape,
        in_shape=in_shape,
        dtype="bfloat16",
        storage=storage,
        arithmetic=arithmetic,
    )
    for name, (out_shape, in_shape) in _CODED_SHAPES.items()
    for rows in (1, 64, 520)
    for codes, (storage, arithmetic) in _CODED.items()
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupedMatmulCase:
    """Tokens that each go to `per_token` different ones of `of_experts` experts, and a device that has the first few.

    Attributes:
      num_experts: that the device holds, each a matrix [*out_shape, depth] in `dtype`, or in codes.
      tokens: of the step. The device gets tokens * per_token rows, of which those of others' experts come last.
    """

    name: str
    num_experts: int
    of_experts: int
    per_token: int
    tokens: int
    out_shape: tuple[int, ...]
    depth: int
    dtype: str
    storage: Storage | None = None
    arithmetic: Arithmetic = FLOAT


# Of one device of several: experts cut over an axis (EP), and each expert's matrix over another (TP).
_GROUPED_SHAPES: dict[str, tuple[int, int, int, tuple[int, ...], int]] = {
    "small/gate_up": (16, 16, 4, (2, 33), 96),
    "mixtral-8x7b-tp32/down": (8, 8, 2, (4096,), 448),
    "qwen3-30b-ep32/gate_up": (4, 128, 8, (2, 768), 2048),
    "gpt-oss-20b-ep8-tp8/gate_up": (4, 32, 4, (2, 360), 2880),
    "gpt-oss-20b-ep8-tp8/down": (4, 32, 4, (2880,), 360),
}
GROUPED_MATMUL_CASES: dict[str, GroupedMatmulCase] = {
    f"{name}/{tokens}/{dtype}": GroupedMatmulCase(
        name=f"{name}/{tokens}/{dtype}",
        num_experts=num_experts,
        of_experts=of_experts,
        per_token=per_token,
        tokens=tokens,
        out_shape=out_shape,
        depth=depth,
        dtype=dtype,
    )
    for name, (num_experts, of_experts, per_token, out_shape, depth) in _GROUPED_SHAPES.items()
    for tokens in (1, 65)
    for dtype in (("float32", "bfloat16") if name == "small/gate_up" else ("bfloat16",))
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """The arguments of `attend`, and the whole sequences (`keys`, `values`: one [context, K, H] array for each row)."""

    q: Float[Array, "T N H"]
    k: Float[Array, "T K H"]
    v: Float[Array, "T K H"]
    cache: LayerCache
    batch: AttentionBatch
    sinks: Float[Array, " N"] | None
    alibi_slopes: Float[Array, " N"] | None
    scales: KVScales | None
    keys: Sequence[Array | np.ndarray]
    values: Sequence[Array | np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Sizes of tables and cache, for callers that keep them the same from batch to batch."""

    columns: int
    num_pages: int


def make_batch(case: Case, rng: np.random.Generator, room: Room | None = None) -> tuple[AttentionBatch, int]:
    """The batch of a case with shuffled page ids, and the number of pages of its cache (three or more are unused)."""
    num_rows = len(case.rows) + case.padding_rows
    q_lens = [q_len for q_len, _ in case.rows] + [0] * case.padding_rows
    contexts = [context for _, context in case.rows] + [0] * case.padding_rows
    columns = [-(-context // case.page_size) for context in contexts]
    if room is None:
        room = Room(columns=max(columns) + 1, num_pages=sum(columns) + 3)
    num_pages = room.num_pages
    ids = iter((rng.permutation(num_pages) + 1).tolist())
    tables = np.zeros((num_rows, room.columns), np.int32)
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


def attend_layers(case: Case, implementation: PagedAttention) -> Callable[..., tuple[list[Array], list[Any]]]:
    """A program (caches, q, k, v, batch, (sinks, slopes, scales)) -> (outputs, caches) with one attention a cache.

    Every layer attends with the same queries, so that of equal caches all outputs must be the same: if they are not,
    the kernel has a race.
    """
    attend = jax.jit(implementation.attend, static_argnums=5)  # traced and lowered once for all layers

    def run(caches: list[Any], q: Array, k: Array, v: Array, batch: AttentionBatch, rest: tuple[Any, ...]):
        outs, caches = [], list(caches)
        for layer, cache in enumerate(caches):
            out, caches[layer] = attend(q, k, v, cache, batch, case.spec, *rest)
            outs.append(out)
        return outs, caches

    return run


def make_inputs(
    case: Case, implementation: PagedAttention, seed: int = 0, poison: bool = False, room: Room | None = None
) -> Inputs:
    """Random inputs whose cache already holds the earlier tokens, written by the implementation itself.

    With `poison`, every slot of the cache that no row holds is NaN (where the dtype has one).
    """
    rng = np.random.default_rng(seed)
    spec = case.spec
    batch, num_pages = make_batch(case, rng, room)
    kv_shape = (spec.num_kv_heads, spec.head_dim)
    scales = None
    if jnp.dtype(case.cache_dtype).itemsize == 1:
        spread = 0.03 if case.cache_dtype == "int8" else 1.0  # so that numbers of order 1 use most of the range
        scales = KVScales(
            keys=jnp.asarray(spread * rng.uniform(0.8, 1.2, spec.num_kv_heads), jnp.float32),
            values=jnp.asarray(spread * rng.uniform(0.8, 1.2, spec.num_kv_heads), jnp.float32),
        )

    def sequence(context: int, scale: Array | None) -> Array | np.ndarray:  # a random number as the cache stores it
        kept = stored(draw(rng, (context, *kv_shape)), scale, jnp.dtype(case.cache_dtype)).astype(jnp.float32)
        return _near(kept if scale is None else kept * scale[:, None])

    keys = [sequence(context, scales and scales.keys) for _, context in case.rows]
    values = [sequence(context, scales and scales.values) for _, context in case.rows]
    cache = implementation.init_cache(num_pages, case.page_size, *kv_shape, jnp.dtype(case.cache_dtype))
    if poison and case.cache_dtype != "int8":
        # An implementation may keep the bits of floats as integers; all ones are NaN.
        cache = jax.tree.map(
            lambda x: jnp.full_like(x, jnp.nan if jnp.isdtype(x.dtype, "real floating") else jnp.iinfo(x.dtype).max),
            cache,
        )
    cache = _fill(case, implementation, cache, batch, scales, keys, values)
    num_tokens = batch.positions.shape[0]
    padding = _near(draw(rng, (num_tokens - sum(n for n, _ in case.rows), *kv_shape)))
    own = [(k[c - n :], v[c - n :]) for (n, c), k, v in zip(case.rows, keys, values, strict=True)]
    slopes = jnp.asarray(2.0 ** -np.linspace(1, 8, spec.num_query_heads), jnp.float32)
    return Inputs(
        q=draw(rng, (num_tokens, spec.num_query_heads, spec.head_dim)).astype(case.query_dtype),
        k=jnp.asarray(_joined([*(k for k, _ in own), padding])),
        v=jnp.asarray(_joined([*(v for _, v in own), padding])),
        cache=cache,
        batch=batch,
        sinks=draw(rng, (spec.num_query_heads,)) if case.sinks else None,
        alibi_slopes=slopes if case.alibi else None,
        scales=scales,
        keys=keys,
        values=values,
    )


_FEW = 2**22  # numbers; more are drawn on the device, which is quicker than the host but compiles for each shape


def draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Normal float32 numbers that depend on the state of `rng` alone."""
    if np.prod(shape) < _FEW:
        return jnp.asarray(rng.standard_normal(shape, np.float32))
    return jax.random.normal(jax.random.key(int(rng.integers(2**31))), shape)


def _near(x: Array) -> Array | np.ndarray:
    """Small arrays on the host, where cutting and joining needs no program for each shape."""
    return np.asarray(x) if x.size < _FEW else x


def _joined(parts: Sequence[Array | np.ndarray]) -> Array | np.ndarray:
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate(parts)
    return jnp.concatenate(parts)


def _fill(
    case: Case,
    implementation: PagedAttention,
    cache: LayerCache,
    batch: AttentionBatch,
    scales: KVScales | None,
    keys: Sequence[Array | np.ndarray],
    values: Sequence[Array | np.ndarray],
) -> LayerCache:
    """Writes the earlier tokens of all rows in pieces of one size, since only the implementation knows its layout."""
    lens = np.array([context - n for n, context in case.rows] + [0] * case.padding_rows)
    total = int(lens.sum())
    if total == 0:
        return cache
    piece = min(-(-total // 256) * 256, 16384)  # a few sizes, so that few are compiled
    rows = np.repeat(np.arange(len(lens)), lens)
    positions = np.concatenate([np.arange(n) for n in lens])
    k, v = (_joined([x[:n] for x, n in zip(xs, lens, strict=False)]) for xs in (keys, values))
    write = jax.jit(implementation.write, donate_argnums=2)
    for first in range(0, total, piece):
        own = slice(first, min(first + piece, total))
        padding = piece - (own.stop - own.start)
        q_lens = np.bincount(rows[own], minlength=len(lens))
        ends = np.array([positions[own][rows[own] == r].max(initial=-1) + 1 for r in range(len(lens))])
        part = AttentionBatch(
            positions=jnp.asarray(np.pad(positions[own], (0, padding)), jnp.int32),
            token_rows=jnp.asarray(np.pad(rows[own], (0, padding), constant_values=len(lens)), jnp.int32),
            q_starts=jnp.asarray(np.concatenate([[0], np.cumsum(q_lens)]), jnp.int32),
            context_lens=jnp.asarray(ends, jnp.int32),
            block_tables=batch.block_tables,
            page_size=case.page_size,
            decode_only=False,
        )
        rest = np.zeros((padding, *k.shape[1:]), np.float32)
        own_k, own_v = (jnp.asarray(_joined([x[own], rest])) for x in (k, v))
        cache = write(own_k, own_v, cache, part, scales)
    return cache
