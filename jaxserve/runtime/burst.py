"""Several decode steps in one launch: a loop on the device around the step.

Owns the loop, when a row has ended, and when all have. Refuses to choose how many steps (a scheduler does) and to hold
arrays (the runner does). What a step computes is `step`'s own code, so that a row draws the same tokens as in as many
launches: noise is keyed by seed and position, and counts, masks and last tokens advance in the state as they do there.

A row goes on as long as it has steps left and the token that it would feed has not ended it: a stop id, when more than
`min_tokens` have been drawn. That looks at nothing but the last token, so a row that an earlier launch ended, unknown
to the host when it planned this one, takes no step here.

A row that has stopped is computed on with the rows that have not, since shapes are fixed: it feeds the token that it
fed last at the same position, which writes what is there already. Nothing of it is kept.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxserve.api import MAX_LOGPROBS
from jaxserve.kernels.paged_attention import LayerCache, PagedAttention
from jaxserve.models.sharding import Shards
from jaxserve.runtime.pack import SAMPLE, Layout, StepInputs, unpack
from jaxserve.runtime.row_state import Field, SamplingState
from jaxserve.runtime.sampling import Logprobs
from jaxserve.runtime.step import DeviceState, attention_batch, sample_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class BurstOutput:
    """What a burst sends back: one array for the host, and log-probabilities for whoever asks.

    `drawn` holds a line of tokens for each step, and below them how many steps each row took.
    """

    drawn: Int[Array, "K+1 R"]
    logprobs: Logprobs  # each field with K in front


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Turn:
    """What goes from one turn of the loop to the next.

    Attributes:
      number: of the turn.
      next_lens: context_lens of the step that each row would take next.
      fed, fed_lens: the token and the context_lens of the step that each row took last.
      counts: steps that each row has taken.
      token_ids, logprobs: of all steps.
    """

    number: Int[Array, ""]
    next_lens: Int[Array, " R"]
    fed: Int[Array, " R"]
    fed_lens: Int[Array, " R"]
    counts: Int[Array, " R"]
    token_ids: Int[Array, "K R"]
    logprobs: Logprobs
    caches: tuple[LayerCache, ...]
    sampling: SamplingState


def make_burst(graphdef: nnx.GraphDef, layout: Layout, attention: PagedAttention, page_size: int, shards: Shards):
    """The function to compile for the bursts of one decode bucket, of a model in one stage. DONATES state.

    burst(weights, state, buffer, None) -> (BurstOutput, state)
    """
    assert layout.bucket.decode_only and layout.max_burst > 1, layout.bucket

    def burst(
        weights, state: DeviceState, buffer: Int[Array, " size"], carried: None
    ) -> tuple[BurstOutput, DeviceState]:
        assert state.sampling is not None and carried is None, "a burst runs on one stage"
        inputs = unpack(buffer, layout)
        block_tables = state.block_tables.at[inputs.grants[:, 0], inputs.grants[:, 1]].set(inputs.grants[:, 2])

        def going(turn: _Turn) -> Bool[Array, " R"]:
            return _may_go_on(inputs, turn.number, turn.next_lens, turn.sampling.last_token[inputs.rows])

        def goes_on(turn: _Turn) -> Bool[Array, ""]:
            return jnp.any(going(turn))

        def take_turn(turn: _Turn) -> _Turn:
            takes_part = going(turn)
            fed = jnp.where(takes_part, turn.sampling.last_token[inputs.rows], turn.fed)
            fed_lens = jnp.where(takes_part, turn.next_lens, turn.fed_lens)
            now = dataclasses.replace(
                inputs,
                context_lens=fed_lens,
                positions=jnp.maximum(fed_lens - 1, 0),
                wants=jnp.where(takes_part, SAMPLE, 0),
            )
            model = nnx.merge(graphdef, weights)
            batch = attention_batch(now, block_tables, layout, page_size)
            prompt_lens = inputs.params[:, Field.PROMPT_LEN]
            hidden, caches = model(fed, turn.caches, batch, attention, rope_lengths=prompt_lens)  # [R, D]
            output, sampling = sample_rows(model, hidden, now, layout, turn.sampling, shards)
            taken = takes_part.astype(jnp.int32)
            return _Turn(
                number=turn.number + 1,
                next_lens=turn.next_lens + taken,
                fed=fed,
                fed_lens=fed_lens,
                counts=turn.counts + taken,
                token_ids=turn.token_ids.at[turn.number].set(output.token_ids),
                logprobs=jax.tree.map(lambda all_, new: all_.at[turn.number].set(new), turn.logprobs, output.logprobs),
                caches=caches,
                sampling=sampling,
            )

        num_top = min(MAX_LOGPROBS, state.sampling.counts.shape[1] * shards.count)
        first = _first_turn(inputs, layout, state, num_top)
        last = lax.while_loop(goes_on, take_turn, first)
        output = BurstOutput(
            drawn=jnp.concatenate([last.token_ids, last.counts[None]]),
            logprobs=last.logprobs,
        )
        return output, DeviceState(caches=last.caches, block_tables=block_tables, sampling=last.sampling)

    return burst


def _may_go_on(
    inputs: StepInputs, number: Int[Array, ""], next_lens: Int[Array, " R"], last_tokens: Int[Array, " R"]
) -> Bool[Array, " R"]:
    """Rows that have steps left and have not ended."""
    assert inputs.row_steps is not None and inputs.stop_ids is not None, "no layout of a burst"
    num_drawn = next_lens - inputs.params[:, Field.PROMPT_LEN]
    is_stop = jnp.any(inputs.stop_ids == last_tokens[:, None], axis=1)
    has_ended = is_stop & (num_drawn > inputs.params[:, Field.MIN_TOKENS])
    return (number < inputs.row_steps) & ~has_ended


def _first_turn(inputs: StepInputs, layout: Layout, state: DeviceState, num_top: int) -> _Turn:
    """Before anything is drawn. A row that takes no step at all feeds what it drew last, like any wasted token."""
    assert state.sampling is not None
    steps, rows = layout.max_burst, layout.bucket.rows
    return _Turn(
        number=jnp.int32(0),
        next_lens=inputs.context_lens,
        fed=state.sampling.last_token[inputs.rows],
        fed_lens=inputs.context_lens,
        counts=jnp.zeros((rows,), jnp.int32),
        token_ids=jnp.zeros((steps, rows), jnp.int32),
        logprobs=Logprobs(
            logprob=jnp.zeros((steps, rows), jnp.float32),
            rank=jnp.zeros((steps, rows), jnp.int32),
            top_ids=jnp.zeros((steps, rows, num_top), jnp.int32),
            top_logprobs=jnp.zeros((steps, rows, num_top), jnp.float32),
        ),
        caches=state.caches,
        sampling=state.sampling,
    )
