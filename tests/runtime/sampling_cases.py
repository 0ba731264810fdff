"""An independent sampler in plain Python and float64, one row at a time, and a way to run the real one.

The oracle follows the words of vLLM's documentation; it sorts where the engine bisects, and matches bad words on
Python lists where the engine keeps slots. Its noise is JAX's own threefry.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry_2x32

from jaxserve.api import SamplingParams
from jaxserve.runtime.row_state import (
    configure_row,
    encode_row,
    encode_row_state,
    init_sampling_state,
    needs_row_state,
)
from jaxserve.runtime.sampling import sample
from jaxserve.sched.plan import RowSetup

jit_configure = jax.jit(configure_row, donate_argnums=0)
jit_sample = jax.jit(sample, donate_argnums=5)


def make_setup(row=0, tokens=(1, 2, 3), prompt_len=None, seed=1, stop_ids=(), bad_words=(), **options) -> RowSetup:
    return RowSetup(
        row=row,
        request_id=f"request {row}",
        index=0,
        seed=seed,
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        num_tokens=len(tokens),
        token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=None, **options),
        stop_token_ids=tuple(stop_ids),
        bad_word_ids=tuple(tuple(w) for w in bad_words),
    )


@dataclasses.dataclass
class Rig:
    """A state on the device, and rows that know their tokens on the host. Mutable: it stands for a scheduler."""

    vocab_size: int
    max_rows: int = 6

    def __post_init__(self):
        self.state = init_sampling_state(self.max_rows, self.vocab_size)
        self.setups: dict[int, RowSetup] = {}
        self.tokens: dict[int, list[int]] = {}

    def start(self, setup: RowSetup) -> None:
        self.setups[setup.row] = setup
        self.tokens[setup.row] = list(setup.token_ids)
        if needs_row_state(setup):
            payload = encode_row_state(setup, self.vocab_size)
            self.state = jit_configure(self.state, jnp.int32(setup.row), payload)

    def step(self, logits_by_row: dict[int, np.ndarray], num_slots: int | None = None, skip=()):
        """Samples rows in the order of the dict, padded to `num_slots`; rows in `skip` are in the batch unsampled.

        The default pads to all rows: one shape for most tests, since compiling is what they would wait for.
        """
        rows = list(logits_by_row)
        num_slots = num_slots or self.max_rows
        logits = np.zeros((num_slots, self.vocab_size), np.float32)
        slot_rows = np.full(num_slots, self.max_rows, np.int32)
        params = np.zeros((num_slots, 12), np.int32)
        lens, should = np.zeros(num_slots, np.int32), np.zeros(num_slots, bool)
        for slot, row in enumerate(rows):
            logits[slot] = logits_by_row[row]
            slot_rows[slot], params[slot] = row, encode_row(self.setups[row])
            lens[slot], should[slot] = len(self.tokens[row]), row not in skip
        output, self.state = jit_sample(logits, slot_rows, lens, params, should, self.state)
        output = jax.tree.map(np.asarray, output)
        for slot, row in enumerate(rows):
            if should[slot]:
                self.tokens[row].append(int(output.token_ids[slot]))
        return output

    def sample_one(self, setup: RowSetup, logits: np.ndarray) -> int:
        self.start(setup)
        self.step({setup.row: logits})
        return self.tokens[setup.row][-1]


def oracle_logits(logits: np.ndarray, setup: RowSetup, tokens: list[int]) -> np.ndarray:
    """Processed logits [V] in float64, given the sequence so far."""
    options, x = setup.sampling, logits.astype(np.float64).copy()
    prompt, output = tokens[: setup.prompt_len], tokens[setup.prompt_len :]
    if options.allowed_token_ids is not None:
        x[[i for i in range(len(x)) if i not in options.allowed_token_ids]] = -np.inf
    only_allowed = x.copy()
    for word in setup.bad_word_ids:
        begin = list(word[:-1])
        if len(begin) <= len(output) and output[len(output) - len(begin) :] == begin:
            x[word[-1]] = -np.inf
    if len(output) < options.min_tokens:
        x[list(setup.stop_token_ids)] = -np.inf
    if np.all(x == -np.inf):
        x = only_allowed
    for token, bias in (options.logit_bias or {}).items():
        x[token] += bias
    for token in set(prompt) | set(output):
        if x[token] > 0:
            x[token] /= options.repetition_penalty
        else:
            x[token] *= options.repetition_penalty
    for token in set(output):
        x[token] -= options.frequency_penalty * output.count(token)
        x[token] -= options.presence_penalty
    return x


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max())
    return e / e.sum()


def oracle_kept(x: np.ndarray, options: SamplingParams, slack: float = 0.0) -> set[int]:
    """Tokens that may be drawn from processed logits [V], by sorting. Ties are kept."""
    kept = [int(i) for i in np.argsort(-x, kind="stable") if x[i] > -np.inf]
    p = softmax(x / options.temperature)
    kept = [i for i in kept if p[i] >= options.min_p * p.max() * (1 - slack)]
    if options.top_k:
        kept = [i for i in kept if x[i] >= x[kept[: options.top_k][-1]]]
    if options.top_p < 1:
        mass, target = 0.0, options.top_p * sum(p[i] for i in kept) * (1 + slack)
        for n, i in enumerate(kept):
            mass += p[i]
            if mass >= target:
                kept = [j for j in kept if x[j] >= x[kept[n]]]
                break
    return set(kept)


def oracle_arrivals(x: np.ndarray, setup: RowSetup, position: int) -> np.ndarray:
    """E / p of each token: the race that a draw is, in float64."""
    vocab_size = len(x)
    key = jnp.array([setup.seed % 2**32, setup.seed // 2**32], jnp.uint32)
    # An even count [2 n] is taken as n first and n second words.
    counter = jnp.concatenate([jnp.arange(vocab_size), jnp.full(vocab_size, position)]).astype(jnp.uint32)
    words = np.asarray(threefry_2x32(key, counter)).reshape(2, vocab_size)
    u = ((words[0] ^ words[1]).astype(np.float64) + 0.5) * 2.0**-32
    with np.errstate(divide="ignore"):
        return -np.log1p(-u) / softmax(x / setup.sampling.temperature)
