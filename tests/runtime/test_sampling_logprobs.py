"""Log-probabilities of drawn and of prompt tokens against float64, and what they must not cost."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from sampling_cases import Rig, jit_sample, make_setup

from jaxserve.runtime.row_state import NUM_ROW_FIELDS, encode_row, init_sampling_state
from jaxserve.runtime.sampling import prompt_logprobs, sample

V = 100


def log_softmax(logits):
    x = np.asarray(logits, np.float64)
    shifted = x - x.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def check_line(found, line, token_ids, logits):
    want = log_softmax(logits)
    token = token_ids[line]
    assert found.logprob[line] == pytest.approx(want[token], abs=1e-4)
    assert found.rank[line] == 1 + np.sum(want > want[token])
    order = np.argsort(-want, kind="stable")[: found.top_ids.shape[1]]
    np.testing.assert_array_equal(found.top_ids[line], order)
    np.testing.assert_allclose(found.top_logprobs[line], want[order], atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_logprobs_are_those_of_the_raw_logits(temperature):
    rng = np.random.default_rng(1)
    rig = Rig(vocab_size=V)
    logits = {row: rng.normal(size=V).astype(np.float32) * 3 for row in range(3)}
    processed = {"logit_bias": {7: 30.0}, "frequency_penalty": 1.0, "top_k": 3, "allowed_token_ids": [7, 8, 9]}
    rig.start(make_setup(row=0, temperature=temperature, logprobs=5))
    rig.start(make_setup(row=1, temperature=temperature, logprobs=0, **processed))
    rig.start(make_setup(row=2, temperature=temperature, seed=3, logprobs=20))
    output = rig.step(logits)
    assert output.token_ids[1] in (7, 8, 9)
    for row in range(3):
        check_line(output.logprobs, row, output.token_ids, logits[row])


def test_rank_counts_strictly_larger_logits_only():
    logits = np.zeros(V, np.float32)
    logits[[3, 4, 5]] = 2.0, 1.0, 1.0
    rig = Rig(vocab_size=V)
    for forced, rank in ((3, 1), (4, 2), (5, 2), (6, 4)):
        rig.start(make_setup(allowed_token_ids=[forced], temperature=0.0, logprobs=1))
        assert rig.step({0: logits}).logprobs.rank[0] == rank


def test_a_vocabulary_smaller_than_the_number_of_alternatives():
    rig = Rig(vocab_size=6)
    rig.start(make_setup(logprobs=20))
    logits = np.arange(6, dtype=np.float32)
    output = rig.step({0: logits})
    assert output.logprobs.top_ids[0].tolist() == [5, 4, 3, 2, 1, 0]
    check_line(output.logprobs, 0, output.token_ids, logits)


def head(weight, calls=None):
    def compute_logits(hidden):
        if calls is not None:
            jax.debug.callback(lambda: calls.append(1))
        return hidden @ weight

    return compute_logits


@pytest.mark.parametrize("num_tokens", [1, 64, 65])
def test_prompt_logprobs(num_tokens):
    rng = np.random.default_rng(num_tokens)
    hidden = rng.normal(size=(num_tokens, 16)).astype(np.float32)
    weight = rng.normal(size=(16, V)).astype(np.float32)
    targets = rng.integers(0, V, num_tokens).astype(np.int32)
    targets[1::3] = -1
    found = jax.jit(lambda h, t: prompt_logprobs(h, t, head(weight)))(hidden, targets)
    found = jax.tree.map(np.asarray, found)
    assert found.logprob.shape == (num_tokens,)
    for line in np.flatnonzero(targets >= 0):
        check_line(found, line, targets, (hidden[line] @ weight))


def test_prompt_logprobs_compute_only_blocks_that_are_asked_for():
    calls: list[int] = []
    weight = np.ones((16, V), np.float32)
    compute = jax.jit(lambda h, t: prompt_logprobs(h, t, head(weight, calls)))
    for asked, blocks in (([], 0), ([70], 1), ([0, 63], 1), ([5, 199], 2)):
        targets = np.full(200, -1, np.int32)
        targets[asked] = 3
        calls.clear()
        jax.block_until_ready(compute(np.ones((200, 16)), targets))
        jax.effects_barrier()
        assert len(calls) == blocks, asked


def test_prompt_logprobs_never_make_all_logits():
    compiled = jax.jit(lambda h, t, w: prompt_logprobs(h, t, head(w))).lower(
        jax.ShapeDtypeStruct((1024, 16), jnp.float32),
        jax.ShapeDtypeStruct((1024,), jnp.int32),
        jax.ShapeDtypeStruct((16, 5003), jnp.float32),
    )
    compiled = compiled.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1024 * 5003 * 4 / 2
    assert not re.search(r"\[(1024|16,64),5003\]", compiled.as_text())


def sample_arguments(num_rows, vocab_size, **options):
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(num_rows, vocab_size)).astype(np.float32),
        np.arange(num_rows, dtype=np.int32),
        np.full(num_rows, 3, np.int32),
        np.stack([encode_row(make_setup(seed=i, **options)) for i in range(num_rows)]),
        np.ones(num_rows, bool),
    )


def test_the_state_is_updated_in_place_and_a_plain_greedy_batch_leaves_everything_else_out():
    """Only conditionals may hold the costly stages: the entry of the program itself touches [R, V] in no loop."""
    state = init_sampling_state(8, V)
    arguments = (*sample_arguments(4, V), state)
    compiled = jax.jit(sample, donate_argnums=5).lower(*arguments).compile()
    state_bytes = sum(x.nbytes for x in jax.tree.leaves(state))
    assert compiled.memory_analysis().alias_size_in_bytes >= state_bytes
    text = compiled.as_text()
    assert not re.findall(rf"s16\[9,{V}\]\S* copy\(", text)
    entry = text[text.index("ENTRY") :]
    assert " conditional(" in entry
    assert not re.search(r" (while|sort|exponential)\(", entry)


@pytest.mark.slow
def test_logits_spread_over_devices_give_the_same_and_are_not_gathered():
    num_rows, vocab_size = 4, 32768
    state = init_sampling_state(8, vocab_size)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("model",))
    spread = NamedSharding(mesh, PartitionSpec(None, "model"))
    shardings = (spread, *[NamedSharding(mesh, PartitionSpec())] * 5)
    whole, shared = None, None
    for options in (
        {"temperature": 0.0},
        {"top_k": 40, "top_p": 0.9, "logprobs": 2},
        {"min_p": 0.1, "temperature": 0.8},
    ):
        arguments = sample_arguments(num_rows, vocab_size, **options)
        placed = jax.device_put((*arguments, state), shardings)
        whole = whole or jax.jit(sample).lower(*arguments, state).compile()
        shared = shared or jax.jit(sample).lower(*placed).compile()
        want, found = whole(*arguments, state)[0], shared(*placed)[0]
        np.testing.assert_array_equal(found.token_ids, want.token_ids)
        np.testing.assert_array_equal(found.logprobs.top_ids, want.logprobs.top_ids)
        np.testing.assert_allclose(found.logprobs.logprob, want.logprobs.logprob, atol=1e-5)
    gathers = re.findall(r"= \(?f32\[([\d,]+)\]\S* all-gather", shared.as_text())
    sizes = [math.prod(int(n) for n in shape.split(",")) for shape in gathers]
    assert all(size < num_rows * vocab_size for size in sizes), gathers


def test_padding_is_a_line_of_zeros():
    """In the shape of the rig, whose program there is."""
    state = jax.tree.map(np.asarray, init_sampling_state(6, V))
    logits, lens = np.ones((6, V), np.float32), np.zeros(6, np.int32)
    rows, params = np.full(6, 6, np.int32), np.zeros((6, NUM_ROW_FIELDS), np.int32)
    output, after = jit_sample(logits, rows, lens, params, np.zeros(6, bool), jax.tree.map(jnp.asarray, state))
    assert np.all((np.asarray(output.token_ids) >= 0) & (np.asarray(output.token_ids) < V))
    for before, now in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(before, now)
