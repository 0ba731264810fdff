"""Attention for TPUs in the interpreter, with races watched and memory poisoned, against the float64 oracle."""

import dataclasses
import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from jaxserve.kernels.cases import REAL, Case, Room, case, make_inputs, small
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.oracle import TOLERANCE, relative_error
from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, AttentionUse
from jaxserve.kernels.pallas import tpu_attention, tpu_write
from jaxserve.kernels.pallas.tpu_implementation import make_attention
from jaxserve.kernels.tuning import entry_name
from jaxserve.kernels.xla_attention import XLA_ATTENTION as REFERENCE
from tests.kernels.ragged import bucketed, ragged_rows
from tests.kernels.tpu_interpreter import (
    IMPLEMENTATION,
    INTERPRETER,
    NO_TABLE,
    V5E,
    Watch,
    implementation_with,
    inputs_of,
    plain_write,
    run,
    watched,
)

pytestmark = pytest.mark.usefixtures("compiled_quickly")  # the kernel's own order of sums is that of the interpreter

attend = jax.jit(IMPLEMENTATION.attend, static_argnums=5, donate_argnums=3)
# Every kind of batch, option and dtype; models that differ in the numbers of their heads alone are one.
QUICK = (
    "gpt-oss/ragged/64/bfloat16",
    "llama3-8b-tp4/decode64/32/float8_e4m3fn",
)
NAMED = (
    *QUICK,
    "gemma2-9b/busy/64/bfloat16",
    "llama3-8b-tp4/busy/32/int8",
    "llama3-8b-tp8/ragged/128",
    "mpt-7b-alibi/ragged/64/bfloat16",
    "mistral-7b/prefill8k/64/bfloat16",
    "llama3-70b-tp8/row128k/64/bfloat16",
    "llama3-8b-tp4/busy/32/float8_e5m2",
)


@pytest.fixture(scope="module")
def watch():
    with watched() as watch:
        yield watch


def check(case: Case, watch: Watch, seed: int = 0, room: Room | None = None, attend: Callable = attend) -> None:
    inputs = inputs_of(case, seed=seed, room=room)
    out, _ = run(attend, case, inputs)
    assert relative_error(case, inputs, out) <= TOLERANCE[case.query_dtype]
    assert not watch.found_races()


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in NAMED])
def test_named_case_matches_the_oracle(name, watch):
    check(small(REAL[name]), watch)


SPEC = AttentionSpec(num_query_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)


@functools.cache
def attend_with(use: AttentionUse, pages: int, compute: int):
    """A jitted `attend` whose blocks are of these sizes."""
    sizes = {"pages": pages, "compute": compute}
    block_q = {"decode": 1, "prefill": 32}
    implementation = implementation_with(
        {entry_name("mosaic_tpu", variant, use): {"block_q": q, **sizes} for variant, q in block_q.items()}
    )
    return jax.jit(implementation.attend, static_argnums=5)


@pytest.mark.slow
@settings(max_examples=6, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_random_ragged_batches_among_poison(watch, data):
    """Every other one with blocks so small that a row has several, and each of them two compute blocks."""
    page_size, window = 32, 9
    rows = data.draw(ragged_rows(page_size))
    if not rows:
        return
    batch, room = bucketed(rows, page_size, dataclasses.replace(SPEC, window=window), "float32", "float32")
    if data.draw(st.booleans()):
        check(batch, watch, seed=len(rows), room=room)
    else:
        check(batch, watch, seed=len(rows), room=room, attend=attend_with(batch.use, 2, 1))


LONG_ROWS = ((1, 1), (1, 64), (1, 65), (1, 256), (1, 250), (1, 257), (1, 700), (1, 17))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "window", "dtype"),
    [
        (16, 100, "bfloat16"),
        (24, None, "float32"),
    ],
)
def test_blocks_of_several_compute_blocks(page_size, window, dtype, watch):
    """Rows end inside of, at the end of, and beyond a compute block, a block and a page; windows begin anywhere."""
    query_dtype = "float32" if dtype == "float32" else "bfloat16"
    batch = Case(
        name="long",
        spec=dataclasses.replace(SPEC, window=window),
        rows=LONG_ROWS,
        page_size=page_size,
        query_dtype=query_dtype,
        cache_dtype=dtype,
        padding_rows=1,
    )
    check(batch, watch, attend=attend_with(batch.use, 16, 4))


@pytest.mark.parametrize("columns", [pytest.param(1, marks=pytest.mark.slow), 300])
def test_a_row_of_one_token_in_blocks_larger_than_its_table_or_smaller(columns, watch):
    batch = Case(name="one", spec=SPEC, rows=((1, 1),), page_size=16)
    check(batch, watch, room=Room(columns=columns, num_pages=4))


