"""One step as one int32 buffer: the only place that pads, and the only transfer of a step.

The buffer is packed in numpy and unpacked inside the compiled step. One buffer, since a transfer costs its latency and
not its bytes: a dozen small arrays would cost a dozen times.

Sections of a bucket with T tokens, R rows, F parameters a row, and room for M page grants:

    rows [R]            device row of each batch row; max_rows for padding
    context_lens [R]    tokens in the cache once the step has written its own: FROM_DEVICE for a decode row, 0 for
                        padding
    draws [R]           1 where a token is drawn
    params [R, F]       sampling parameters, floats by their bits
    grants [M, 3]       (line of the block tables, column, page); padding goes to the padding row of group 0
    and for mixed buckets only (a decode step derives them):
    tokens [T]          token ids; FROM_DEVICE where the input is the row's last sampled token
    token_rows [T]      batch row of each token; R for padding
    positions [T]       FROM_DEVICE for the token of a decode row
    q_starts [R + 1]
    targets [T]         the prompt token that follows, where its log-probability is asked for; else NO_TARGET
    pooled [R, 2]       [first, end) of the tokens whose hidden states are summed for each row; 0, 0 where none are

A bucket of several tokens a row, or of several rounds, has other sections behind `rows`:

    room [R]            tokens that the row may draw in this step; 0 for padding
    drafts [R, W - 1]   of rows with drafts of the host, NO_TOKEN behind them; FROM_DEVICE for all others
    params, grants      as above
    stops [R, 4]        tokens that end the row; NO_TOKEN in unused slots
    rounds [1]          rounds of this step

Models that take pictures have further sections (`picture_inputs`).
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxserve.runtime.picture_inputs import PictureRows, PictureSizes
from jaxserve.runtime.row_state import FROM_DEVICE, NO_TOKEN
from jaxserve.sched.plan import Bucket, Chunk, PageGrant, StepPlan

NO_TARGET = -1
NUM_STOPS = 4  # tokens by which the device itself ends a row within a step; the host sees to further ones


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The offsets of the sections of a bucket's buffer."""

    bucket: Bucket
    max_rows: int
    num_params: int
    max_grants: int
    sections: tuple[tuple[str, int, tuple[int, ...]], ...]  # name, offset, shape
    size: int

    @classmethod
    def of(
        cls,
        bucket: Bucket,
        *,
        max_rows: int,
        num_params: int,
        page_size: int,
        num_groups: int,
        pictures: PictureSizes | None = None,
    ) -> "Layout":
        tokens, rows, decode_only = bucket[:3]
        # In each group a row that decodes takes a page at most for a token; chunks take one per page of their tokens
        # and one for a ragged start. What exceeds this (a long prefix hit) goes through `write_tables`.
        new_tokens = bucket.tokens * bucket.rounds - rows if decode_only else tokens
        max_grants = num_groups * (rows + -(-new_tokens // page_size))
        shapes: dict[str, tuple[int, ...]] = {"rows": (rows,)}
        shapes |= (
            {"context_lens": (rows,), "draws": (rows,)}
            if bucket.plain
            else {"room": (rows,), "drafts": (rows, bucket.width - 1)}
        )
        shapes |= {"params": (rows, num_params), "grants": (max_grants, 3)}
        if not bucket.plain:
            shapes |= {"stops": (rows, NUM_STOPS), "rounds": (1,)}
        elif not decode_only:
            shapes |= {
                "tokens": (tokens,),
                "token_rows": (tokens,),
                "positions": (tokens,),
                "q_starts": (rows + 1,),
                "targets": (tokens,),
                "pooled": (rows, 2),
            }
        if pictures is not None:
            shapes |= pictures.sections(bucket)
        sections, offset = [], 0
        for name, shape in shapes.items():
            sections.append((name, offset, shape))
            offset += math.prod(shape)
        return cls(
            bucket=bucket,
            max_rows=max_rows,
            num_params=num_params,
            max_grants=max_grants,
            sections=tuple(sections),
            size=offset,
        )

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Named windows into `buffer` [size]; writing to one writes the buffer."""
        return {n: buffer[o : o + math.prod(s)].reshape(s) for n, o, s in self.sections}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StepInputs:
    """The buffer, unpacked inside the compiled step, with the values that the device adds to it."""

    rows: Int[Array, " R"]
    context_lens: Int[Array, " R"]
    draws: Int[Array, " R"]
    params: Int[Array, "R F"]
    grants: Int[Array, "M 3"]
    tokens: Int[Array, " T"]
    token_rows: Int[Array, " T"]
    positions: Int[Array, " T"]
    q_starts: Int[Array, " R+1"]
    targets: Int[Array, " T"]
    pooled: Int[Array, "R 2"]
    slots: Int[Array, " T"] | None = None
    turns: Int[Array, "3 T"] | None = None
    deltas: Int[Array, " R"] | None = None


def unpack(buffer: Int[Array, " size"], layout: Layout, length: Int[Array, " max_rows+1"]) -> StepInputs:
    """Splits the buffer; derives the sections that a decode bucket lacks (token t is row t's, at its last position).

    `length` holds the tokens that each device row has in the cache: those of decode rows are not in the buffer.
    """
    parts = {n: buffer[o : o + math.prod(s)].reshape(s) for n, o, s in layout.sections}
    lens = length[parts["rows"]]  # [R]
    context_lens = jnp.where(parts["context_lens"] == FROM_DEVICE, lens + 1, parts["context_lens"])
    parts["context_lens"] = context_lens
    if layout.bucket.decode_only:
        tokens, rows = layout.bucket.tokens, layout.bucket.rows
        real = (context_lens > 0).astype(jnp.int32)
        parts |= {
            "tokens": jnp.full((tokens,), FROM_DEVICE, jnp.int32),
            "token_rows": jnp.where(real == 1, jnp.arange(tokens, dtype=jnp.int32), rows),
            "positions": jnp.maximum(context_lens - 1, 0),
            # Padding rows come last, so the running count of real rows is each row's end.
            "q_starts": jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(real, dtype=jnp.int32)]),
            "targets": jnp.full((tokens,), NO_TARGET, jnp.int32),
            "pooled": jnp.zeros((rows, 2), jnp.int32),
        }
    else:
        of_token = jnp.append(lens, 0)[parts["token_rows"]]  # [T]
        parts["positions"] = jnp.where(parts["positions"] == FROM_DEVICE, of_token, parts["positions"])
    return StepInputs(**parts)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundsInputs:
    """The buffer of a bucket of several tokens a row or several rounds, split inside the compiled step."""

    rows: Int[Array, " R"]
    room: Int[Array, " R"]
    drafts: Int[Array, "R W-1"]
    params: Int[Array, "R F"]
    grants: Int[Array, "M 3"]
    stops: Int[Array, "R 4"]
    rounds: Int[Array, " 1"]
    deltas: Int[Array, " R"] | None = None


def unpack_rounds(buffer: Int[Array, " size"], layout: Layout) -> RoundsInputs:
    """Splits the buffer."""
    return RoundsInputs(**{n: buffer[o : o + math.prod(s)].reshape(s) for n, o, s in layout.sections})


def pack(
    plan: StepPlan,
    layout: Layout,
    row_params: np.ndarray,
    row_stops: np.ndarray,
    row_tokens: dict[int, np.ndarray],
    grants: tuple[PageGrant, ...],
    pictures: PictureRows | None = None,
) -> np.ndarray:
    """Writes `plan` into a new buffer [layout.size] int32.

    `row_params` [max_rows + 1, F] holds the parameters of each device row, `row_stops` [max_rows + 1, NUM_STOPS] the
    tokens that end it; `row_tokens` maps rows with a prompt of interest to it [prompt_len] (targets of prompt
    log-probabilities). `grants` are those of the plan that fit (`split_grants`). `pictures`: of models that take some.
    """
    bucket = layout.bucket
    buffer = np.zeros(layout.size, np.int32)
    view = layout.views(buffer)
    num_decode, num_chunks = len(plan.decode_rows), len(plan.chunks)
    num_rows = num_decode + num_chunks
    assert num_rows <= bucket.rows and plan.num_tokens <= bucket.tokens, (plan.step_id, bucket)

    view["rows"][:] = layout.max_rows
    view["rows"][:num_decode] = plan.decode_rows
    if not bucket.plain:
        view["room"][:num_decode] = plan.row_tokens
        view["drafts"][:] = FROM_DEVICE
        for row, token_ids in plan.drafts:
            line = view["drafts"][plan.decode_rows.index(row)]
            line[:] = NO_TOKEN
            line[: len(token_ids)] = token_ids
        view["params"][:] = row_params[view["rows"]]
        view["stops"][:] = row_stops[view["rows"]]
        view["rounds"][0] = plan.rounds
        _pack_grants(view["grants"], grants, layout.max_rows)
        if pictures is not None:
            pictures.write(plan, view)
        return buffer
    if num_decode:
        view["context_lens"][:num_decode] = FROM_DEVICE
        view["draws"][:num_decode] = 1
    for i, chunk in enumerate(plan.chunks, start=num_decode):
        view["rows"][i] = chunk.row
        view["context_lens"][i] = chunk.start + len(chunk.token_ids)
        view["draws"][i] = chunk.sample
    view["params"][:] = row_params[view["rows"]]
    _pack_grants(view["grants"], grants, layout.max_rows)
    if not bucket.decode_only:
        _pack_tokens(plan, view, bucket, row_tokens)
    if pictures is not None:
        pictures.write(plan, view)
    return buffer


def _pack_grants(out: np.ndarray, grants: tuple[PageGrant, ...], padding_row: int) -> None:
    out[:, 0] = padding_row
    at = 0
    for row, first, page_ids, group in grants:
        end = at + len(page_ids)
        out[at:end, 0] = table_line(row, group, padding_row)
        out[at:end, 1] = range(first, first + len(page_ids))
        out[at:end, 2] = page_ids
        at = end


def _pack_tokens(
    plan: StepPlan, view: dict[str, np.ndarray], bucket: Bucket, row_tokens: dict[int, np.ndarray]
) -> None:
    num_decode = len(plan.decode_rows)
    view["token_rows"][:] = bucket.rows
    view["targets"][:] = NO_TARGET
    view["tokens"][:num_decode] = FROM_DEVICE
    view["token_rows"][:num_decode] = np.arange(num_decode)
    view["positions"][:num_decode] = FROM_DEVICE
    view["q_starts"][: num_decode + 1] = np.arange(num_decode + 1)
    at = num_decode
    for i, chunk in enumerate(plan.chunks, start=num_decode):
        end = at + len(chunk.token_ids)
        view["tokens"][at:end] = chunk.token_ids
        view["token_rows"][at:end] = i
        view["positions"][at:end] = range(chunk.start, chunk.start + len(chunk.token_ids))
        if chunk.prompt_logprobs:
            following = following_tokens(chunk, row_tokens[chunk.row])
            view["targets"][at : at + len(following)] = following
        if pooled := chunk.pooled:
            view["pooled"][i] = at + pooled.start - chunk.start, at + pooled.stop - chunk.start
        view["q_starts"][i + 1] = end
        at = end
    view["q_starts"][num_decode + len(plan.chunks) + 1 :] = at


def following_tokens(chunk: Chunk, prompt: np.ndarray) -> np.ndarray:
    """The token of `prompt` [prompt_len] after each of the chunk's: one fewer where the chunk ends the prompt."""
    return prompt[chunk.start + 1 : chunk.start + 1 + len(chunk.token_ids)]


def table_line(row: int, group: int, max_rows: int) -> int:
    """The line of the block tables [G * (max_rows + 1), P] that a device row has in a group of layers."""
    return group * (max_rows + 1) + row


def split_grants(
    grants: tuple[PageGrant, ...], room: int, max_rows: int
) -> tuple[tuple[PageGrant, ...], list[tuple[int, int, int]]]:
    """Grants that fit into a step's `room` entries, and the rest as (line, column, page) for `write_tables`."""
    fitting: list[PageGrant] = []
    rest: list[tuple[int, int, int]] = []
    for grant in grants:
        if len(grant.page_ids) <= room:
            fitting.append(grant)
            room -= len(grant.page_ids)
        else:
            line = table_line(grant.row, grant.group, max_rows)
            rest.extend((line, grant.first + i, page) for i, page in enumerate(grant.page_ids))
    return tuple(fitting), rest
