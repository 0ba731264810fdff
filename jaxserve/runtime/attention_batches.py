"""The rows of a step as attention takes them: one `AttentionBatch` for each group of layers."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxserve.kernels.paged_attention import AttentionBatch
from jaxserve.runtime.pack import Layout, StepInputs, table_line
from jaxserve.sched.plan import DUMMY_PAGE, PageGroup


def attention_batches(
    inputs: StepInputs,
    block_tables: Int[Array, "G*R+G P"],
    layout: Layout,
    page_size: int,
    groups: Sequence[PageGroup],
    prompt_lens: Int[Array, " R"] | None,
) -> tuple[AttentionBatch, ...]:
    """The rows of a step of one round, as the layers of each group need them. `prompt_lens`: see `AttentionBatch`."""
    batch = AttentionBatch(
        positions=inputs.positions,
        token_rows=inputs.token_rows,
        q_starts=inputs.q_starts,
        context_lens=inputs.context_lens,
        block_tables=block_tables,
        page_size=page_size,
        decode_only=layout.bucket.decode_only,
        prompt_lens=prompt_lens,
    )
    return group_batches(batch, inputs.rows, block_tables, layout.max_rows, groups)


def group_batches(
    batch: AttentionBatch,
    rows: Int[Array, " R"],
    block_tables: Int[Array, "G*R+G P"],
    max_rows: int,
    groups: Sequence[PageGroup],
) -> tuple[AttentionBatch, ...]:
    """`batch` with the block tables of each group; `rows` are the device rows of its rows."""

    def of_group(number: int, group: PageGroup) -> AttentionBatch:
        tables = block_tables[rows + table_line(0, number, max_rows)]  # [R, P]
        if group.window is not None:
            tables = _without_given_back(tables, batch, group.window)
        return dataclasses.replace(batch, block_tables=tables)

    return tuple(of_group(number, group) for number, group in enumerate(groups))


def _without_given_back(tables: Int[Array, "R P"], batch: AttentionBatch, window: int) -> Int[Array, "R P"]:
    """The block tables, with the dummy page for columns of which no token of the row in this step can see anything.

    The pages of these columns may belong to other sequences by now. Attention may read pages in blocks, and give the
    tokens that are not seen the weight zero; zero times an infinite number of another sequence would still be NaN. The
    device can tell these columns by itself, so that nothing is sent when a sequence gives pages back.
    """
    first_positions = batch.context_lens - (batch.q_starts[1:] - batch.q_starts[:-1])  # [R], of the step's tokens
    first_columns = jnp.maximum(0, first_positions - window + 1) // batch.page_size
    return jnp.where(jnp.arange(tables.shape[1]) < first_columns[:, None], DUMMY_PAGE, tables)
