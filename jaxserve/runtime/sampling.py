"""From logits to tokens, and to log-probabilities, all on the device and all in one compiled function.

The stages follow each other here: `sampling_rules` changes logits, `sampling_draw` draws, and `SamplingState` is
updated.

Every pass over [R, V] stands behind `lax.cond`, so that one executable serves every mix of options and a batch pays
only for the options of its own rows. On two CPU cores that did other work too, best of 15, R = 16, V = 32000: all rows
greedy about 0.25 ms, at a temperature 2.3, with top_k and top_p 4.8, every option on and log-probabilities too 8.4
(`scripts/bench_sampling.py` measures again).
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.api import MAX_LOGPROBS
from jaxserve.kernels.row_sum import row_sum
from jaxserve.models.sharding import WHOLE, Shards
from jaxserve.runtime.row_state import HEAVY, MAX_COUNT, Field, Flag, SamplingState
from jaxserve.runtime.sampling_draw import MIN_TEMPERATURE, draw
from jaxserve.runtime.sampling_reduce import first_argmax, top_values
from jaxserve.runtime.sampling_rules import apply_rules, effective_flags, float_field

PROMPT_BLOCK = 64  # prompt tokens whose [block, V] logits exist at once


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Logprobs:
    """Natural log-probabilities of N chosen tokens, from raw logits; lines that were not asked for are unspecified.

    `rank` is 1 + the number of tokens with a strictly larger logit. `top_ids` are the min(20, V) most likely, the
    lowest id first among equals.
    """

    logprob: Float[Array, " N"]
    rank: Int[Array, " N"]
    top_ids: Int[Array, "N 20"]
    top_logprobs: Float[Array, "N 20"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleOutput:
    """One token per row. Rows that were not to be sampled hold an unspecified id inside the vocabulary."""

    token_ids: Int[Array, " R"]
    logprobs: Logprobs


def sample(
    logits: Float[Array, "R V"],
    rows: Int[Array, " R"],
    context_lens: Int[Array, " R"],
    params: Int[Array, "R F"],
    should_sample: Bool[Array, " R"],
    state: SamplingState,
    shards: Shards = WHOLE,
) -> tuple[SampleOutput, SamplingState]:
    """One token for each row that has `should_sample`, and the state with it written down. Donate `state`.

    Arguments as for `choose_tokens`; no two sampled rows are equal.
    """
    drawn = choose_tokens(logits, rows, context_lens, params, should_sample, state, shards)
    counts = should_sample.astype(jnp.int32)
    return drawn, write_tokens(state, rows, drawn.token_ids[:, None], counts, params, shards)


def choose_tokens(
    logits: Float[Array, "R V"],
    rows: Int[Array, " R"],
    context_lens: Int[Array, " R"],
    params: Int[Array, "R F"],
    should_sample: Bool[Array, " R"],
    state: SamplingState,
    shards: Shards = WHOLE,
    ahead: Int[Array, "R ahead"] | None = None,
    mask_places: Int[Array, " R"] | int = 0,
) -> SampleOutput:
    """One token for each line that has `should_sample`; `state` is only read.

    Args:
      logits: raw, of the last token of each line; of this device's part of the vocabulary, like the state's counts and
        masks. Devices exchange a few numbers per line, never logits.
      rows: row of the engine; that of padding is the last of the state.
      context_lens: tokens of the sequence before the new one, which is the new one's position.
      params: `encode_row` of each row; zeros for padding.
      ahead: tokens that precede the new one and that `state` does not know yet, at the front of each line, and NO_TOKEN
        behind them; None: there are none anywhere.
      mask_places: which of its row's masks each line draws under.

    A line's token depends on its own logits, parameters, state and position, on nothing else of the batch. NaN logits
    count as -inf; a line without any other gives token 0.
    """
    logits = logits.astype(jnp.float32)
    flags = effective_flags(params, context_lens, should_sample)
    drawing = should_sample & (float_field(params, Field.TEMPERATURE) >= MIN_TEMPERATURE)
    heavy = jnp.any(flags & int(HEAVY) != 0)

    def greedy_tokens(logits):
        return first_argmax(logits, shards)

    def processed(logits):
        logits = lax.cond(
            heavy,
            lambda x: apply_rules(x, rows, context_lens, params, flags, state, shards, ahead, mask_places),
            lambda x: x,
            logits,
        )
        drawn = lax.cond(
            jnp.any(drawing),
            lambda x: draw(x, context_lens, params, drawing, shards),
            lambda x: jnp.zeros_like(context_lens),
            logits,
        )
        greedy = lax.cond(
            jnp.all(drawing | ~should_sample), lambda x: jnp.zeros_like(context_lens), greedy_tokens, logits
        )
        return jnp.where(drawing, drawn, greedy)

    token_ids = lax.cond(heavy | jnp.any(drawing), processed, greedy_tokens, logits)
    asked = flags & int(Flag.LOGPROBS) != 0
    logprobs = lax.cond(
        jnp.any(asked),
        lambda logits: _logprobs(logits, token_ids, shards),
        lambda logits: _no_logprobs(logits.shape[0], logits.shape[1] * shards.count),
        logits,
    )
    return SampleOutput(token_ids=token_ids, logprobs=logprobs)


def prompt_logprobs(
    hidden: Float[Array, "T D"],
    targets: Int[Array, " T"],
    compute_logits: Callable[[Float[Array, "block D"]], Float[Array, "block V"]],
    shards: Shards = WHOLE,
) -> Logprobs:
    """Log-probabilities of the token that follows each prompt token; `targets` is -1 where none is asked for.

    `hidden` is what `compute_logits` takes. Blocks of PROMPT_BLOCK tokens keep [T, V] from ever existing; a block
    without a target costs nothing.
    """
    num_tokens = hidden.shape[0]
    block = min(PROMPT_BLOCK, num_tokens)
    padding = -num_tokens % block
    vocab_size = jax.eval_shape(compute_logits, hidden[:block]).shape[1] * shards.count

    def one_block(hidden, targets):
        return lax.cond(
            jnp.any(targets >= 0),
            lambda: _logprobs(compute_logits(hidden), targets, shards),
            lambda: _no_logprobs(block, vocab_size),
        )

    def all_blocks():
        blocks = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
        wanted = jnp.pad(targets, (0, padding), constant_values=-1).reshape(-1, block)
        # XLA makes a slice whose place follows from the loop's counter a thunk that no CUDA graph takes, and then the
        # host drives the loop. Read from data, the number of the block is a value like any other.
        numbers = lax.optimization_barrier(jnp.arange(blocks.shape[0]))

        def add_block(turn, found):
            number = numbers[turn]
            part = one_block(blocks[number], wanted[number])
            return jax.tree.map(lambda whole, part: whole.at[number].set(part), found, part)

        nothing = _no_logprobs(blocks.shape[0] * block, vocab_size)
        empty = jax.tree.map(lambda x: x.reshape(-1, block, *x.shape[1:]), nothing)
        found = lax.fori_loop(0, blocks.shape[0], add_block, empty)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[:num_tokens], found)

    return lax.cond(jnp.any(targets >= 0), all_blocks, lambda: _no_logprobs(num_tokens, vocab_size))


def _logprobs(logits: Float[Array, "N V"], token_ids: Int[Array, " N"], shards: Shards) -> Logprobs:
    # NaN and +inf of a broken model must not make NaN of the whole row: clients get these as JSON numbers.
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, jnp.minimum(logits, jnp.finfo(jnp.float32).max))
    # A masked maximum instead of a gather: it needs no communication of logits that are spread over devices.
    index = lax.broadcasted_iota(jnp.int32, logits.shape, 1) + shards.start(logits.shape[1])
    chosen = shards.max(jnp.max(jnp.where(index == token_ids[:, None], logits, -jnp.inf), axis=1))
    norm = jnp.maximum(_logsumexp(logits, shards), jnp.finfo(jnp.float32).min)  # a row of -inf stays -inf
    top, top_ids = top_values(logits, min(MAX_LOGPROBS, logits.shape[1] * shards.count), shards)
    return Logprobs(
        logprob=chosen - norm,
        rank=1 + shards.sum(jnp.sum(logits > chosen[:, None], axis=1, dtype=jnp.int32)),
        top_ids=top_ids,
        top_logprobs=top - norm[:, None],
    )


def _logsumexp(logits: Float[Array, "N V"], shards: Shards) -> Float[Array, " N"]:
    top = jnp.max(logits, axis=1)
    top = jnp.where(top > -jnp.inf, top, 0.0)  # of a row of -inf: -inf - -inf would be NaN
    local = top + jnp.log(row_sum(jnp.exp(logits - top[:, None])))
    if shards.count == 1:
        return local
    largest = jnp.maximum(shards.max(local), jnp.finfo(jnp.float32).min)  # -inf - -inf would be NaN
    return largest + jnp.log(shards.sum(jnp.exp(local - largest)))


def _no_logprobs(num_lines: int, vocab_size: int) -> Logprobs:
    width = min(MAX_LOGPROBS, vocab_size)
    return Logprobs(
        logprob=jnp.zeros((num_lines,), jnp.float32),
        rank=jnp.zeros((num_lines,), jnp.int32),
        top_ids=jnp.zeros((num_lines, width), jnp.int32),
        top_logprobs=jnp.zeros((num_lines, width), jnp.float32),
    )


def write_tokens(
    state: SamplingState,
    rows: Int[Array, " R"],
    token_ids: Int[Array, "R W"],
    num_tokens: Int[Array, " R"],
    params: Int[Array, "R F"],
    shards: Shards = WHOLE,
) -> SamplingState:
    """The state once each row has the first `num_tokens` of its `token_ids`; rows with none keep theirs.

    Scatters of an entry for each token, so that the donated state is updated in place whatever its size. No two rows
    with tokens are equal.
    """
    nowhere, width = state.last_token.shape[0], token_ids.shape[1]
    written = jnp.where(num_tokens > 0, rows, nowhere)
    last = jnp.take_along_axis(token_ids, jnp.maximum(num_tokens - 1, 0)[:, None], axis=1)[:, 0]
    place = num_tokens[:, None] + jnp.arange(state.recent.shape[1])
    recent = jnp.take_along_axis(jnp.concatenate([state.recent[rows], token_ids], axis=1), place, axis=1)
    penalised = params[:, Field.FLAGS] & int(Flag.PENALTY) != 0
    counts = state.counts
    for at in range(width):  # one after the other: a row may draw a token twice
        counted = jnp.where(penalised & (at < num_tokens), rows, nowhere)
        local_ids = shards.local_ids(token_ids[:, at], counts.shape[1])
        seen = counts.at[rows, local_ids].get(mode="fill", fill_value=0)
        count = jnp.minimum(seen.astype(jnp.int32) + 1, MAX_COUNT).astype(jnp.int16)
        counts = counts.at[counted, local_ids].set(count, mode="drop")
    return dataclasses.replace(
        state,
        last_token=state.last_token.at[written].set(last, mode="drop"),
        recent=state.recent.at[written].set(recent, mode="drop"),
        counts=counts,
    )
