"""The rule by which drafts are verified, on a model whose distribution is known: a table of logits by the last token.

The compiled rounds themselves run here, with 20,000 rows that differ in their seeds. Drafts made of the very noise that
the rows draw with must not change a distribution, and a rule of which it is known that they would (accept with
probability p / q, else draw from what is left) must be found out by the same tests.
"""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chisquare

from jaxserve.api import SamplingParams
from jaxserve.kernels.xla_attention import XLA_ATTENTION
from jaxserve.models.sharding import WHOLE
from jaxserve.runtime.drafter import FromTokens
from jaxserve.runtime.pack import Layout
from jaxserve.runtime.rounds import RoundsStep, Rows
from jaxserve.runtime.row_state import FROM_DEVICE, NUM_ROW_FIELDS, encode_row, init_sampling_state
from jaxserve.runtime.sampling_draw import draw
from jaxserve.sched.plan import Bucket, PageGroup, RowSetup

VOCAB, WIDTH, ROUNDS = 8, 4, 3
SEEDS, ROWS = 20_000, 2_000  # in all, and in one step
TARGET = np.random.default_rng(1).normal(0, 1.5, (VOCAB, VOCAB)).astype(np.float32)
DRAFT = TARGET + np.random.default_rng(2).normal(0, 1.2, (VOCAB, VOCAB)).astype(np.float32)
LEAST_P = 0.001
pytestmark = pytest.mark.slow  # what compiles here, the parity of engines with drafts compiles, too: tests/e2e


class TableModel:
    """As much of a decoder as rounds use: the logits after a token are a line of the table."""

    placement = SimpleNamespace(num_tokens=VOCAB)

    def with_taps(self, tokens, caches, batches, places, attention, rope_lengths, taps, pictures):
        return jax.nn.one_hot(tokens, VOCAB), caches, None

    def logits(self, hidden):
        return hidden @ TARGET


@dataclasses.dataclass(frozen=True)
class TableDrafter:
    """Drafts of another table: the likeliest tokens, or draws with the noise of the row itself."""

    coupled: bool

    def observe(self, state, rows, positions, tokens, known):
        last, params = state
        return last.at[jnp.where(known, rows, ROWS + 1)].set(tokens, mode="drop"), params

    def propose(self, state, rows, lengths, count):
        (last, params), drafts = state, []
        token = last[rows]
        for ahead in range(count):
            logits = jnp.asarray(DRAFT)[token]
            if self.coupled:
                everywhere = jnp.ones(rows.shape[0], bool)
                token = draw(logits, lengths + ahead, params, everywhere)
            else:
                token = jnp.argmax(logits, axis=1).astype(jnp.int32)
            drafts.append(token)
        return jnp.stack(drafts, axis=1)


def row_params() -> np.ndarray:
    setup = RowSetup(
        row=0, request_id="", index=0, seed=0, prompt_len=1, num_tokens=1, token_ids=(0,),
        sampling=SamplingParams(temperature=1.0), stop_token_ids=(), bad_word_ids=(),
    )  # fmt: skip
    seeds = np.random.default_rng(3).integers(0, 2**62, SEEDS)
    return np.stack([encode_row(dataclasses.replace(setup, seed=int(seed))) for seed in seeds])


@pytest.fixture(scope="module")
def params() -> np.ndarray:
    return row_params()


@pytest.fixture(scope="module")
def draws(params: np.ndarray) -> dict[bool, tuple[np.ndarray, float]]:
    """What `drawn` returns without and with the rows' own noise."""
    return {coupled: drawn(params, coupled) for coupled in (False, True)}


def drawn(params: np.ndarray, coupled: bool) -> tuple[np.ndarray, float]:
    """The first ROUNDS tokens [SEEDS, ROUNDS] after token 0, and the share of drafts that were accepted."""
    layout = Layout.of(
        Bucket(ROWS * WIDTH, ROWS, True, WIDTH, ROUNDS), max_rows=ROWS, num_params=NUM_ROW_FIELDS, page_size=16,
        num_groups=1,
    )  # fmt: skip
    step = RoundsStep(
        layout=layout, attention=XLA_ATTENTION, page_size=16, shards=WHOLE, groups=(PageGroup(),), places=(),
        drafter=FromTokens(TableDrafter(coupled)),
    )  # fmt: skip
    run = jax.jit(
        lambda buffer, rows: step.run(TableModel(), buffer, jnp.zeros((ROWS + 1, 4), jnp.int32), rows, None)[0]
    )
    found = [take(run, layout, part) for part in params.reshape(-1, ROWS, NUM_ROW_FIELDS)]
    return np.concatenate([tokens for tokens, _ in found]), float(np.mean([share for _, share in found]))


