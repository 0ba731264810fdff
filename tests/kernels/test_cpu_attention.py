"""The implementations that run on a CPU against the float64 oracle: named cases, random ragged batches, poison, no
copies, neighbours. `xla_batched` is made for GPUs and TPUs; it runs here since it is plain XLA."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.kernels.cases import CASES, Case, Inputs, Room, case, make_batch, make_inputs
from jaxserve.kernels.oracle import TOLERANCE, relative_error
from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, KVScales, stored
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from tests.kernels.cpu_implementations import (
    IMPLEMENTATIONS,
    NUMBA,
    XLA_BATCHED,
    cache_of,
    check,
    pairs,
    run,
    run_with_cache,
    runs,
)
from tests.kernels.ragged import MAX_CONTEXT, MAX_ROWS, MAX_TOKENS, ragged_rows

SPEC = AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=16, scale=0.25)
# Every option of the contract at once, with chunks beside rows of one query.
OPTIONS = dataclasses.replace(
    CASES["demo/short/16/int8"],
    name="options",
    spec=dataclasses.replace(CASES["demo/short/16/int8"].spec, window=21, soft_cap=5.0),
    sinks=True,
    alibi=True,
)
# Enough for every combination of loops and every option, in float32 and int8.
QUICK = {
    "xla": (
        OPTIONS.name,
        "bench125m/mixed/64",
        "demo/short/24",
    ),
    "xla_batched": (OPTIONS.name,),
    "numba_cpu": (
        OPTIONS.name,
        "bench125m/ragged16/64",
        "bench125m/mixed/64",
        "gemma2/mixed/16",
        "gpt-oss/ragged16/32",
        "bloom-alibi/mixed/16",
        "demo/short/24",
    ),
}
# With `-m slow`: more models, mixes and page sizes. `numba_cpu` runs every case there is.
LONG = (
    "bench125m/prefill/64",
    "bench125m/decode16/128",
    "phi-odd/ragged16/32",
    "gpt-oss/ragged16/32",
    "demo/short/1",
    "demo/short/16/float8_e4m3fn",
)


def every_implementation(quick: bool) -> pytest.MarkDecorator:
    """Those that take `SPEC`; `quick`: the batched one, which this CPU computes slowly, without `-m slow` too."""
    return pytest.mark.parametrize(
        "implementation",
        [
            pytest.param(b, id=b.name, marks=() if quick or b is not XLA_BATCHED else pytest.mark.slow)
            for b in IMPLEMENTATIONS
            if runs(b, SPEC, 16)
        ],
    )


@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        p
        for p in pairs([OPTIONS, *CASES.values()], slow=lambda by, case: case.name not in QUICK[by.name])
        if p.values[0] is NUMBA or p.values[1].name in (*QUICK[p.values[0].name], *LONG)
    ],
)
def test_named_case_matches_the_oracle(implementation, case):
    inputs = make_inputs(case, implementation, poison=True)
    check(case, inputs, run(implementation, inputs, case.spec, quickly=implementation is not NUMBA))


@pytest.mark.slow
@pytest.mark.parametrize(("implementation", "case"), pairs([CASES["qwen3-0.6b/short/64/bfloat16"]]))
def test_bfloat16_queries_come_back_as_bfloat16(implementation, case):
    inputs = make_inputs(case, implementation)
    low = dataclasses.replace(inputs, q=inputs.q.astype(jnp.bfloat16))
    out, cache = run_with_cache(implementation, low, case.spec)
    assert out.dtype == jnp.bfloat16
    assert {leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)} == {2}, "bfloat16 numbers, or their bits"
    assert relative_error(case, low, np.asarray(out)) <= TOLERANCE["bfloat16"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn"])
@every_implementation(quick=False)
def test_scales_are_exact_factors(implementation, dtype):
    """By powers of two nothing is rounded: the bits are those of a float32 cache with stored numbers times scales."""
    narrow = dataclasses.replace(OPTIONS, cache_dtype=dtype)
    inputs = make_inputs(narrow, implementation)
    scales = KVScales(keys=jnp.asarray([0.5, 0.03125]), values=jnp.asarray([0.0625, 2.0]))

    def held(x, scale) -> np.ndarray:
        return np.asarray(stored(jnp.asarray(x), scale, jnp.dtype(dtype)).astype(jnp.float32) * scale[:, None])

    whole = tuple((n, n) for n, _ in narrow.rows)  # nothing is in the cache before
    batch, num_pages = make_batch(dataclasses.replace(narrow, rows=whole), np.random.default_rng(0))
    outs = []
    for kind, k, v, used in (
        (dtype, inputs.k, inputs.v, scales),
        ("float32", held(inputs.k, scales.keys), held(inputs.v, scales.values), None),
    ):
        cache = implementation.init_cache(num_pages, narrow.page_size, 2, narrow.spec.head_dim, jnp.dtype(kind))
        case = dataclasses.replace(inputs, k=jnp.asarray(k), v=jnp.asarray(v), cache=cache, batch=batch, scales=used)
        outs.append(run(implementation, case, narrow.spec))
    np.testing.assert_array_equal(*outs)


# --- random ragged batches ------------------------------------------------------------------------------------------


def in_bucket(implementation, rows, page_size: int, spec: AttentionSpec, seed: int) -> tuple[Case, Inputs]:
    """The rows in the fixed bucket (MAX_ROWS, MAX_TOKENS), with a cache of fixed size."""
    case = Case(
        name=f"{rows}/{page_size}",
        spec=spec,
        rows=rows,
        page_size=page_size,
        padding_rows=MAX_ROWS - len(rows),
        padding_tokens=MAX_TOKENS - sum(n for n, _ in rows),
    )
    rng = np.random.default_rng(seed)
    columns = -(-MAX_CONTEXT // page_size)
    num_pages = (MAX_ROWS + 1) * columns + 3
    room = Room(columns=columns, num_pages=num_pages)
    # A mixed bucket may hold decode rows only, so the batch is made as a mixed one.
    batch, _ = make_batch(dataclasses.replace(case, rows=(*rows, (2, 2)), padding_rows=0), rng, room)
    num_tokens = sum(n for n, _ in rows)
    batch = AttentionBatch(
        positions=jnp.zeros(MAX_TOKENS, jnp.int32).at[:num_tokens].set(batch.positions[:num_tokens]),
        token_rows=jnp.full(MAX_TOKENS, MAX_ROWS, jnp.int32).at[:num_tokens].set(batch.token_rows[:num_tokens]),
        q_starts=jnp.full(MAX_ROWS + 1, num_tokens, jnp.int32).at[: len(rows)].set(batch.q_starts[: len(rows)]),
        context_lens=jnp.zeros(MAX_ROWS, jnp.int32).at[: len(rows)].set(batch.context_lens[: len(rows)]),
        block_tables=jnp.zeros((MAX_ROWS, columns), jnp.int32)
        .at[: len(rows)]
        .set(batch.block_tables[: len(rows), :columns]),
        page_size=page_size,
        decode_only=False,
    )
    keys = [rng.standard_normal((c, spec.num_kv_heads, spec.head_dim), np.float32) for _, c in rows]
    values = [rng.standard_normal((c, spec.num_kv_heads, spec.head_dim), np.float32) for _, c in rows]
    return case, inputs_of(implementation, case, batch, num_pages, keys, values, rng)


def inputs_of(implementation, case, batch, num_pages, keys, values, rng) -> Inputs:
    """Writes the cache by hand from the documented layout; every slot that no row owns is NaN."""
    spec, page_size = case.spec, case.page_size
    stored_keys, stored_values = np.full((2, num_pages + 1, spec.num_kv_heads, page_size, spec.head_dim), np.nan)
    tables = np.asarray(batch.block_tables)
    for row, (q_len, context) in enumerate(case.rows):
        for position in range(context - q_len):
            page, slot = tables[row, position // page_size], position % page_size
            stored_keys[page, :, slot] = keys[row][position]
            stored_values[page, :, slot] = values[row][position]
    num_tokens = batch.positions.shape[0]
    shape = (num_tokens - sum(n for n, _ in case.rows), spec.num_kv_heads, spec.head_dim)
    own = [(k[c - n :], v[c - n :]) for (n, c), k, v in zip(case.rows, keys, values, strict=True)]
    return Inputs(
        q=jnp.asarray(rng.standard_normal((num_tokens, spec.num_query_heads, spec.head_dim), np.float32)),
        k=jnp.asarray(np.concatenate([*(k for k, _ in own), np.ones(shape, np.float32)])),
        v=jnp.asarray(np.concatenate([*(v for _, v in own), np.ones(shape, np.float32)])),
        cache=cache_of(implementation, stored_keys, stored_values),
        batch=batch,
        sinks=None,
        alibi_slopes=None,
        scales=None,
        keys=keys,
        values=values,
    )


@pytest.mark.parametrize(
    ("implementation", "page_size", "window"),
    [
        pytest.param(
            *(implementation, page_size, window),
            id=f"{implementation.name}-{page_size}-{window}",
            marks=() if implementation is NUMBA or (implementation is XLA_ATTENTION and window) else pytest.mark.slow,
        )
        for page_size, window in ((1, None), (16, 9), (128, None))
        for implementation in IMPLEMENTATIONS
        if runs(implementation, SPEC, page_size) and (window or implementation is not XLA_BATCHED)
    ],
)
@settings(max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_ragged_batches_among_poison(implementation, page_size, window, data):
    rows = data.draw(ragged_rows(page_size))
    case, inputs = in_bucket(implementation, rows, page_size, dataclasses.replace(SPEC, window=window), seed=len(rows))
    out, cache = run_with_cache(implementation, inputs, case.spec)
    check(case, inputs, np.asarray(out))
    written = np.asarray(cache.values)
    tables = np.asarray(inputs.batch.block_tables)
    for row, (_, context) in enumerate(rows):  # exactly the row's own slots hold its values, later slots are untouched
        pages = written[tables[row]].transpose(0, 2, 1, 3).reshape(-1, SPEC.num_kv_heads, SPEC.head_dim)
        np.testing.assert_array_equal(pages[:context], inputs.values[row])
        held = -(-context // page_size) * page_size
        assert np.isnan(pages[context:held]).all()


@pytest.mark.parametrize(("implementation", "case"), pairs([case("demo", "short", 16)]))
def test_shared_prefix_pages_serve_two_rows(implementation, case):
    spec, page = case.spec, case.page_size
    both = dataclasses.replace(case, rows=((1, 2 * page + 5), (3, 2 * page + 9)), padding_rows=0, padding_tokens=0)
    inputs = make_inputs(both, implementation)
    tables = inputs.batch.block_tables
    shared = dataclasses.replace(inputs.batch, block_tables=tables.at[1, :2].set(tables[0, :2]))
    keys, values = (
        [one, np.concatenate([one[: 2 * page], two[2 * page :]])] for one, two in (inputs.keys, inputs.values)
    )
    inputs = dataclasses.replace(inputs, batch=shared, keys=keys, values=values)
    check(both, inputs, run(implementation, inputs, spec))


# --- neighbours -----------------------------------------------------------------------------------------------------


def rows_of(inputs: Inputs, rows: list[int], bucket: int) -> Inputs:
    """A decode batch of some of the rows, padded to a bucket."""
    pad = bucket - len(rows)
    batch = AttentionBatch(
        positions=jnp.pad(inputs.batch.positions[jnp.array(rows)], (0, pad)),
        token_rows=jnp.concatenate([jnp.arange(len(rows)), jnp.full(pad, bucket)]).astype(jnp.int32),
        q_starts=jnp.minimum(jnp.arange(bucket + 1, dtype=jnp.int32), len(rows)),
        context_lens=jnp.pad(inputs.batch.context_lens[jnp.array(rows)], (0, pad)),
        block_tables=jnp.pad(inputs.batch.block_tables[jnp.array(rows)], ((0, pad), (0, 0))),
        page_size=inputs.batch.page_size,
        decode_only=True,
    )
    q, k, v = (jnp.pad(x[jnp.array(rows)], ((0, pad), (0, 0), (0, 0))) for x in (inputs.q, inputs.k, inputs.v))
    return dataclasses.replace(inputs, q=q, k=k, v=v, batch=batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("implementation", "case"),
    pairs(
        (
            *(
                CASES[f"{model}/ragged16/{page}"]
                for model, page in (("bench125m", 64), ("phi-odd", 32), ("gpt-oss", 32))
            ),
            case("demo", "ragged16", 32, "int8"),
        ),
        slow=lambda implementation, case: (
            (implementation is XLA_ATTENTION and case.sinks) or implementation is XLA_BATCHED
        ),
    ),
)
def test_a_decode_row_is_the_same_alone_and_in_any_crowd(implementation, case):
    """To the last bit in our own kernel. What XLA's loops do with it is the compiler's choice for each processor: equal
    bits on those that the docs name, the last bit or two apart on another."""
    inputs = make_inputs(case, implementation)
    near = {"rtol": 0, "atol": 0.0 if implementation is NUMBA else 1e-6}
    crowd = run(implementation, inputs, case.spec)
    for row in (0, 4, 9, 15):
        np.testing.assert_allclose(run(implementation, rows_of(inputs, [row], 1), case.spec)[0], crowd[row], **near)
    others = [15, 3, 9]
    few = run(implementation, rows_of(inputs, others, 4), case.spec)
    np.testing.assert_allclose(few[:3], crowd[others], **near)
    assert (few[3] == 0).all(), "a padding row has nothing to attend to"


@every_implementation(quick=True)
def test_a_chunk_is_bitwise_the_same_wherever_it_lies(implementation):
    rows = ((1, 40), (17, 17), (5, 60), (33, 33))
    _, inputs = in_bucket(implementation, rows, 16, SPEC, seed=1)
    whole = run(implementation, inputs, SPEC)[23:56]
    own = np.asarray(inputs.batch.block_tables)[3]
    batch = dataclasses.replace(
        inputs.batch,
        positions=jnp.zeros(MAX_TOKENS, jnp.int32).at[:33].set(jnp.arange(33)),
        token_rows=jnp.full(MAX_TOKENS, MAX_ROWS, jnp.int32).at[:33].set(0),
        q_starts=jnp.full(MAX_ROWS + 1, 33, jnp.int32).at[0].set(0),
        context_lens=jnp.zeros(MAX_ROWS, jnp.int32).at[0].set(33),
        block_tables=jnp.zeros_like(inputs.batch.block_tables).at[0].set(own),
    )
    q, k, v = (jnp.roll(x, -23, axis=0) for x in (inputs.q, inputs.k, inputs.v))
    alone = run(implementation, dataclasses.replace(inputs, q=q, k=k, v=v, batch=batch), SPEC)[:33]
    np.testing.assert_array_equal(alone, whole)


@every_implementation(quick=False)
@pytest.mark.parametrize("cut", [1, 16, 20, 39])
def test_a_prompt_in_two_chunks_gives_the_same_cache_and_outputs(implementation, cut):
    _, inputs = in_bucket(implementation, ((40, 40),), 16, SPEC, seed=2)
    whole, whole_cache = run_with_cache(implementation, inputs, SPEC)
    cache, parts = inputs.cache, []
    for first, last in ((0, cut), (cut, 40)):
        count = last - first
        batch = dataclasses.replace(
            inputs.batch,
            positions=jnp.zeros(MAX_TOKENS, jnp.int32).at[:count].set(jnp.arange(first, last)),
            token_rows=jnp.full(MAX_TOKENS, MAX_ROWS, jnp.int32).at[:count].set(0),
            q_starts=jnp.full(MAX_ROWS + 1, count, jnp.int32).at[0].set(0),
            context_lens=jnp.zeros(MAX_ROWS, jnp.int32).at[0].set(last),
        )
        q, k, v = (jnp.roll(x, -first, axis=0) for x in (inputs.q, inputs.k, inputs.v))
        out, cache = run_with_cache(
            implementation, dataclasses.replace(inputs, q=q, k=k, v=v, cache=cache, batch=batch), SPEC
        )
        parts.append(np.asarray(out)[:count])
    np.testing.assert_allclose(np.concatenate(parts), whole[:40], rtol=1e-6, atol=2e-6)
    for leaf, want in zip(jax.tree.leaves(cache), jax.tree.leaves(whole_cache), strict=True):
        np.testing.assert_array_equal(leaf[1:], want[1:])  # all but the dummy page


# --- memory and work ------------------------------------------------------------------------------------------------


def shapes_copied(hlo: str) -> list[str]:
    return re.findall(r"= (\w+\[[\d,]*\])\S* copy(?:-start)?\(", hlo)


# XLA's implementations copy caches of short floats: XLA:CPU scatters those by way of float32.
IN_PLACE = [
    *pairs(
        (CASES[f"bench125m/{mix}/64"] for mix in ("decode16", "mixed")),
        slow=lambda implementation, case: implementation is XLA_BATCHED and "decode" in case.name,
    ),
    *(
        p
        for p in pairs(case("bench125m", "mixed", 64, dtype) for dtype in ("bfloat16", "float8_e4m3fn", "int8"))
        if p.values[0] is NUMBA
    ),
]


@pytest.mark.parametrize(("implementation", "case"), IN_PLACE)
def test_the_donated_cache_is_updated_in_place(implementation, case):
    batch, _ = make_batch(case, np.random.default_rng(0))
    spec = case.spec
    dtype = jnp.dtype(case.cache_dtype)
    cache = jax.eval_shape(
        lambda: implementation.init_cache(2999, case.page_size, spec.num_kv_heads, spec.head_dim, dtype)
    )
    num_tokens = batch.positions.shape[0]
    q = jnp.zeros((num_tokens, spec.num_query_heads, spec.head_dim))
    kv = jnp.zeros((num_tokens, spec.num_kv_heads, spec.head_dim))
    compiled = (
        jax.jit(implementation.attend, static_argnums=5, donate_argnums=3)
        .lower(q, kv, kv, cache, batch, spec)
        .compile()
    )
    hlo = compiled.as_text()
    assert "[3000," in hlo and not [s for s in shapes_copied(hlo) if "[3000," in s]
    assert hlo.count("may-alias") + hlo.count("must-alias") == 2
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < cache.keys.size * dtype.itemsize / 4, memory


def test_a_copy_would_be_seen():
    cache = jnp.zeros((778, 4, 16, 16))
    hlo = jax.jit(lambda c: (c, c.at[1].set(1.0)), donate_argnums=0).lower(cache).compile().as_text()
    assert [s for s in shapes_copied(hlo) if "[778," in s]


def test_copy_pages_reads_all_sources_first_and_is_in_place():
    cache = XLA_ATTENTION.init_cache(5, 2, 1, 3, jnp.float32)
    marked = jax.tree.map(lambda x: x + jnp.arange(6.0)[:, None, None, None], cache)
    sources, targets = jnp.array([1, 2, 5, 0]), jnp.array([2, 3, 4, 0])
    copy = jax.jit(XLA_ATTENTION.copy_pages, donate_argnums=0).lower(marked, sources, targets).compile()
    assert not [s for s in shapes_copied(copy.as_text()) if "[6," in s]
    for leaf in jax.tree.leaves(copy(marked, sources, targets)):
        assert leaf[:, 0, 0, 0].tolist() == [0, 1, 1, 2, 5, 5]


@pytest.mark.parametrize(("implementation", "case"), pairs([case("demo", "short", 16)]))
def test_wide_block_tables_cost_no_memory(implementation, case):
    """A table for 128k tokens makes no array of that size: work follows lengths, not columns."""
    room = Room(columns=128 * 1024 // case.page_size, num_pages=100)
    batch, _ = make_batch(case, np.random.default_rng(0), room)
    spec = case.spec
    cache = implementation.init_cache(100, case.page_size, spec.num_kv_heads, spec.head_dim, jnp.float32)
    q = jnp.zeros((batch.positions.shape[0], spec.num_query_heads, spec.head_dim))
    kv = jnp.zeros((q.shape[0], spec.num_kv_heads, spec.head_dim))
    compiled = (
        jax.jit(implementation.attend, static_argnums=5, donate_argnums=3)
        .lower(q, kv, kv, cache, batch, spec)
        .compile()
    )
    most = (10 if implementation is XLA_BATCHED else 3) * 2**20  # one turn of its loops computes much at once
    assert compiled.memory_analysis().temp_size_in_bytes < most
