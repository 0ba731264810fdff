"""Decode on GPUs: the cut into splits, the kernels in the interpreter against the oracle, and compiled for an H200."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxserve.kernels.cases import REAL, Case, Inputs, small
from jaxserve.kernels.oracle import TOLERANCE, attend_row, relative_error
from jaxserve.kernels.paged_attention import AttentionSpec, AttentionUse
from jaxserve.kernels.pallas import gpu_decode
from jaxserve.kernels.pallas.gpu_decode import DecodeBlocks
from jaxserve.kernels.pallas.gpu_layout import SHARED_MEMORY_BYTES, GpuPages
from tests.kernels.gpu_compiler import compile_for_h200, needs_gpu_compiler, shapes_of
from tests.kernels.gpu_interpreter import IMPLEMENTATION, INTERPRETER, inputs_of, narrowed, plain_write, watched

# Every option and dtype, most head dims and page sizes; in the interpreter with one kv head, and not the first one.
NAMED = (
    "llama3-8b-tp4/decode64/32/float8_e5m2",
    "gpt-oss/decode64/128/float8_e4m3fn",
    "gemma2-9b/row128k/64/bfloat16",
    "mpt-7b-alibi/decode64/64/bfloat16",
)
QUICK = "gpt-oss/decode64/128/float8_e4m3fn"


@pytest.fixture(scope="module")
def watch():
    with watched() as watch:
        yield watch


def few_splits(case: Case, stages: int = 2) -> DecodeBlocks:
    """Rows of the small cases get two splits where they can, and the ring is shorter than a split."""
    num_rows = len(case.rows) + case.padding_rows
    return DecodeBlocks(stages=stages, programs=2 * num_rows * case.spec.num_kv_heads, min_tiles=1)


def attend(case: Case, inputs: Inputs, blocks: DecodeBlocks) -> np.ndarray:
    cache = plain_write(inputs.k, inputs.v, inputs.cache, inputs.batch, inputs.scales)
    run = functools.partial(
        gpu_decode.attend_rows,
        spec=case.spec,
        blocks=blocks,
        sinks=inputs.sinks,
        alibi_slopes=inputs.alibi_slopes,
        scales=inputs.scales,
        interpret=INTERPRETER,
    )
    out = jax.jit(run)(inputs.q, inputs.batch.context_lens, inputs.batch.block_tables, cache)
    return np.asarray(out.astype(jnp.float32))


def check(case: Case, watch, blocks: DecodeBlocks | None = None) -> None:
    inputs = inputs_of(case)
    out = attend(case, inputs, blocks or few_splits(case))
    assert relative_error(case, inputs, out) <= TOLERANCE["bfloat16"]
    assert (out[len(case.rows) :] == 0).all()
    assert not watch.found_races()


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == QUICK else pytest.mark.slow) for n in NAMED])
def test_one_head_of_a_named_case_matches_the_oracle(name, watch):
    check(narrowed(small(REAL[name])), watch)


@pytest.mark.slow
@pytest.mark.parametrize(("group", "head_dim"), [(1, 40), (12, 128), (32, 256)])
def test_any_group_and_head_dim(group, head_dim, watch):
    case = narrowed(small(REAL["llama3-8b-tp8/decode64/64/bfloat16"]))
    spec = dataclasses.replace(case.spec, num_query_heads=group, head_dim=head_dim, soft_cap=30.0)
    check(dataclasses.replace(case, spec=spec), watch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "dtype", "head_dim"),
    [(8, "bfloat16", 64), (16, "float8_e5m2", 96), (32, "int8", 128), (192, "bfloat16", 256)],
)
def test_any_page_size_and_dtype(page_size, dtype, head_dim, watch):
    case = narrowed(small(REAL["gpt-oss/decode64/64/bfloat16"]))
    spec = dataclasses.replace(case.spec, head_dim=head_dim)
    check(dataclasses.replace(case, spec=spec, page_size=page_size, cache_dtype=dtype), watch)


@pytest.mark.slow
def test_one_row_in_many_splits_is_combined_by_all_warpgroups(watch):
    case = dataclasses.replace(narrowed(small(REAL["gpt-oss/row128k/64/bfloat16"])), rows=((1, 1400),))
    spec = dataclasses.replace(case.spec, window=None)
    # 22 tiles, so 22 splits: the combination takes them in batches of 8, and its two warpgroups get 2 and 1 of those.
    check(dataclasses.replace(case, spec=spec, padding_rows=1), watch, DecodeBlocks(stages=2, programs=44, min_tiles=1))


@pytest.mark.slow
def test_one_row_in_more_splits_than_the_combination_has_places_for(watch):
    case = dataclasses.replace(narrowed(small(REAL["gpt-oss/row128k/64/bfloat16"])), rows=((1, 4000),))
    spec = dataclasses.replace(case.spec, window=None)
    check(
        dataclasses.replace(case, spec=spec, padding_rows=1), watch, DecodeBlocks(stages=2, programs=126, min_tiles=1)
    )


# --- properties ------------------------------------------------------------------------------------------------------

PAGE, MAX_ROWS, MAX_CONTEXT = 16, 4, 200
COLUMNS = -(-MAX_CONTEXT // PAGE)
NUM_PAGES = MAX_ROWS * COLUMNS + 2
SPEC = AttentionSpec(num_query_heads=2, num_kv_heads=1, head_dim=64, scale=0.125)
EDGES = (0, 1, 2, PAGE - 1, PAGE, PAGE + 1, 63, 64, 65, 127, 128, 129, 192, MAX_CONTEXT)
_attend = jax.jit(
    functools.partial(
        gpu_decode.attend_rows,
        blocks=DecodeBlocks(stages=2, programs=2 * MAX_ROWS, min_tiles=1),
        interpret=INTERPRETER,
    ),
    static_argnums=4,
)


@settings(max_examples=4, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lens=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, MAX_CONTEXT)), min_size=MAX_ROWS, max_size=MAX_ROWS),
    shared=st.integers(0, 3),
    seed=st.integers(0, 9),
)
def test_random_rows_with_shared_prefixes_among_poison(lens, shared, seed, watch):
    """Rows of any length, empty ones too; the first `shared` pages of all rows are the same."""
    rng = np.random.default_rng(seed)
    spec = dataclasses.replace(SPEC, window=70)
    q = jnp.asarray(rng.standard_normal((MAX_ROWS, 2, 64)), jnp.bfloat16)
    ids = rng.permutation(NUM_PAGES) + 1
    tables = np.zeros((MAX_ROWS, COLUMNS), np.int32)
    pages = np.full((2, NUM_PAGES + 1, 1, PAGE, 64), np.nan, np.float32)
    sequences = np.asarray(
        jnp.asarray(rng.standard_normal((2, MAX_ROWS, MAX_CONTEXT, 1, 64)), jnp.bfloat16), np.float32
    )
    sequences[:, :, : shared * PAGE] = sequences[:, :1, : shared * PAGE]
    for row, length in enumerate(lens):
        for column in range(-(-length // PAGE)):
            page = ids[column] if column < shared else ids[row * COLUMNS + column]
            tables[row, column] = page
            own = slice(column * PAGE, min(length, (column + 1) * PAGE))
            pages[:, page, 0, : own.stop - own.start] = sequences[:, row, own, 0]
    cache = GpuPages(keys=jnp.asarray(pages[0], jnp.bfloat16), values=jnp.asarray(pages[1], jnp.bfloat16))
    out = _attend(q, jnp.asarray(lens, jnp.int32), jnp.asarray(tables), cache, spec)
    out = np.asarray(out.astype(jnp.float32))
    for row, length in enumerate(lens):
        if length == 0:
            assert (out[row] == 0).all()
            continue
        keys, values = sequences[:, row, :length]
        exact = attend_row(q[row : row + 1].astype(jnp.float32), keys, values, spec)[0]
        assert np.linalg.norm(out[row] - exact) <= 2.5e-3 * np.linalg.norm(exact), (row, length)
    assert not watch.found_races()


_cut = jax.jit(gpu_decode.cut_rows, static_argnums=(1, 2, 3, 4))


@settings(max_examples=60, derandomize=True)
@given(
    lens=st.lists(st.one_of(st.sampled_from(EDGES), st.integers(0, 5000)), min_size=6, max_size=6),
    window=st.sampled_from([None, 100]),
    programs=st.sampled_from([7, 4224]),
    min_tiles=st.sampled_from([1, 8]),
)
def test_splits_cover_every_visible_tile_once(lens, window, programs, min_tiles):
    kv_heads = 8
    blocks = DecodeBlocks(stages=2, programs=programs, min_tiles=min_tiles)
    splits = _cut(jnp.asarray(lens, jnp.int32), window, -(-5000 // 64), kv_heads, blocks)
    rows, firsts, counts = (np.asarray(x) for x in (splits.rows, splits.first_tiles, splits.counts))
    assert len(rows) <= len(lens) + -(-programs // kv_heads)
    for row, length in enumerate(lens):
        start, number = int(splits.row_starts[row]), int(splits.row_counts[row])
        own = range(start, start + number)
        tiles = [t for i in own for t in range(firsts[i], firsts[i] + counts[i])]
        begin = max(0, length - window) // 64 if window else 0
        assert tiles == list(range(begin, -(-length // 64)))
        assert all(rows[i] == row and counts[i] > 0 for i in own)
        assert len(set(counts[list(own)[:-1]])) <= 1  # of one length, but for the last
        assert number <= 1 or 2 * counts[start] >= min_tiles
    used = int(np.asarray(splits.row_counts).sum())
    assert (counts[used:] == 0).all()
    others = _cut(jnp.asarray([lens[0], 5000, 0, 1, 4999, 64], jnp.int32), window, -(-5000 // 64), kv_heads, blocks)
    first = slice(0, int(splits.row_counts[0]))
    assert np.array_equal(others.counts[first], counts[first]), "a row is cut the same way in any crowd"
    assert int(others.row_counts[0]) == int(splits.row_counts[0])


# --- the checks can fail ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("barrier", ["keys", pytest.param("values", marks=pytest.mark.slow)])
def test_a_missing_wait_is_reported_as_a_race(barrier, watch, monkeypatch):
    waits = {"q": 0, "keys": 1, "values": 2}  # in the order in which the kernel's text has them

    def barrier_wait(ref) -> None:
        if next(calls) != waits[barrier]:
            plgpu.barrier_wait(ref)

    calls = iter(range(100))
    racy = types.SimpleNamespace(**{**vars(plgpu), "barrier_wait": barrier_wait})
    monkeypatch.setattr(gpu_decode, "plgpu", racy)
    case = dataclasses.replace(narrowed(small(REAL["llama3-8b-tp8/decode64/64/bfloat16"])), rows=((1, 64),))
    attend(
        dataclasses.replace(case, padding_rows=0),
        inputs_of(dataclasses.replace(case, padding_rows=0)),
        few_splits(case),
    )
    assert watch.found_races()


def test_poison_reaches_the_output_without_the_guard(watch, monkeypatch):
    monkeypatch.setattr(gpu_decode, "_zero_unseen", lambda *_: None)
    case = narrowed(small(REAL["llama3-8b-tp8/decode64/64/bfloat16"]))
    inputs = inputs_of(case)
    assert not np.isfinite(attend(case, inputs, few_splits(case))).all()


# --- compiled for an H200 --------------------------------------------------------------------------------------------


def compile_case(case: Case, blocks: DecodeBlocks | None = None):
    spec, use = case.spec, case.use
    inputs = shapes_of(case)

    def run(q, context_lens, tables, cache, sinks, slopes, scales):
        return gpu_decode.attend_rows(
            q,
            context_lens,
            tables,
            cache,
            spec,
            blocks or gpu_decode.default_blocks(use),
            sinks=sinks,
            alibi_slopes=slopes,
            scales=scales,
        )

    return compile_for_h200(
        run,
        inputs.q,
        inputs.batch.context_lens,
        inputs.batch.block_tables,
        inputs.cache,
        inputs.sinks,
        inputs.alibi_slopes,
        inputs.scales,
    )


@needs_gpu_compiler
@pytest.mark.parametrize("name", ["llama3-8b-tp1/decode64/16/bfloat16", "gemma2-9b/row128k/64/bfloat16"])
def test_named_case_compiles_at_full_size(name):
    """With every option and dtype: tests/kernels/test_gpu_implementation.py."""
    case = REAL[name]
    memory = compile_case(case).memory_analysis()
    # The cache is read where it lies, and what the splits leave is small beside it.
    assert memory.temp_size_in_bytes < case.kv_bytes / 4 + 2**22


@pytest.mark.parametrize(("name", "programs"), [("llama3-8b-tp1", 2), ("gemma2-9b", 1)])
def test_rings_are_as_deep_as_the_programs_of_a_multiprocessor_leave_room(name, programs):
    use = REAL[f"{name}/decode64/64/bfloat16"].use
    blocks = gpu_decode.default_blocks(use)
    deeper = dataclasses.replace(blocks, stages=blocks.stages + 1)
    room = SHARED_MEMORY_BYTES // programs
    assert gpu_decode.shared_memory_bytes(use, blocks) <= room < gpu_decode.shared_memory_bytes(use, deeper)


@needs_gpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "head_dim", "dtype"),
    [(1, 64, "bfloat16"), (32, 256, "float8_e4m3fn")],
)
def test_all_candidates_that_should_fit_compile(group, head_dim, dtype):
    case = small(REAL["llama3-8b-tp8/decode64/64/bfloat16"])
    spec = dataclasses.replace(case.spec, num_query_heads=group, head_dim=head_dim, soft_cap=30.0)
    case = dataclasses.replace(case, spec=spec, cache_dtype=dtype, alibi=True, sinks=True, page_size=16)
    found = gpu_decode.candidates(case.use)
    assert found and gpu_decode.default_blocks(case.use).stages in {blocks.stages for blocks in found}
    deepest = max(found, key=lambda blocks: blocks.stages)
    compile_case(case, deepest)


@needs_gpu_compiler
def test_shared_memory_is_not_underestimated():
    case = REAL["mpt-7b-alibi/decode64/64/bfloat16"]
    deep = DecodeBlocks(stages=16, programs=528, min_tiles=8)
    estimate = gpu_decode.shared_memory_bytes(case.use, deep)
    assert estimate > SHARED_MEMORY_BYTES
    with pytest.raises(ValueError, match="exceeds available shared memory") as error:
        compile_case(case, deep)
    asked = int(str(error.value).split("smem_bytes=")[1].split()[0])
    assert asked <= estimate <= asked + 4096


def test_too_many_query_heads_are_refused_with_the_limit():
    use = AttentionUse(
        spec=AttentionSpec(num_query_heads=71, num_kv_heads=1, head_dim=128, scale=0.1),
        page_size=64,
        query_dtype="bfloat16",
        cache_dtype="bfloat16",
    )
    assert "71 query heads" in (IMPLEMENTATION.refuses(use) or "")
