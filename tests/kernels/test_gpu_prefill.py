"""The GPU kernel for rows of several queries: interpreted against the float64 oracle, and compiled for an H200."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.kernels.cases import REAL, Case, Inputs, make_batch, make_inputs, small
from jaxserve.kernels.oracle import TOLERANCE, relative_error
from jaxserve.kernels.paged_attention import AttentionSpec, AttentionUse
from jaxserve.kernels.pallas import gpu_layout as layout
from jaxserve.kernels.pallas.gpu_prefill import (
    PrefillBlocks,
    attend_tiles,
    candidates,
    default_blocks,
    max_items,
    shared_memory_bytes,
    work_list,
)
from tests.kernels.gpu_compiler import compile_for_h200, needs_gpu_compiler, shapes_of
from tests.kernels.gpu_interpreter import IMPLEMENTATION, INTERPRETER, inputs_of, narrowed, plain_write, watched
from tests.kernels.ragged import bucketed, ragged_rows

# Every option and dtype once, each with one kv head; plain ones are in the tests of sizes below.
QUICK = ("gpt-oss/busy/64/bfloat16", "llama3-8b-tp4/busy/32/float8_e5m2")
NAMED = (*QUICK, "gemma2-9b/busy/64/bfloat16", "mpt-7b-alibi/ragged/64/bfloat16")
SPEC = AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)


@pytest.fixture(scope="module")
def watch():
    with watched() as watch:
        yield watch


def rows_case(spec: AttentionSpec, rows, page_size: int = 64, cache_dtype: str = "bfloat16", padding: int = 0) -> Case:
    return Case(
        name="",
        spec=spec,
        rows=rows,
        page_size=page_size,
        query_dtype="bfloat16",
        cache_dtype=cache_dtype,
        padding_rows=padding,
        padding_tokens=padding,
    )


run = jax.jit(attend_tiles, static_argnums=(3, 4), static_argnames="interpret")


def attend(case: Case, inputs: Inputs, blocks: PrefillBlocks) -> np.ndarray:
    cache = plain_write(inputs.k, inputs.v, inputs.cache, inputs.batch, inputs.scales)
    options = {"sinks": inputs.sinks, "alibi_slopes": inputs.alibi_slopes, "scales": inputs.scales}
    return np.asarray(run(inputs.q, inputs.batch, cache, case.spec, blocks, **options, interpret=INTERPRETER))


def check(case: Case, watch, blocks: PrefillBlocks | None = None, inputs: Inputs | None = None) -> None:
    """Rows of several tokens are right, padding is zero, and nothing raced."""
    inputs = inputs_of(case) if inputs is None else inputs
    out = attend(case, inputs, blocks or default_blocks(case.use))
    assert not watch.found_races()
    q_lens = [n for n, _ in case.rows]
    assert (out[sum(q_lens) :] == 0).all()
    several = [row for row, n in enumerate(q_lens) if n > 1]
    if not several:
        return
    owned = np.repeat([n > 1 for n in q_lens], q_lens).nonzero()[0]
    keys, values = ([x[row] for row in several] for x in (inputs.keys, inputs.values))
    part = dataclasses.replace(inputs, q=inputs.q[owned], keys=keys, values=values)
    rows = dataclasses.replace(case, rows=tuple(case.rows[row] for row in several))
    assert relative_error(rows, part, out[owned]) <= TOLERANCE["bfloat16"]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMED])
def test_one_head_of_a_named_case_matches_the_oracle(name, watch):
    check(narrowed(small(REAL[name])), watch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "cache_dtype", "head_dim"),
    [(8, "bfloat16", 256), (16, "float8_e5m2", 96), (192, "float8_e4m3fn", 64), (32, "int8", 128)],
)
def test_page_sizes_dtypes_and_head_dims(page_size, cache_dtype, head_dim, watch):
    spec = dataclasses.replace(SPEC, head_dim=head_dim, window=90, num_query_heads=3, num_kv_heads=1)
    check(rows_case(spec, ((1, 40), (70, 230)), page_size, cache_dtype, padding=7), watch)


@pytest.mark.parametrize("heads", [3, pytest.param(7, marks=pytest.mark.slow)])
def test_heads_that_do_not_fill_the_rows_and_cross_warpgroups(heads, watch):
    case = rows_case(dataclasses.replace(SPEC, num_query_heads=heads, num_kv_heads=1), ((5, 9), (41, 60)), 16)
    blocks = dataclasses.replace(default_blocks(case.use), heads=heads)
    assert blocks.tokens * heads < 2 * blocks.block_q
    check(case, watch, blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("stages", "cache_dtype"), [(1, "float8_e4m3fn"), (3, "bfloat16")])
def test_slots_are_used_again(stages, cache_dtype, watch):
    case = rows_case(narrowed_spec(SPEC), ((30, 500),), cache_dtype=cache_dtype)
    check(case, watch, PrefillBlocks(block_q=64, block_kv=64, stages=stages, heads=2, landing=2))


@pytest.mark.slow
def test_128_rows_for_each_warpgroup(watch):
    case = rows_case(narrowed_spec(SPEC), ((100, 150),), 32)
    check(case, watch, PrefillBlocks(block_q=128, block_kv=64, stages=2, heads=2))


def narrowed_spec(spec: AttentionSpec) -> AttentionSpec:
    return narrowed(rows_case(spec, ())).spec


# --- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("page_size", "window"), [(16, None), pytest.param(32, 9, marks=pytest.mark.slow)])
@settings(max_examples=5, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_ragged_batches_among_poison(page_size, window, watch, data):
    rows = data.draw(ragged_rows(page_size))
    spec = dataclasses.replace(narrowed_spec(SPEC), window=window)
    case, room = bucketed(rows, page_size, spec, "bfloat16", "bfloat16")
    inputs = make_inputs(case, PLAIN, seed=len(rows), poison=True, room=room)
    check(case, watch, PrefillBlocks(block_q=64, block_kv=64, stages=2, heads=2), inputs)


PLAIN = dataclasses.replace(IMPLEMENTATION, write=plain_write)


@pytest.mark.slow
def test_shared_prefix_pages_serve_two_rows(watch):
    page = 16
    case = rows_case(narrowed_spec(SPEC), ((6, 2 * page + 9), (3, 2 * page + 5)), page)
    inputs = inputs_of(case)
    tables = inputs.batch.block_tables
    shared = dataclasses.replace(inputs.batch, block_tables=tables.at[1, :2].set(tables[0, :2]))
    pairs = (inputs.keys, inputs.values)
    keys, values = ([one, jnp.concatenate([one[: 2 * page], two[2 * page :]])] for one, two in pairs)
    check(case, watch, inputs=dataclasses.replace(inputs, batch=shared, keys=keys, values=values))


@pytest.mark.slow
def test_a_batch_of_padding_alone_gives_zeros(watch):
    case, room = bucketed(((1, 5),), 16, narrowed_spec(SPEC), "bfloat16", "bfloat16")
    inputs = make_inputs(case, PLAIN, poison=True, room=room)
    empty = dataclasses.replace(
        inputs.batch,
        token_rows=jnp.full_like(inputs.batch.token_rows, len(inputs.batch.context_lens)),
        q_starts=jnp.zeros_like(inputs.batch.q_starts),
        context_lens=jnp.zeros_like(inputs.batch.context_lens),
    )
    out = attend(case, dataclasses.replace(inputs, batch=empty), default_blocks(case.use))
    assert (out == 0).all()
    assert not watch.found_races()


@pytest.mark.slow
@settings(max_examples=40, derandomize=True)
@given(data=st.data())
def test_work_list_covers_every_token_once(data):
    """Every token of a row of several, and every padding token, is one item's own; its keys are all visited."""
    page_size = data.draw(st.sampled_from([8, 32, 128]))
    window = data.draw(st.sampled_from([None, 1, 20, 70]))
    tokens, block_kv = data.draw(st.sampled_from([(8, 64), (16, 128), (32, 64), (128, 256)]))
    rows = data.draw(ragged_rows(page_size))
    spec = dataclasses.replace(SPEC, window=window)
    case, room = bucketed(rows, page_size, spec, "bfloat16", "bfloat16")
    batch, _ = make_batch(case, np.random.default_rng(0), room)
    num_tokens = max(-(-len(batch.positions) // 8) * 8, tokens)
    items = np.asarray(work_list(batch, spec, num_tokens, tokens, block_kv))
    assert len(items) == max_items(num_tokens, len(batch.context_lens), tokens)
    starts = np.asarray(batch.q_starts)
    owners, loads = np.zeros(num_tokens, int), []
    for row, token, position, own_from, own_to, first_key, tiles, context in items:
        if own_to == 0:
            continue
        assert 0 <= token <= num_tokens - tokens
        assert token % 8 == 0, "on a card a copy into tiles of 8 tokens begins with one; the interpreter has no tiles"
        own = np.arange(token + own_from, token + own_to)
        owners[own] += 1
        if context == 0:
            assert tiles == 0 and own[0] >= starts[-1]
            continue
        assert (own >= starts[row]).all() and (own < starts[row + 1]).all()
        positions = position + np.arange(own_from, own_to)
        assert (positions == np.asarray(batch.positions)[own]).all()
        assert first_key <= max(0, positions[0] - (window or context) + 1)
        assert first_key % min(page_size, block_kv) == 0
        assert first_key + (tiles - 1) * block_kv <= positions[-1] < first_key + tiles * block_kv
        loads.append((row, own[0]))
    expected = np.zeros(num_tokens, int)
    for row, (n, _) in enumerate(rows):
        expected[starts[row] : starts[row + 1]] = n > 1
    expected[starts[-1] :] = 1
    assert (owners == expected).all()
    for (row, first), (next_row, next_first) in itertools.pairwise(loads):
        assert row != next_row or first > next_first  # long items first


# --- ahead of time ----------------------------------------------------------------------------------------------------


def compile_case(case: Case, blocks: PrefillBlocks | None = None) -> None:
    shapes = shapes_of(case)
    options = {"sinks": shapes.sinks, "alibi_slopes": shapes.alibi_slopes, "scales": shapes.scales}
    kernel = functools.partial(attend_tiles, spec=case.spec, blocks=blocks or default_blocks(case.use))
    compile_for_h200(lambda q, batch, cache, o: kernel(q, batch, cache, **o), shapes.q, shapes.batch, shapes.cache,
                     options)  # fmt: skip


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3-8b-tp1/busy/64/bfloat16", "gpt-oss/busy/128/float8_e4m3fn"])
def test_the_largest_candidates_compile_for_h200(name):
    found = candidates(REAL[name].use)
    for blocks in {max(found, key=lambda b: (b.stages, b.block_kv)), max(found, key=lambda b: (b.block_q, b.block_kv))}:
        compile_case(REAL[name], blocks)


def use_of(head_dim: int, cache_dtype: str, heads: int = 8, kv_heads: int = 2, page_size: int = 64) -> AttentionUse:
    spec = AttentionSpec(num_query_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=1.0)
    return AttentionUse(spec=spec, page_size=page_size, query_dtype="bfloat16", cache_dtype=cache_dtype)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("cache_dtype", layout.CACHE_DTYPES)
def test_sizes_fit_and_divide(head_dim, cache_dtype):
    for heads, kv_heads in ((8, 2), (7, 1), (12, 1), (64, 1), (71, 1), (3, 3)):
        for page_size in (8, 64, 128, 192, 384):
            use = use_of(head_dim, cache_dtype, heads, kv_heads, page_size)
            for blocks in [default_blocks(use), *candidates(use)]:
                assert shared_memory_bytes(use, blocks) <= layout.SHARED_MEMORY_BYTES
                assert heads // kv_heads % blocks.heads == 0
                assert 0 < blocks.tokens * blocks.heads <= 2 * blocks.block_q and blocks.tokens % 8 == 0
                assert blocks.block_kv % page_size == 0 or page_size % blocks.block_kv == 0
            assert default_blocks(use) in candidates(use)


@needs_gpu_compiler
def test_shared_memory_is_estimated_as_mosaic_counts_it():
    """One stage too many is refused by both."""
    case = REAL["llama3-8b-tp1/busy/64/bfloat16"]
    over = dataclasses.replace(default_blocks(case.use), stages=3)
    assert shared_memory_bytes(case.use, over) > layout.SHARED_MEMORY_BYTES
    with pytest.raises(ValueError, match="exceeds available shared memory"):
        compile_case(case, over)
