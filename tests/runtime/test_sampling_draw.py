"""Thresholds, noise and draws: exact against a sort, right in distribution, and independent of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import Rig, make_setup, oracle_kept, softmax

from jaxserve.api import SamplingParams
from jaxserve.runtime.row_state import encode_row
from jaxserve.runtime.sampling_draw import draw, keep_threshold, threefry, uniform
from jaxserve.runtime.sampling_reduce import first_argmax, row_max, top_values
from jaxserve.runtime.sampling_rules import float_field

V = 500
jit_draw = jax.jit(draw)


@jax.jit
def kept_mask(logits, params):
    active = jnp.ones(len(logits), bool)
    threshold = keep_threshold(logits, row_max(logits), float_field(params, 0), params, active)
    return logits >= threshold[:, None]


def kept_sets(logits, options):
    """In one shape: fewer rows come again and again."""
    params = np.stack([encode_row(make_setup(**o)) for o in options])
    rows = [np.resize(x, (len(LIMITS), *x.shape[1:])) for x in (logits, params)]
    return [set(np.flatnonzero(line).tolist()) for line in np.asarray(kept_mask(*rows))[: len(options)]]


def distinct_logits(rng, rows, spread):
    """No two alike in a row, so that a set is well defined."""
    logits = np.zeros((rows, V), np.float32)
    for line in logits:
        while len(np.unique(line)) < V:  # about one draw in 500 holds a float twice
            line[:] = rng.normal(size=V) * spread
    return logits


LIMITS = [
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 37},
    {"top_k": V - 1},
    {"top_k": V},
    {"top_k": 10 * V},
    {"top_p": 1e-9},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 200, "top_p": 0.2},
    {"top_k": 5, "min_p": 0.3},
    {"top_p": 0.8, "min_p": 0.02},
    {"top_k": 30, "top_p": 0.6, "min_p": 0.01},
    {},
]


@pytest.mark.parametrize(("spread", "temperature"), [(0.01, 1.0), (1.0, 0.3), (1.0, 2.0), (5.0, 1.0)])
def test_limits_keep_what_a_sort_keeps(spread, temperature):
    logits = distinct_logits(np.random.default_rng(11), len(LIMITS), spread)
    found = kept_sets(logits, [{**o, "temperature": temperature} for o in LIMITS])
    for line, limit, kept in zip(logits, LIMITS, found, strict=True):
        want = oracle_kept(line.astype(np.float64), SamplingParams(**limit, temperature=temperature))
        assert kept == want, limit


@settings(max_examples=100, derandomize=True)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(
        st.fixed_dictionaries(
            {
                "temperature": st.floats(0.05, 5),
                "top_k": st.integers(0, V + 5),
                "top_p": st.floats(0.001, 1),
                "min_p": st.just(0.0) | st.floats(0, 1),
            }
        ),
        min_size=4,
        max_size=4,
    ),
)
def test_limits_of_any_size(seed, options):
    rng = np.random.default_rng(seed)
    logits = distinct_logits(rng, 4, rng.choice([0.1, 1.0, 8.0]))
    for line, limit, kept in zip(logits, options, kept_sets(logits, options), strict=True):
        x, params = line.astype(np.float64), SamplingParams(**limit)
        # float32 may put a token whose cumulative mass is within rounding of top_p on either side.
        assert oracle_kept(x, params, slack=-1e-5) <= kept <= oracle_kept(x, params, slack=1e-5)


def test_ties_at_a_threshold_are_all_kept():
    logits = np.full((3, V), -5.0, np.float32)
    logits[:, 10:14] = 2.0
    logits[:, 14:20] = 1.0
    found = kept_sets(logits, [{"top_k": 2}, {"top_k": 5}, {"top_p": 0.3}])
    assert found == [set(range(10, 14)), set(range(10, 20)), set(range(10, 14))]


def test_thresholds_across_zero_and_at_the_ends_of_float32():
    line = np.full(V, -np.inf, np.float32)
    line[:7] = 3e38, 1.0, 2e-38, 0.0, -2e-38, -1.0, -3e38
    logits = np.repeat(line[None], 7, axis=0)
    found = kept_sets(logits, [{"top_k": k} for k in range(1, 8)])
    assert [len(kept & set(range(7))) for kept in found] == [1, 2, 3, 4, 5, 6, 7]
    assert all(kept <= set(range(7)) for kept in found)


def test_threefry_known_answers():
    """The vectors for threefry2x32, 20 rounds, of Random123 (kat_vectors)."""
    cases = [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ]
    for key, counter, want in cases:
        found = threefry(tuple(map(jnp.uint32, key)), tuple(map(jnp.uint32, counter)))
        assert tuple(map(int, found)) == want


def test_uniform_numbers_are_uniform_and_unrelated():
    low = np.arange(64, dtype=np.int32)
    u = np.asarray(uniform(low, low * 0, low * 0 + 7, 4096), np.float64)
    assert u.min() > 0
    assert u.max() < 1
    assert scipy.stats.kstest(u.reshape(-1), "uniform").pvalue > 1e-3
    moved = np.asarray(uniform(low, low * 0, low * 0 + 8, 4096), np.float64)
    for other in (moved, np.roll(u, 1, axis=0), np.roll(u, 1, axis=1)):  # next position, next seed, next token
        correlation = np.corrcoef(u.reshape(-1), other.reshape(-1))[0, 1]
        assert abs(correlation) < 4 / np.sqrt(u.size)


def draw_many(logits, num_draws, first_position=0, **options):
    """Counts of `num_draws` draws from one row of logits, at successive positions of a few seeds."""
    rows = 2000
    counts = np.zeros(len(logits), np.int64)
    for seed in range(num_draws // rows):
        params = np.repeat(encode_row(make_setup(seed=seed, **options))[None], rows, axis=0)
        positions = np.arange(first_position, first_position + rows, dtype=np.int32)
        batch = np.repeat(logits[None].astype(np.float32), rows, axis=0)
        counts += np.bincount(jit_draw(batch, positions, params, np.ones(rows, bool)), minlength=len(logits))
    return counts


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 3.0},
        {"top_k": 4},
        {"temperature": 1.7, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    ],
)
def test_draws_follow_the_distribution(options):
    logits = np.random.default_rng(3).normal(size=12)
    params = SamplingParams(**options)
    kept = sorted(oracle_kept(logits.astype(np.float32).astype(np.float64), params))
    p = softmax(logits / params.temperature)[kept]
    counts = draw_many(logits, 20_000, **options)
    assert counts.sum() == counts[kept].sum(), "a token outside of the limits was drawn"
    assert scipy.stats.chisquare(counts[kept], p / p.sum() * counts.sum()).pvalue > 1e-3


@pytest.mark.slow
def test_draws_from_a_flat_large_vocabulary():
    """Small arrival times decide here: coarse uniform numbers would favour low ids."""
    vocab_size, rows = 131072, 64
    drawn = []
    for first in range(0, 16 * rows, rows):
        params = np.repeat(encode_row(make_setup(seed=12345))[None], rows, axis=0)
        positions = np.arange(first, first + rows, dtype=np.int32)
        drawn.append(np.asarray(jit_draw(jnp.zeros((rows, vocab_size)), positions, params, np.ones(rows, bool))))
    counts = np.bincount(np.concatenate(drawn) // (vocab_size // 16), minlength=16)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.slow
def test_the_same_request_draws_the_same_tokens_in_any_batch():
    """Alone, in any slot of any batch size, in any row of the engine, beside anything: identical tokens."""
    vocab_size = 100
    logits = np.random.default_rng(4).normal(size=(9, 6, vocab_size)).astype(np.float32)
    neighbours = [
        {"temperature": 0.0},
        {"seed": 8},
        {"top_p": 0.5, "logprobs": 3},
        {"frequency_penalty": 1.0, "logit_bias": {5: 3.0}, "allowed_token_ids": [5, 6, 7]},
        {"top_k": 3, "bad_words": [(4,)], "repetition_penalty": 1.5},
    ]
    for options in ({}, {"top_k": 9, "top_p": 0.8, "min_p": 0.01}, {"presence_penalty": 1.0, "top_p": 0.9}):
        results = []
        for row, slot, num_slots in ((0, 0, 1), (3, 0, 6), (5, 5, 6)):
            rig = Rig(vocab_size=vocab_size)
            rig.start(make_setup(row=row, seed=2**40 + 7, tokens=(1, 2), **options))
            others = [r for r in range(6) if r != row][:slot]
            for other, neighbour in zip(others, neighbours, strict=False):
                rig.start(make_setup(row=other, **{"seed": 7, **neighbour}))
            for step in logits:
                batch = {other: step[1 + i] for i, other in enumerate(others)}
                rig.step({**batch, row: step[0]}, num_slots=num_slots)
            results.append(rig.tokens[row])
        assert all(r == results[0] for r in results), options
        assert len(set(results[0])) > 4


def test_seeds_and_positions_matter():
    rig = Rig(vocab_size=100)
    flat = np.zeros(100, np.float32)
    tokens = {rig.sample_one(make_setup(seed=seed, tokens=(1,) * length), flat)
              for seed in (0, 1, 2**32, 2**62) for length in (1, 2, 3)}  # fmt: skip
    assert len(tokens) >= 11


def test_greedy_takes_the_lowest_of_equal_tokens_and_never_varies():
    for vocab_size in (100, 1):
        logits = np.zeros(vocab_size, np.float32)
        logits[vocab_size // 3 :] = 1.0
        rig = Rig(vocab_size=vocab_size)
        assert rig.sample_one(make_setup(temperature=0.0, tokens=(0,)), logits) == vocab_size // 3
        assert rig.sample_one(make_setup(temperature=1e-6, seed=9, tokens=(0,)), logits) == vocab_size // 3


@pytest.mark.parametrize("vocab_size", [1, 97, 256, 4099])
def test_argmax_and_top_values_are_numpys(vocab_size):
    values = np.random.default_rng(1).integers(-3, 3, size=(7, vocab_size)).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(first_argmax)(values), values.argmax(axis=1))
    num_top = min(20, vocab_size)
    top, ids = jax.jit(top_values, static_argnums=1)(values, num_top)
    order = np.argsort(-values, axis=1, kind="stable")[:, :num_top]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_array_equal(top, np.take_along_axis(values, order, axis=1))


@pytest.mark.parametrize(
    "options", [{"temperature": 0.0}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}, {}, {"repetition_penalty": 1.1}]
)
def test_logits_of_a_broken_model(options):
    """NaN counts as -inf, +inf wins, nothing left gives token 0; the neighbours are as without it."""
    nan, inf = np.nan, np.inf
    good = np.random.default_rng(2).normal(size=100).astype(np.float32)
    some_nan = good.copy()
    some_nan[:99] = nan
    one_inf = good.copy()
    one_inf[[0, 42]] = nan, inf
    rows = {0: good, 1: some_nan, 2: np.full(100, nan), 3: np.full(100, -inf), 4: one_inf}
    broken, alone = Rig(vocab_size=100), Rig(vocab_size=100)
    for row in rows:
        broken.start(make_setup(row=row, logprobs=3, **options))
    alone.start(make_setup(row=0, logprobs=3, **options))
    output = broken.step(rows)
    alone.step({0: good})
    assert output.token_ids.tolist() == [alone.tokens[0][-1], 99, 0, 0, 42, 0]
    assert not np.any(np.isnan(output.logprobs.logprob))
    assert not np.any(np.isnan(output.logprobs.top_logprobs))
