"""Masks, bias and penalties against the float64 oracle, one by one and together, over several steps."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_cases import Rig, jit_configure, make_setup, oracle_arrivals, oracle_kept, oracle_logits

from jaxserve.api import MAX_BAD_WORD_LEN, SamplingParams
from jaxserve.runtime.row_state import (
    MAX_COUNT,
    NUM_ROW_FIELDS,
    encode_row,
    encode_row_state,
    init_sampling_state,
    needs_row_state,
    row_state_size,
)
from jaxserve.runtime.sampling_rules import apply_rules, effective_flags

V = 100  # not a multiple of 32, so the last mask word is ragged
SLOTS = 3


@jax.jit
def processed(logits, rows, lens, params, state):
    flags = effective_flags(params, lens, np.ones(len(rows), bool))
    return apply_rules(logits, rows, lens, params, flags, state)


def device_logits(logits, setups):
    """[SLOTS, V] processed on the device; setups are in rows of their own. One shape: fewer come again and again."""
    rig = Rig(vocab_size=V)
    for setup in setups:
        rig.start(setup)
    rows = np.array([s.row for s in setups], np.int32)
    lens = np.array([len(s.token_ids) for s in setups], np.int32)
    params = np.stack([encode_row(s) for s in setups])
    logits, rows, lens, params = (np.resize(x, (SLOTS, *x.shape[1:])) for x in (logits, rows, lens, params))
    return np.asarray(processed(logits, rows, lens, params, rig.state))


def check_against_oracle(logits, setups):
    found = device_logits(logits, setups)
    for slot, setup in enumerate(setups):
        want = oracle_logits(logits[slot], setup, list(setup.token_ids))
        np.testing.assert_allclose(found[slot], want, rtol=1e-5, atol=1e-5)


TOKEN = st.integers(0, V - 1)


@st.composite
def row_setups(draw):
    tokens = draw(st.lists(st.integers(0, 9) | TOKEN, min_size=1, max_size=24))
    prompt_len = draw(st.integers(1, len(tokens)))
    output = tokens[prompt_len:]
    words = draw(st.lists(st.lists(TOKEN, min_size=1, max_size=MAX_BAD_WORD_LEN).map(tuple), max_size=3))
    if output and draw(st.booleans()):  # a word whose beginning has just been generated
        words.append((*output[-draw(st.integers(1, MAX_BAD_WORD_LEN - 1)) :], draw(TOKEN)))
    options = {
        "repetition_penalty": draw(st.sampled_from([1.0, 0.5, 1.3])),
        "frequency_penalty": draw(st.sampled_from([0.0, -1.5, 0.7])),
        "presence_penalty": draw(st.sampled_from([0.0, -2.0, 1.1])),
        "logit_bias": draw(st.none() | st.dictionaries(TOKEN, st.floats(-100, 100, width=32), max_size=5)),
        "allowed_token_ids": draw(st.none() | st.lists(TOKEN, min_size=1, max_size=12)),
        "min_tokens": draw(st.integers(0, 12)),
    }
    stop_ids = draw(st.sets(TOKEN, max_size=4))
    return make_setup(tokens=tokens, prompt_len=prompt_len, stop_ids=stop_ids, bad_words=words, **options)


@settings(max_examples=60, derandomize=True)
@given(st.lists(row_setups(), min_size=SLOTS, max_size=SLOTS), st.permutations(range(6)), st.integers(0, 2**32 - 1))
def test_any_mix_of_rules(setups, rows, seed):
    logits = np.random.default_rng(seed).normal(size=(SLOTS, V)).astype(np.float32) * 4
    placed = [
        make_setup(
            row=row,
            tokens=s.token_ids,
            prompt_len=s.prompt_len,
            stop_ids=s.stop_token_ids,
            bad_words=s.bad_word_ids,
            **{n: getattr(s.sampling, n) for n in RULES},
        )
        for s, row in zip(setups, rows[:SLOTS], strict=True)
    ]
    check_against_oracle(logits, placed)


RULES = (
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
)


def test_order_bias_comes_before_repetition():
    """Bias turns a negative logit positive, so the penalty must divide it: 3 - not -1 * 2 + 4."""
    logits = np.full((1, V), -10.0, np.float32)
    logits[0, 5] = -1.0
    setup = make_setup(tokens=(5,), logit_bias={5: 4.0}, repetition_penalty=2.0)
    assert device_logits(logits, [setup])[0, 5] == pytest.approx(1.5)


def test_order_repetition_comes_before_frequency_and_presence():
    logits = np.full((1, V), -10.0, np.float32)
    logits[0, 5] = 8.0
    setup = make_setup(
        tokens=(1, 5, 5), prompt_len=1, repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.5
    )
    assert device_logits(logits, [setup])[0, 5] == pytest.approx(8 / 2 - 2 * 1.0 - 0.5)


def test_bias_does_not_lift_a_mask():
    logits = np.zeros((1, V), np.float32)
    setup = make_setup(
        tokens=(1,), logit_bias={7: 100.0, 8: 100.0, 9: 100.0}, allowed_token_ids=[3, 8, 9], bad_words=[(8,)],
        stop_ids=[9], min_tokens=1,
    )  # fmt: skip
    found = device_logits(logits, [setup])[0]
    assert [i for i in range(V) if found[i] > -np.inf] == [3]


def test_masks_that_leave_nothing_are_waived_but_never_the_allowed_ids():
    logits = np.arange(V, dtype=np.float32)[None]
    setup = make_setup(allowed_token_ids=[4, 6], bad_words=[(4,), (6,)])
    found = device_logits(logits, [setup])[0]
    assert [i for i in range(V) if found[i] > -np.inf] == [4, 6]


def test_bad_word_of_several_tokens_only_bans_its_end_and_only_after_generated_tokens():
    logits = np.zeros(V, np.float32)
    logits[[11, 12, 13]] = 9.0, 8.0, 7.0

    def greedy(tokens, prompt_len, word):
        setup = make_setup(tokens=tokens, prompt_len=prompt_len, temperature=0.0, bad_words=[word])
        return Rig(vocab_size=V).sample_one(setup, logits)

    assert greedy((1, 5, 6), 1, (5, 6, 11)) == 12
    assert greedy((1, 5, 6), 1, (6, 5, 11)) == 11
    assert greedy((1, 5, 6), 2, (5, 6, 11)) == 11, "the 5 stands in the prompt"
    long = tuple(range(20, 20 + MAX_BAD_WORD_LEN - 1))
    assert greedy((1, *long), 1, (*long, 11)) == 12
    assert greedy((1, 99, *long[1:]), 1, (*long, 11)) == 11


def test_min_tokens_holds_stop_ids_back_exactly_so_long():
    logits = np.zeros(V, np.float32)
    logits[[2, 30]] = 9.0, 8.0
    rig = Rig(vocab_size=V)
    rig.start(make_setup(tokens=(1, 1), temperature=0.0, min_tokens=3, stop_ids=(2,)))
    for _ in range(5):
        rig.step({0: logits})
    assert rig.tokens[0][2:] == [30, 30, 30, 2, 2]


FULL_OPTIONS = {
    "temperature": 0.9, "top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.4,
    "presence_penalty": 0.3, "logit_bias": {7: 2.0, 8: -3.0}, "allowed_token_ids": list(range(60)), "min_tokens": 6,
}  # fmt: skip
FULL_STATE = {"stop_ids": (0, 1, 2), "bad_words": ((3,), (4, 5), (5, 6, 7)), "seed": 2**63 - 17}


def run_with_oracle(rig, row, logits):
    """One step; asserts that the token is the winner of the oracle's race among the tokens the oracle keeps."""
    setup, before = rig.setups[row], list(rig.tokens[row])
    rig.step({row: logits})
    token = rig.tokens[row][-1]
    x = oracle_logits(logits, setup, before)
    if setup.sampling.temperature == 0:
        assert token == int(np.argmax(x))
        return
    arrivals = oracle_arrivals(x, setup, position=len(before))
    best = min(arrivals[i] for i in oracle_kept(x, setup.sampling))
    assert token in oracle_kept(x, setup.sampling, slack=1e-5)
    assert arrivals[token] <= best * (1 + 1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_many_steps_with_everything_on(temperature):
    rng = np.random.default_rng(5)
    rig = Rig(vocab_size=V)
    rig.start(make_setup(row=2, tokens=(9, 9, 3), **{**FULL_OPTIONS, "temperature": temperature}, **FULL_STATE))
    for _ in range(25):
        run_with_oracle(rig, 2, rng.normal(size=V).astype(np.float32) * 2)


def test_a_resumed_row_goes_on_as_if_never_preempted():
    logits = np.random.default_rng(6).normal(size=(16, V)).astype(np.float32) * 2
    options = {**FULL_OPTIONS, **FULL_STATE}
    whole, cut = Rig(vocab_size=V), Rig(vocab_size=V)
    whole.start(make_setup(row=0, tokens=(9, 9, 3), **options))
    cut.start(make_setup(row=1, tokens=(9, 9, 3), **options))
    for line in logits:
        whole.step({0: line})
    for line in logits[:7]:
        cut.step({1: line})
    cut.start(make_setup(row=4, tokens=cut.tokens[1], prompt_len=3, **options))
    for line in logits[7:]:
        cut.step({4: line})
    assert cut.tokens[4] == whole.tokens[0]
    assert len(set(whole.tokens[0])) > 5, "a constant sequence would prove nothing"


def test_a_plain_row_sees_nothing_of_the_one_before():
    logits = np.random.default_rng(7).normal(size=(6, V)).astype(np.float32)
    used, fresh = Rig(vocab_size=V), Rig(vocab_size=V)
    used.start(make_setup(**FULL_OPTIONS, **FULL_STATE))
    for line in logits:
        used.step({0: line})
    for rig in (used, fresh):
        rig.start(make_setup(tokens=(8, 8), seed=3))
        for line in logits:
            rig.step({0: line})
    assert used.tokens == fresh.tokens


def test_a_penalised_row_forgets_the_counts_of_the_one_before():
    logits = np.random.default_rng(8).normal(size=(6, V)).astype(np.float32)
    used, fresh = Rig(vocab_size=V), Rig(vocab_size=V)
    used.start(make_setup(temperature=0.0, frequency_penalty=2.0))
    for line in logits:
        used.step({0: line})
    for rig in (used, fresh):
        rig.start(make_setup(tokens=(8, 8), temperature=0.0, frequency_penalty=2.0))
        for line in logits:
            rig.step({0: line})
    assert used.tokens == fresh.tokens


def test_rows_that_are_not_sampled_change_nothing():
    rig = Rig(vocab_size=V)
    rig.start(make_setup(row=0, **FULL_OPTIONS, **FULL_STATE))
    rig.start(make_setup(row=1, tokens=(5,), temperature=0.0))
    before = jax.tree.map(np.asarray, rig.state)
    logits = np.random.default_rng(9).normal(size=V).astype(np.float32)
    rig.step({0: logits, 1: logits}, skip={0})
    after = jax.tree.map(np.asarray, rig.state)
    assert after.last_token[1] == np.argmax(logits)
    np.testing.assert_array_equal(np.delete(after.last_token, 1), np.delete(before.last_token, 1))
    np.testing.assert_array_equal(after.counts, before.counts)
    np.testing.assert_array_equal(after.recent[0], before.recent[0])


def test_counts_saturate():
    rig = Rig(vocab_size=V)
    rig.start(make_setup(tokens=(1,) + (5,) * (MAX_COUNT + 9), prompt_len=1, temperature=0.0, frequency_penalty=-1.0))
    assert rig.state.counts[0, 5] == MAX_COUNT
    rig.step({0: np.zeros(V, np.float32)})
    assert rig.tokens[0][-1] == 5
    assert rig.state.counts[0, 5] == MAX_COUNT


@pytest.mark.parametrize("vocab_size", [1, 32, 33])
def test_encoded_state_arrives_whole(vocab_size):
    rng = np.random.default_rng(vocab_size)
    tokens = tuple(int(i) for i in rng.integers(0, vocab_size, 40))
    allowed = [int(i) for i in rng.choice(vocab_size, size=(vocab_size + 1) // 2, replace=False)]
    setup = make_setup(
        row=1, tokens=tokens, prompt_len=9, allowed_token_ids=allowed, logit_bias={0: -2.5}, bad_words=[(0, 0)]
    )
    payload = encode_row_state(setup, vocab_size)
    assert payload.dtype == np.int32
    assert payload.shape == (row_state_size(vocab_size),)
    state = jit_configure(init_sampling_state(2, vocab_size), np.int32(1), payload)
    bits = np.unpackbits(np.asarray(state.allowed_mask).view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    np.testing.assert_array_equal(np.flatnonzero(bits[1]), sorted(allowed))
    np.testing.assert_array_equal(state.counts[1], np.bincount(tokens[9:], minlength=vocab_size))
    np.testing.assert_array_equal(state.recent[1], tokens[-state.recent.shape[1] :])
    assert (int(state.bias_ids[1, 0]), float(state.bias_values[1, 0])) == (0, -2.5)
    assert not np.any(bits[[0, 2]])
    assert not np.any(np.asarray(state.counts)[[0, 2]])


def test_scalars_of_a_row():
    row = encode_row(make_setup(seed=2**63 - 1, tokens=(1, 2, 3), top_k=5, temperature=0.25))
    assert row.dtype == np.int32
    assert row.shape == (NUM_ROW_FIELDS,)
    assert row.view(np.float32)[0] == 0.25
    assert row[1] == 5
    assert row[7:9].view(np.uint32).tolist() == [2**32 - 1, 2**31 - 1]
    assert row[9] == 3


@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, False),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "logprobs": 3, "seed": 4}, False),
        ({"min_tokens": 3}, False),  # without any stop id there is nothing to hold back
        ({"min_tokens": 3, "stop_ids": (2,)}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": {1: 1.0}}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"bad_words": [(1,)]}, True),
    ],
)
def test_who_needs_row_state(options, needed):
    assert needs_row_state(make_setup(**options)) is needed


def test_names_tested_here_are_real_options():
    assert set(RULES) <= {*SamplingParams.__slots__}