def test_a_row_of_nan_reaches_no_neighbour():
    """Its keys and values are left in the buffers that shorter rows use after it."""
    batch = Case(name="nan", spec=SPEC, rows=((1, 300), (1, 40), (1, 3)), page_size=16)
    inputs, function = inputs_of(batch), attend_with(batch.use, 16, 4)
    sick = inputs.cache.at[inputs.batch.block_tables[0, :18]].set(jnp.nan)
    expected, out = (
        np.asarray(run(function, batch, dataclasses.replace(inputs, cache=cache))[0]) for cache in (inputs.cache, sick)
    )
    assert np.isnan(out[0]).all()
    np.testing.assert_array_equal(out[1:], expected[1:])


def test_a_batch_of_padding_alone_gives_zeros():
    batch, room = bucketed(((1, 5),), 16, SPEC, "float32", "float32")
    inputs = inputs_of(batch, room=room)
    empty = dataclasses.replace(
        inputs.batch,
        token_rows=jnp.full_like(inputs.batch.token_rows, len(inputs.batch.context_lens)),
        q_starts=jnp.zeros_like(inputs.batch.q_starts),
        context_lens=jnp.zeros_like(inputs.batch.context_lens),
    )
    out, _ = run(attend, batch, dataclasses.replace(inputs, batch=empty))
    assert (np.asarray(out) == 0).all()


class _NoNegatives:
    """An array of the work list in which a negative index lies beyond the end: the interpreter sees only that."""

    def __init__(self, ref) -> None:
        self._ref = ref

    def __getitem__(self, index):
        return self._ref[jnp.where(index < 0, self._ref.shape[0], index)]