def take(run, layout: Layout, params: np.ndarray) -> tuple[np.ndarray, float]:
    """The first ROUNDS tokens [ROWS, ROUNDS] of a step of these rows, and the share of drafts that were accepted."""
    buffer = np.zeros(layout.size, np.int32)
    view = layout.views(buffer)
    view["rows"][:] = np.arange(ROWS)
    view["room"][:], view["rounds"][0], view["stops"][:], view["params"][:] = WIDTH * ROUNDS, ROUNDS, VOCAB, params
    view["grants"][:, 0], view["drafts"][:] = ROWS, FROM_DEVICE
    rows = Rows(
        caches=(),
        length=jnp.ones(ROWS + 1, jnp.int32),
        sampling=init_sampling_state(ROWS, VOCAB),
        drafter=(jnp.zeros(ROWS + 1, jnp.int32), jnp.asarray(params)),
    )
    output = jax.tree.map(np.asarray, run(buffer, rows))
    tokens = np.full((ROWS, WIDTH * ROUNDS), -1)
    filled = np.zeros(ROWS, np.int64)
    for ids, accepted in zip(output.token_ids, output.accepted, strict=True):
        for place in range(WIDTH):
            has = accepted >= place
            tokens[has, filled[has]] = ids[has, place]
            filled[has] += 1
    assert (filled >= ROUNDS).all() and output.drafted.sum() == ROWS * ROUNDS * (WIDTH - 1)
    return tokens[:, :ROUNDS], float(output.accepted.sum() / output.drafted.sum())


def least_p(tokens: np.ndarray) -> float:
    """The smallest p-value of the chi-square tests of each place and each pair of places that follow each other."""
    weights = np.exp(TARGET.astype(np.float64))
    step = weights / weights.sum(axis=1, keepdims=True)
    at, found = np.eye(VOCAB)[0], []
    for place in range(tokens.shape[1]):
        before, at = at, at @ step
        counts = np.bincount(tokens[:, place], minlength=VOCAB)
        found.append(chisquare(counts, at * len(tokens)).pvalue)
        if place:
            pairs = np.bincount(tokens[:, place - 1] * VOCAB + tokens[:, place], minlength=VOCAB**2)
            expected = (before[:, None] * step).reshape(-1) * len(tokens)
            common = expected >= 5  # the test is about counts that are not too small
            left = [pairs[~common].sum()], [expected[~common].sum()]
            found.append(chisquare([*pairs[common], *left[0]], [*expected[common], *left[1]]).pvalue)
    return min(found)


@pytest.mark.parametrize("coupled", [False, True], ids=["likeliest tokens", "the rows' own noise"])
def test_tokens_have_the_distribution_of_the_model(draws: dict[bool, tuple[np.ndarray, float]], coupled: bool) -> None:
    tokens, share = draws[coupled]
    assert least_p(tokens) > LEAST_P
    assert share > (0.3 if coupled else 0.1), share


def test_drafts_of_the_same_noise_are_accepted_more_often(draws: dict[bool, tuple[np.ndarray, float]]) -> None:
    (plain, few), (coupled, many) = draws[False], draws[True]
    np.testing.assert_array_equal(plain, coupled)
    assert many > 1.3 * few, (few, many)


def test_a_rule_that_is_wrong_with_this_noise_is_found_out(params: np.ndarray) -> None:
    """Accept a draft x of q with probability p(x) / q(x), else draw from max(p - q, 0), all with the row's noise."""
    everywhere, last, tokens = jnp.ones(SEEDS, bool), jnp.zeros(SEEDS, jnp.int32), []
    line = jnp.arange(SEEDS)
    coins = np.random.default_rng(4).random((ROUNDS, SEEDS))
    for place in range(ROUNDS):
        positions = jnp.full(SEEDS, 2 + place)
        p, q = (jax.nn.softmax(jnp.asarray(table)[last]) for table in (TARGET, DRAFT))
        draft = draw(jnp.log(q), positions, jnp.asarray(params), everywhere)
        rest = draw(jnp.log(jnp.maximum(p - q, 1e-30)), positions, jnp.asarray(params), everywhere)
        last = jnp.where(coins[place] < (p / q)[line, draft], draft, rest)
        tokens.append(np.asarray(last))
    assert least_p(np.stack(tokens, axis=1)) < 1e-3 * LEAST_P
