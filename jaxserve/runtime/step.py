"""The fused step: everything between a packed buffer and the sampled tokens, in one compiled function per bucket.

`DeviceState` and the compiled functions are here; the runner holds the arrays. The code is written for the arrays of
one device, and says through `Shards` where devices add something up. One function, since every further launch costs
host time and a compile per shape: embedding, layers, paged attention, the logits of the rows that need them, sampling
and the scatter of the drawn tokens all happen here. A stage of a pipeline has the part of it that its layers need: the
first looks tokens up, the last samples.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxserve.api import NOT_FINITE
from jaxserve.kernels.paged_attention import AttentionBatch, LayerCache, PagedAttention
from jaxserve.models.adapters.slots import Slots
from jaxserve.models.decoder import CachePlace, Decoder
from jaxserve.models.sharding import Shards
from jaxserve.runtime import row_state
from jaxserve.runtime.adapters import step_adapters
from jaxserve.runtime.attention_batches import attention_batches
from jaxserve.runtime.drafter import Body, Drafter, Fed
from jaxserve.runtime.drafting import DrafterState, LearnsFromAnswers
from jaxserve.runtime.pack import Layout, StepInputs, unpack
from jaxserve.runtime.picture_inputs import picture_inputs
from jaxserve.runtime.rounds import RoundsStep, Rows
from jaxserve.runtime.row_state import FROM_DEVICE, Field, SamplingState
from jaxserve.runtime.sampling import prompt_logprobs, sample
from jaxserve.runtime.step_output import StepOutput
from jaxserve.sched.plan import PageGroup

# The values that a stage passes on: hidden states [T, D]. The first takes the last tokens [R+1] from the last one; in a
# pipeline of one stage they are in its own state, and nothing is carried.
Carried = Float[Array, "T D"] | Int[Array, " R+1"] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceState:
    """The arrays on the devices of a stage that outlive a step. DONATED to every compiled function and returned.

    Attributes:
      caches: KV pages, one entry for each slot of the stage (`page_groups`).
      block_tables: page ids of every device row, in each of G groups of layers: line g * (R + 1) + r is row r's in
        group g (`pack.table_line`); row max_rows belongs to padding.
      length: tokens that each device row has in its pages. Each stage of a pipeline counts for itself.
      sampling: last tokens, counts and masks of every device row; None in all stages but the last.
      drafter: what drafts are made from; empty where none are made.
      embeddings: the pool of those of pictures; None in models that take none.
      adapters: the slots of LoRA adapters; None in engines that take none.
    """

    caches: tuple[LayerCache, ...]
    block_tables: Int[Array, "G*R+G P"]
    length: Int[Array, " R+1"]
    sampling: SamplingState | None
    drafter: DrafterState = ()
    embeddings: Float[Array, "S D"] | None = None
    adapters: Slots | None = None


def make_step(
    graphdef: nnx.GraphDef,
    layout: Layout,
    attention: PagedAttention,
    page_size: int,
    shards: Shards,
    groups: Sequence[PageGroup],
    places: Sequence[CachePlace],
    drafter: Drafter | None,
):
    """The function to compile for one bucket and stage, whose layers have their keys and values at `places`.
    DONATES state.

    step(weights, state, buffer, carried) -> (StepOutput of the last stage, hidden states [T, D] of others; state)
    `drafter` is None where none is there.
    """
    if not layout.bucket.plain:
        assert drafter is not None, layout.bucket
        rounds = RoundsStep(
            layout=layout,
            attention=attention,
            page_size=page_size,
            shards=shards,
            groups=groups,
            places=places,
            drafter=drafter,
        )

        def several(
            weights, state: DeviceState, buffer: Int[Array, " size"], carried: Carried
        ) -> tuple[StepOutput, DeviceState]:
            assert state.sampling is not None, "a pipeline has one round of one token"
            output, tables, rows = rounds.run(
                nnx.merge(graphdef, weights),
                buffer,
                state.block_tables,
                Rows(caches=state.caches, length=state.length, sampling=state.sampling, drafter=state.drafter),
                state.embeddings,
                state.adapters,
            )
            return output, DeviceState(
                caches=rows.caches,
                block_tables=tables,
                length=rows.length,
                sampling=rows.sampling,
                drafter=rows.drafter,
                embeddings=state.embeddings,
                adapters=state.adapters,
            )

        return several

    def step(
        weights, state: DeviceState, buffer: Int[Array, " size"], carried: Carried
    ) -> tuple[StepOutput | Float[Array, "T D"], DeviceState]:
        inputs = unpack(buffer, layout, state.length)
        model = nnx.merge(graphdef, weights)
        block_tables = state.block_tables.at[inputs.grants[:, 0], inputs.grants[:, 1]].set(inputs.grants[:, 2])
        length = state.length.at[inputs.rows].set(inputs.context_lens)
        # Dynamic rope scaling is stretched for this length; and tokens behind it are those that may choose pages.
        prompt_lens = inputs.params[:, Field.PROMPT_LEN]
        lens = prompt_lens if attention.selects else None
        batches = attention_batches(inputs, block_tables, layout, page_size, groups, lens)
        begin = carried
        if model.is_first:
            last_token = carried if state.sampling is None else state.sampling.last_token
            assert last_token is not None, "a first stage that does not sample takes the last tokens from the last"
            begin = _input_tokens(inputs, layout, last_token)
        pictures = None
        if state.embeddings is not None:
            pictures = picture_inputs(
                state.embeddings, inputs.slots, inputs.turns, inputs.deltas, inputs.positions, inputs.token_rows
            )
        hidden, caches, taps = model.with_taps(
            begin,
            state.caches,
            batches,
            places,
            attention,
            rope_lengths=prompt_lens,
            pictures=pictures,
            taps=() if drafter is None else drafter.taps,
            **step_adapters(state.adapters, inputs.params, inputs.token_rows),
        )  # [T, D]
        output, sampling, told = hidden, None, state.drafter
        if state.sampling is not None:
            output, sampling = sample_rows(model, hidden, inputs, layout, state.sampling, shards)
            if drafter is not None:
                assert begin is not None, "a model with drafts is one stage, which embeds its tokens"
                fed = _fed(begin, batches[drafter.group], hidden, taps, inputs, layout, sampling.last_token)
                body = Body(model=model, attention=attention, page_size=page_size, shards=shards)
                told, caches = drafter.absorb(state.drafter, caches, inputs.rows, fed, body)
        return output, DeviceState(
            caches=caches,
            block_tables=block_tables,
            length=length,
            sampling=sampling,
            drafter=told,
            embeddings=state.embeddings,
            adapters=state.adapters,
        )

    return step


def _input_tokens(inputs: StepInputs, layout: Layout, last_token: Int[Array, " R+1"]) -> Int[Array, " T"]:
    # Padding tokens carry row R of the batch; give them the padding row of the device.
    token_device_rows = jnp.append(inputs.rows, layout.max_rows)[inputs.token_rows]
    return jnp.where(inputs.tokens == FROM_DEVICE, last_token[token_device_rows], inputs.tokens)


def _fed(
    tokens: Int[Array, " T"],
    batch: AttentionBatch,
    hidden: Float[Array, "T D"],
    taps: tuple[Float[Array, "T D"], ...],
    inputs: StepInputs,
    layout: Layout,
    last_token: Int[Array, " R+1"],
) -> Fed:
    """All tokens of a step of one round, which all stay, and the one token that a row has drawn."""
    from_host = (inputs.tokens != FROM_DEVICE) & (inputs.token_rows < layout.bucket.rows)
    return Fed(
        tokens=tokens,
        batch=batch,
        from_host=None if layout.bucket.decode_only else from_host,
        hidden=hidden,
        taps=taps,
        num_kept=inputs.q_starts[1:] - inputs.q_starts[:-1],
        drawn=last_token[inputs.rows][:, None],
        num_drawn=inputs.draws,
        drawn_at=inputs.context_lens,
    )


def make_tell_tokens(drafter: Drafter):
    """tell(state, tokens [M, 3] of (row, position, token)) -> state: tokens of rows that no step will feed, since they
    are in the pages already; row max_rows for padding. DONATES state."""

    def tell_tokens(state: DeviceState, tokens: Int[Array, "M 3"]) -> DeviceState:
        rows, positions, token_ids = tokens.T
        known = rows < state.length.shape[0] - 1
        return dataclasses.replace(state, drafter=drafter.observe(state.drafter, rows, positions, token_ids, known))

    return tell_tokens


def make_enter_rows(drafter: LearnsFromAnswers):
    """enter(state, rows [M, 3] of (row, two halves of the origin)) -> state: rows of new sequences. DONATES state."""

    def enter_rows(state: DeviceState, rows: Int[Array, "M 3"]) -> DeviceState:
        return dataclasses.replace(state, drafter=drafter.enter(state.drafter, rows[:, 0], rows[:, 1:]))

    return enter_rows


def make_leave_rows(drafter: LearnsFromAnswers):
    """leave(state, rows [M, 2] of (row, tokens of its prompt)) -> state: rows that were given up. DONATES state."""

    def leave_rows(state: DeviceState, rows: Int[Array, "M 2"]) -> DeviceState:
        lengths = state.length[rows[:, 0]] + 1  # the token that was drawn last is in no page
        return dataclasses.replace(state, drafter=drafter.leave(state.drafter, rows[:, 0], rows[:, 1], lengths))

    return leave_rows


def sample_rows(
    model: Decoder,
    hidden: Float[Array, "T D"],
    inputs: StepInputs,
    layout: Layout,
    state: SamplingState,
    shards: Shards,
) -> tuple[StepOutput, SamplingState]:
    """Draws for the rows that want a token, and computes the scores and sums that a mixed step was asked for."""
    decode_only = layout.bucket.decode_only
    last = hidden if decode_only else hidden[jnp.maximum(inputs.q_starts[1:] - 1, 0)]  # [R, D]
    with jax.named_scope("logits"):
        logits = model.logits(last)  # [R, V], of this device's part of V
    with jax.named_scope("sample"):
        drawn, state = sample(
            logits,
            inputs.rows,
            inputs.context_lens,
            inputs.params,
            inputs.draws != 0,
            state,
            shards,
        )
    prompt = sums = None
    if not decode_only:
        with jax.named_scope("prompt_logprobs"):
            prompt = prompt_logprobs(hidden, inputs.targets, model.logits, shards)
        with jax.named_scope("pool"):
            sums = _pool(hidden, inputs)
    # One number that is not finite spoils all logits of a row: the scheduler ends it, and no other row has read it.
    finite = jnp.all(jnp.isfinite(last), axis=1)
    output = StepOutput(
        token_ids=jnp.where(finite, drawn.token_ids, NOT_FINITE)[None, :, None],
        logprobs=jax.tree.map(lambda leaf: leaf[None], drawn.logprobs),
        prompt=prompt,
        last_token=None if model.is_first else state.last_token,
        hidden_sums=sums,
    )
    return output, state


def _pool(hidden: Float[Array, "T D"], inputs: StepInputs) -> Float[Array, "R D"]:
    """Sums of final hidden states over the pooled tokens of each row, in float32. Costs nothing if there are none."""
    first, end = inputs.pooled[:, :1], inputs.pooled[:, 1:]  # [R, 1]

    def sums(hidden: Float[Array, "T D"]) -> Float[Array, "R D"]:
        # A product with zeros and ones: a scatter would add in an order that changes from run to run on a GPU.
        token = jnp.arange(hidden.shape[0])[None, :]
        taken = (first <= token) & (token < end)  # [R, T]
        return jnp.matmul(taken.astype(jnp.float32), hidden.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)

    shape = (inputs.pooled.shape[0], hidden.shape[1])
    return jax.lax.cond(jnp.any(first < end), sums, lambda _: jnp.zeros(shape, jnp.float32), hidden)


def write_tables(state: DeviceState, entries: Int[Array, "M 3"]) -> DeviceState:
    """Sets block table entries (line, column, page) that did not fit into a step. DONATES state."""
    tables = state.block_tables.at[entries[:, 0], entries[:, 1]].set(entries[:, 2])
    return dataclasses.replace(state, block_tables=tables)


def write_embeddings(state: DeviceState, embeddings: Float[Array, "M D"], lines: Int[Array, " M"]) -> DeviceState:
    """Puts the embeddings of a picture into these lines of the pool; padding goes to the dummy page. DONATES state."""
    pool = state.embeddings
    assert pool is not None, "the model takes no pictures"
    return dataclasses.replace(state, embeddings=pool.at[lines].set(embeddings.astype(pool.dtype)))


def make_copy_pages(attention: PagedAttention):
    """The copy-on-write function: copy(state, pairs [C, 2] of (source, target)) -> state. DONATES state."""

    def copy_pages(state: DeviceState, pairs: Int[Array, "C 2"]) -> DeviceState:
        caches = tuple(attention.copy_pages(c, pairs[:, 0], pairs[:, 1]) for c in state.caches)
        return dataclasses.replace(state, caches=caches)

    return copy_pages


def make_configure_row(shards: Shards):
    """configure(state, row, payload) -> state: loads the sampling state of a row whose request uses more than plain
    parameters. DONATES state."""

    def configure_row(state: DeviceState, row: Int[Array, ""], payload: Int[Array, " size"]) -> DeviceState:
        assert state.sampling is not None, "only the last stage samples"
        return dataclasses.replace(state, sampling=row_state.configure_row(state.sampling, row, payload, shards))

    return configure_row


def make_write_masks(shards: Shards):
    """write(state, masks [M, 1 + words]) -> state: the tokens that rows may draw next. DONATES state.

    Each line is one of `SamplingState.allowed_mask` (of the padding row for padding) and its mask over the whole
    vocabulary, of which a device keeps its part.
    """

    def write_masks(state: DeviceState, masks: Int[Array, "M size"]) -> DeviceState:
        assert state.sampling is not None, "only the last stage samples"
        return dataclasses.replace(
            state, sampling=row_state.write_masks(state.sampling, masks[:, 0], masks[:, 1:], shards)
        )

    return write_masks
