"""The fused step: everything between a packed buffer and the sampled tokens, in one compiled function per bucket.

Owns `DeviceState` and the functions that are compiled. Refuses to hold arrays (the runner does). One function, since
every further launch costs host time and a compile per shape: embedding, layers, paged attention, the logits of the
rows that need them, sampling and the scatter of the drawn tokens all happen here.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Int

from jaxserve.kernels.paged_attention import AttentionBatch, LayerCache, PagedAttention
from jaxserve.runtime import row_state
from jaxserve.runtime.pack import FROM_DEVICE, Layout, unpack
from jaxserve.runtime.row_state import Field, SamplingState
from jaxserve.runtime.sampling import Logprobs, prompt_logprobs, sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceState:
    """All that lives on the device from step to step. DONATED to every compiled function and returned by it.

    Attributes:
      caches: KV pages, one entry per layer.
      block_tables: page ids of every device row; row max_rows belongs to padding.
      sampling: last tokens, counts and masks of every device row.
    """

    caches: tuple[LayerCache, ...]
    block_tables: Int[Array, "R+1 P"]
    sampling: SamplingState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOutput:
    """What a step sends back. Log-probabilities are copied to the host only when a row asked for them."""

    token_ids: Int[Array, " R"]
    logprobs: Logprobs  # of the R drawn tokens
    prompt: Logprobs | None  # of the T tokens that follow those of a mixed step


def make_step(graphdef: nnx.GraphDef, layout: Layout, attention: PagedAttention, page_size: int):
    """The function to compile for one bucket: step(weights, state, buffer) -> (StepOutput, state). DONATES state."""
    decode_only = layout.bucket.decode_only

    def step(weights, state: DeviceState, buffer: Int[Array, " size"]) -> tuple[StepOutput, DeviceState]:
        inputs = unpack(buffer, layout)
        model = nnx.merge(graphdef, weights)
        block_tables = state.block_tables.at[inputs.grants[:, 0], inputs.grants[:, 1]].set(inputs.grants[:, 2])
        # Padding tokens carry row R of the batch; give them the padding row of the device.
        token_device_rows = jnp.append(inputs.rows, layout.max_rows)[inputs.token_rows]
        tokens = jnp.where(inputs.tokens == FROM_DEVICE, state.sampling.last_token[token_device_rows], inputs.tokens)
        batch = AttentionBatch(
            positions=inputs.positions,
            token_rows=inputs.token_rows,
            q_starts=inputs.q_starts,
            context_lens=inputs.context_lens,
            block_tables=block_tables[inputs.rows],
            page_size=page_size,
            decode_only=decode_only,
        )
        # The length that dynamic rope scaling is stretched for; other scalings do not look at it.
        prompt_lens = inputs.params[:, Field.PROMPT_LEN]
        hidden, caches = model(tokens, state.caches, batch, attention, rope_lengths=prompt_lens)  # [T, D]
        last = hidden if decode_only else hidden[jnp.maximum(inputs.q_starts[1:] - 1, 0)]  # [R, D]
        with jax.named_scope("logits"):
            logits = model.logits(last)  # [R, V]
        with jax.named_scope("sample"):
            drawn, sampling_state = sample(
                logits,
                inputs.rows,
                inputs.context_lens,
                inputs.params,
                inputs.should_sample.astype(bool),
                state.sampling,
            )
        prompt = None
        if not decode_only:
            with jax.named_scope("prompt_logprobs"):
                prompt = prompt_logprobs(hidden, inputs.targets, model.logits)
        output = StepOutput(token_ids=drawn.token_ids, logprobs=drawn.logprobs, prompt=prompt)
        return output, DeviceState(caches=caches, block_tables=block_tables, sampling=sampling_state)

    return step


def write_tables(state: DeviceState, entries: Int[Array, "M 3"]) -> DeviceState:
    """Sets block table entries (row, column, page) that did not fit into a step. DONATES state."""
    tables = state.block_tables.at[entries[:, 0], entries[:, 1]].set(entries[:, 2])
    return dataclasses.replace(state, block_tables=tables)


def make_copy_pages(attention: PagedAttention):
    """The copy-on-write function: copy(state, pairs [C, 2] of (source, target)) -> state. DONATES state."""

    def copy_pages(state: DeviceState, pairs: Int[Array, "C 2"]) -> DeviceState:
        caches = tuple(attention.copy_pages(c, pairs[:, 0], pairs[:, 1]) for c in state.caches)
        return dataclasses.replace(state, caches=caches)

    return copy_pages


def configure_row(state: DeviceState, row: Int[Array, ""], payload: Int[Array, " size"]) -> DeviceState:
    """Loads the sampling state of a row whose request uses more than plain parameters. DONATES state."""
    return dataclasses.replace(state, sampling=row_state.configure_row(state.sampling, row, payload))