ONE_TOKEN_EACH = tuple((1, 20 + n) for n in range(16))
EMPTY_LISTS = {  # no padding tokens, but padding rows: their first token would be one beyond the end
    "no-prompts": (ONE_TOKEN_EACH, 2),
    "no-decode-rows": (((16, 33),), 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EMPTY_LISTS)
def test_nothing_beside_the_arrays_is_read_or_written(name, watch, monkeypatch):
    rows, padding_rows = EMPTY_LISTS[name]
    items = tpu_attention._Items
    monkeypatch.setattr(tpu_attention, "_Items", lambda *refs: items(*map(_NoNegatives, refs)))
    implementation = make_attention(V5E, NO_TABLE, INTERPRETER)
    batch = Case(name=name, spec=SPEC, rows=rows, page_size=16, mixed=True, padding_rows=padding_rows)
    inputs = inputs_of(batch, implementation)
    out, _ = run(jax.jit(implementation.attend, static_argnums=5), batch, inputs)
    assert relative_error(batch, inputs, out) <= TOLERANCE["float32"]
    assert not watch.found_races()


@settings(max_examples=25, deadline=None, derandomize=True)
@example(q_lens=[1, 1, 1, 1, 4, 8], block_q=4, window=None)  # no padding tokens
@example(q_lens=[8, 8, 0, 0, 0, 0], block_q=4, window=None)
@example(q_lens=[0, 0, 0, 0, 0, 0], block_q=4, window=5)
@given(
    q_lens=st.lists(st.integers(0, 9), min_size=6, max_size=6),
    block_q=st.sampled_from([4, 16]),
    window=st.sampled_from([None, 5]),
)
def test_work_lists_name_only_what_is_there(q_lens, block_q, window):
    """Always 16 tokens and 6 rows, so that nothing is compiled twice."""
    num_tokens, num_rows = 16, 6
    lens = np.asarray(q_lens, np.int32)
    lens = np.where(np.cumsum(lens) <= num_tokens, lens, 0)
    starts = np.concatenate([[0], np.cumsum(lens)]).astype(np.int32)
    padding_tokens = num_tokens - starts[-1]
    spec = dataclasses.replace(SPEC, window=window)
    rows = np.concatenate([np.repeat(np.arange(num_rows), lens), np.full(padding_tokens, num_rows)])
    batch = AttentionBatch(
        positions=jnp.zeros(num_tokens, jnp.int32),
        token_rows=jnp.asarray(rows, jnp.int32),
        q_starts=jnp.asarray(starts),
        context_lens=jnp.asarray(np.where(lens > 0, lens + 7, 0), jnp.int32),
        block_tables=jnp.ones((num_rows, 4), jnp.int32),
        page_size=16,
        decode_only=False,
    )
    decoding = jnp.where(jnp.asarray(lens) == 1, batch.context_lens, 0)
    num_tiles = -(-num_tokens // block_q)
    lists = [(tpu_attention.prefill_work(batch, spec, block_q, 16), num_tiles)]
    lists.append((tpu_attention.decode_work(decoding, spec, 16), num_rows))
    for work, tiles in lists:
        for named, limit in ((work.tile, tiles), (work.row, num_rows), (work.begin, 10**6), (work.low, 10**6)):
            visited = np.asarray(named)[: max(1, int(work.count[0]))]
            assert ((visited >= 0) & (visited < limit)).all(), (work, q_lens)
    several = [(a, b) for a, b in itertools.pairwise(starts) if b - a > 1]
    assert lists[0][0].count[0] == sum(len({t // block_q for t in range(a, b)}) for a, b in several)
    assert lists[1][0].count[0] == (lens == 1).sum()


def test_shared_prefix_pages_serve_two_rows():
    page = 16
    batch = dataclasses.replace(
        case("demo", "short", page), rows=((1, 2 * page + 5), (3, 2 * page + 9)), padding_rows=0, padding_tokens=0
    )
    inputs = inputs_of(batch)
    tables = inputs.batch.block_tables
    shared = dataclasses.replace(inputs.batch, block_tables=tables.at[1, :2].set(tables[0, :2]))
    keys, values = (
        [one, jnp.concatenate([one[: 2 * page], two[2 * page :]])] for one, two in (inputs.keys, inputs.values)
    )
    inputs = dataclasses.replace(inputs, batch=shared, keys=keys, values=values)
    out, _ = run(attend, batch, inputs)
    assert relative_error(batch, inputs, out) <= TOLERANCE["float32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_the_write_stores_what_the_reference_stores_and_nothing_else(dtype):
    rows = ((1, 1), (1, 33), (17, 17), (40, 75))
    batch, room = bucketed(rows, 24, dataclasses.replace(SPEC, head_dim=96), "bfloat16", dtype)
    inputs = make_inputs(batch, IMPLEMENTATION, room=room)
    wanted = make_inputs(batch, REFERENCE, room=room)
    cache, reference = (
        jax.jit(implementation.write)(i.k, i.v, i.cache, i.batch, i.scales)
        for implementation, i in ((IMPLEMENTATION, inputs), (REFERENCE, wanted))
    )
    cache = np.asarray(cache.astype(jnp.float32))
    keys = np.asarray(reference.keys.astype(jnp.float32)).swapaxes(2, 3)
    np.testing.assert_array_equal(cache[1:, :, 0, :24, :96], keys[1:])
    np.testing.assert_array_equal(cache[1:, :, 1, :24, :96], np.asarray(reference.values.astype(jnp.float32))[1:])
    assert (cache[..., 24:, :] == 0).all() and (cache[..., 96:] == 0).all()


@pytest.mark.parametrize(("page_size", "head_dim"), [(16, 64), (24, 96)])
def test_the_write_among_poison_is_the_scatter_that_fills_caches_here(page_size, head_dim, watch, monkeypatch):
    monkeypatch.setattr(tpu_write, "_BATCH_BYTES", 2**15)  # several batches, the last not full
    rows = ((1, 1), (1, 33), (17, 17), (40, 75))
    batch, room = bucketed(rows, page_size, dataclasses.replace(SPEC, head_dim=head_dim), "bfloat16", "bfloat16")
    inputs = inputs_of(batch, room=room)
    kernel, scatter = (
        jax.jit(write)(inputs.k, inputs.v, inputs.cache, inputs.batch, None)
        for write in (IMPLEMENTATION.write, plain_write)
    )
    np.testing.assert_array_equal(*(np.asarray(cache.astype(jnp.float32)) for cache in (kernel, scatter)))
    assert not watch.found_races()


@pytest.mark.slow
def test_any_tuned_sizes_give_the_same_answer(watch):
    use = small(REAL["llama3-8b-tp8/busy/64/bfloat16"])
    use = dataclasses.replace(use, page_size=16)
    entries = {
        entry_name("mosaic_tpu", "decode", use.use): {"block_q": 1, "pages": 1, "compute": 1},
        entry_name("mosaic_tpu", "prefill", use.use): {"block_q": 32, "pages": 4, "compute": 2},
    }
    tuned = implementation_with(entries)
    inputs = inputs_of(use, tuned)
    out, _ = run(jax.jit(tuned.attend, static_argnums=5), use, inputs)
    assert relative_error(use, inputs, out) <= TOLERANCE["bfloat16"]
    assert not watch.found_races()


@pytest.mark.slow
def test_page_ids_of_a_long_row_come_in_pieces_of_128(watch):
    """Pages of 16 and 5000 tokens: three pieces of page ids, the last of them short."""
    long = dataclasses.replace(
        small(REAL["llama3-8b-tp8/row128k/64/bfloat16"]), rows=((1, 5000), (1, 40), (1, 2049)), page_size=16
    )
    check(dataclasses.replace(long, padding_rows=1), watch)


@pytest.mark.slow
def test_a_decode_row_is_bitwise_the_same_alone_and_in_any_crowd():
    crowd, room = bucketed(((1, 65), (1, 7), (1, 120), (17, 60)), 16, SPEC, "bfloat16", "bfloat16")
    inputs = make_inputs(crowd, IMPLEMENTATION, room=room)
    together = np.asarray(run(jax.jit(IMPLEMENTATION.attend, static_argnums=5), crowd, inputs)[0].astype(jnp.float32))
    last = len(crowd.rows) + crowd.padding_rows
    for row in range(3):
        batch = dataclasses.replace(
            inputs.batch,
            positions=jnp.zeros_like(inputs.batch.positions).at[0].set(inputs.batch.positions[row]),
            token_rows=jnp.full_like(inputs.batch.token_rows, last).at[0].set(0),
            q_starts=jnp.ones_like(inputs.batch.q_starts).at[0].set(0),
            context_lens=jnp.zeros_like(inputs.batch.context_lens).at[0].set(inputs.batch.context_lens[row]),
            block_tables=inputs.batch.block_tables.at[0].set(inputs.batch.block_tables[row]),
        )
        q, k, v = (jnp.roll(x, -row, axis=0) for x in (inputs.q, inputs.k, inputs.v))
        alone, _ = run(
            jax.jit(IMPLEMENTATION.attend, static_argnums=5),
            crowd,
            dataclasses.replace(inputs, q=q, k=k, v=v, batch=batch),
        )
        np.testing.assert_array_equal(np.asarray(alone[0].astype(jnp.float32)), together[row])


@pytest.mark.parametrize(
    "wait", [lambda self, i, c, slot: None, lambda self, i, c, slot: self._page(0, 0, slot).wait()], ids=["no", "one"]
)
def test_a_missing_wait_would_be_seen(wait, watch, monkeypatch):
    """What these tests rely on: without waits for all pages, the interpreter reports a race or poison comes out."""
    monkeypatch.setattr(tpu_attention._Copies, "wait_block", wait)
    broken = make_attention(V5E, NO_TABLE, INTERPRETER)
    batch = small(REAL["llama3-8b-tp8/decode64/64/bfloat16"])
    inputs = inputs_of(batch, broken)
    out, _ = run(jax.jit(broken.attend, static_argnums=5), batch, inputs)
    assert watch.found_races() or relative_error(batch, inputs, out) > TOLERANCE["bfloat16"]


# --- what is refused ------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_the_figures():
    v4 = make_attention(Device(backend="tpu", kind="TPU v4"))
    reason = v4.refuses(REAL["mpt-7b-alibi/busy/64/bfloat16"].use)
    assert reason is not None and "MiB of VMEM" in reason and "TPU v4 has 13 MiB" in reason
    assert make_attention(V5E).refuses(REAL["mpt-7b-alibi/busy/64/bfloat16"].use) is None
    unknown = make_attention(Device(backend="tpu", kind="TPU v99"))
    assert "this is 'TPU v99'" in str(unknown.refuses(REAL["llama3-8b-tp1/busy/64/bfloat16"].use))


@pytest.mark.parametrize(
    ("columns", "num_tokens", "expected"),
    [(64, 8192, (128, 16, 8)), (64, 33, (64, 16, 8)), (64, 3, (16, 16, 8)), (5, 8192, (128, 8, 8)), (3, 1, (16, 4, 4))],
)
def test_blocks_are_no_larger_than_a_table_and_a_step(columns, num_tokens, expected):
    blocks = tpu_attention.Blocks(block_q=128, pages=16, compute=8).within(columns, num_tokens)
    assert dataclasses.astuple(blocks) == expected


def test_tuned_sizes_that_are_no_powers_of_two_are_refused():
    use = REAL["llama3-8b-tp1/busy/64/bfloat16"].use
    implementation = implementation_with(
        {entry_name("mosaic_tpu", "decode", use): {"block_q": 1, "pages": 3, "compute": 1}}
    )
    assert "not powers of two" in str(implementation.refuses(use))
