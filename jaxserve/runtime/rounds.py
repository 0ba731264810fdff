"""Several tokens of a row in one launch: rounds of drafts, verified by the model's own draws.

In a round each row feeds its last token and some drafts of those to come. The model gives logits for each of these
places in one pass, and the row draws at each place as if the drafts before it had been drawn: with their penalties,
bad words and positions, and so with the noise that a step of one token would use. A draft counts if it equals the draw
at its place. The row keeps what it drew up to the first draft that does not, that draw included.

So the tokens are those of a row that feeds one token at a time, whatever the drafts are: by induction each token is
drawn from the same tokens before it, with the same noise. (Acceptance by equality with the target's own draw:
arXiv:2408.07978, 2504.15475.) Nothing is undone: keys and values of rejected drafts lie beyond the row's length, where
no token sees them, and are written anew before one could.

A row with a grammar has drafts of the host, with a mask for each place, and takes part in the first round alone: the
masks behind it follow from what it draws. All others take part in the rounds of a step until they have drawn all that
their pages have room for, or a token that ends them.
Ends that the device does not know (stop strings, more than NUM_STOPS ids) are the host's: it drops what follows them.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxserve.api import NOT_FINITE
from jaxserve.kernels.paged_attention import AttentionBatch, LayerCache, PagedAttention
from jaxserve.models.adapters.slots import Slots
from jaxserve.models.decoder import CachePlace, Decoder
from jaxserve.models.sharding import Shards
from jaxserve.runtime.adapters import step_adapters
from jaxserve.runtime.attention_batches import group_batches
from jaxserve.runtime.drafter import Asked, Body, Drafter, Fed
from jaxserve.runtime.drafting import DrafterState
from jaxserve.runtime.pack import Layout, RoundsInputs, table_line, unpack_rounds
from jaxserve.runtime.picture_inputs import picture_inputs
from jaxserve.runtime.row_state import FROM_DEVICE, NO_TOKEN, Field, SamplingState
from jaxserve.runtime.sampling import choose_tokens, write_tokens
from jaxserve.runtime.step_output import NOT_TAKEN, StepOutput
from jaxserve.sched.plan import PageGroup


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The part of the device's state that changes from round to round."""

    caches: tuple[LayerCache, ...]
    length: Int[Array, " R+1"]
    sampling: SamplingState
    drafter: DrafterState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundsStep:
    """The rounds of a bucket of several tokens or rounds; its methods run while a step is traced."""

    layout: Layout
    attention: PagedAttention
    page_size: int
    shards: Shards
    groups: Sequence[PageGroup]
    places: Sequence[CachePlace]
    drafter: Drafter

    def run(
        self,
        model: Decoder,
        buffer: Int[Array, " size"],
        block_tables: Int[Array, "G*R+G P"],
        rows: Rows,
        embeddings: Float[Array, "S D"] | None,
        adapters: Slots | None = None,
    ) -> tuple[StepOutput, Int[Array, "G*R+G P"], Rows]:
        """What was drawn, the block tables with the pages that the step grants, and the state after all rounds.

        `embeddings`: the pool of those of pictures, where the model takes some. `adapters`: their slots, where the
        engine takes some.
        """
        inputs = unpack_rounds(buffer, self.layout)
        tables = block_tables.at[inputs.grants[:, 0], inputs.grants[:, 1]].set(inputs.grants[:, 2])
        if self.layout.bucket.rounds > 1:
            output, rows = self._loop(model, inputs, tables, rows, embeddings, adapters)
        else:
            found, rows, _ = self._round(model, inputs, tables, rows, inputs.room, embeddings, adapters)
            output = jax.tree.map(lambda leaf: leaf[None], found)
        return output, tables, rows

    def _loop(
        self,
        model: Decoder,
        inputs: RoundsInputs,
        tables: Int[Array, "G*R+G P"],
        rows: Rows,
        embeddings: Float[Array, "S D"] | None,
        adapters: Slots | None = None,
    ) -> tuple[StepOutput, Rows]:
        """Rounds until there have been as many as asked for, or no row is left that could draw."""
        most = self.layout.bucket.rounds
        shapes = jax.eval_shape(
            lambda rows: self._round(model, inputs, tables, rows, inputs.room, embeddings, adapters)[0], rows
        )
        blank = jax.tree.map(lambda leaf: jnp.zeros((most, *leaf.shape), leaf.dtype), shapes)
        blank = dataclasses.replace(blank, accepted=jnp.full_like(blank.accepted, NOT_TAKEN))

        def goes_on(carry):
            number, room, _, _ = carry
            return (number < inputs.rounds[0]) & jnp.any(room > 0)

        def turn(carry):
            number, room, rows, output = carry
            found, rows, room = self._round(model, inputs, tables, rows, room, embeddings, adapters)
            output = jax.tree.map(
                lambda all_, one: lax.dynamic_update_index_in_dim(all_, one, number, 0), output, found
            )
            return number + 1, room, rows, output

        _, _, rows, output = lax.while_loop(goes_on, turn, (jnp.int32(0), inputs.room, rows, blank))
        return output, rows

    def _round(
        self,
        model: Decoder,
        inputs: RoundsInputs,
        tables: Int[Array, "G*R+G P"],
        rows: Rows,
        room: Int[Array, " R"],
        embeddings: Float[Array, "S D"] | None,
        adapters: Slots | None = None,
    ) -> tuple[StepOutput, Rows, Int[Array, " R"]]:
        """One round. `room`: tokens that each row may still draw; 0: it has ended its part."""
        width, num_rows = self.layout.bucket.width, self.layout.bucket.rows
        device_rows, sampling = inputs.rows, rows.sampling
        body = Body(model=model, attention=self.attention, page_size=self.page_size, shards=self.shards)
        taking = room > 0  # [R]
        lens = rows.length[device_rows]  # [R], tokens in the pages: the position of the token that is fed first
        with jax.named_scope("draft"):
            drafts, caches = self._drafts(body, inputs, tables, rows, room)  # [R, W-1]
        num_drafts = jnp.sum(drafts != NO_TOKEN, axis=1, dtype=jnp.int32)
        fed = jnp.concatenate([sampling.last_token[device_rows][:, None], drafts], axis=1)  # [R, W]
        num_fed = jnp.where(taking, 1 + num_drafts, 0)
        batch, tokens = self._flat(fed, num_fed, lens)
        prompt_lens = inputs.params[:, Field.PROMPT_LEN]
        if self.attention.selects:
            batch = dataclasses.replace(batch, prompt_lens=prompt_lens)
        batches = group_batches(batch, device_rows, tables, self.layout.max_rows, self.groups)
        pictures = None
        if embeddings is not None:
            pictures = picture_inputs(embeddings, None, None, inputs.deltas, batch.positions, batch.token_rows)
        hidden, caches, taps = model.with_taps(
            tokens,
            caches,
            batches,
            self.places,
            self.attention,
            rope_lengths=prompt_lens,
            pictures=pictures,
            taps=self.drafter.taps,
            **step_adapters(adapters, inputs.params, batch.token_rows),
        )
        # A line for each place of each row; those without a token repeat the last one of the row.
        place = jnp.arange(width)
        line = batch.q_starts[:-1, None] + jnp.minimum(place, jnp.maximum(num_fed - 1, 0)[:, None])  # [R, W]
        last = hidden[jnp.minimum(line, num_rows * width - 1).reshape(-1)]  # [R*W, D]
        with jax.named_scope("logits"):
            logits = model.logits(last)
        filled = place < num_fed[:, None]  # [R, W]
        with jax.named_scope("sample"):
            drawn = choose_tokens(
                logits,
                jnp.repeat(device_rows, width),
                (lens[:, None] + 1 + place).reshape(-1),
                jnp.repeat(inputs.params, width, axis=0),
                filled.reshape(-1),
                sampling,
                self.shards,
                ahead=_ahead(drafts),
                mask_places=jnp.where(_hosted(inputs)[:, None], place, 0).reshape(-1),
            )
        finite = jnp.all(jnp.isfinite(last), axis=1).reshape(num_rows, width)
        token_ids = jnp.where(finite, drawn.token_ids.reshape(num_rows, width), NOT_FINITE)
        # A row whose numbers are not finite ends there, and what it would go on from is never read.
        accepted = _leading(token_ids[:, : width - 1] == drafts) if width > 1 else jnp.zeros(num_rows, jnp.int32)
        num_outputs = lens[:, None] + 2 + place - prompt_lens[:, None]  # of the sequence, once the place is drawn
        ends = jnp.any(token_ids[:, :, None] == inputs.stops[:, None, :], axis=2) | (token_ids == NOT_FINITE)
        ends &= (num_outputs > inputs.params[:, Field.MIN_TOKENS, None]) | (token_ids == NOT_FINITE)
        accepted = jnp.minimum(accepted, _leading(~ends))
        count = jnp.where(taking, accepted + 1, 0)  # [R]
        ended = jnp.any(ends & (place < count[:, None]), axis=1)
        # Rows with numbers that are not finite go on with what was drawn from them, as in a step of one token.
        drawn_ids = drawn.token_ids.reshape(num_rows, width)
        sampling = write_tokens(sampling, device_rows, drawn_ids, count, inputs.params, self.shards)
        fed_tokens = Fed(
            tokens=tokens,
            batch=batches[self.drafter.group],
            from_host=None,
            hidden=hidden,
            taps=taps,
            num_kept=count,
            drawn=drawn_ids,
            num_drawn=count,
            drawn_at=lens + 1,
        )
        drafter, caches = self.drafter.absorb(rows.drafter, caches, device_rows, fed_tokens, body)
        output = StepOutput(
            token_ids=token_ids,
            drafted=jnp.where(taking, num_drafts, 0),
            accepted=jnp.where(taking, accepted, NOT_TAKEN),
            logprobs=drawn.logprobs,
        )
        length = rows.length.at[device_rows].set(lens + count)
        after = Rows(caches=caches, length=length, sampling=sampling, drafter=drafter)
        return output, after, jnp.where(ended | _hosted(inputs), 0, room - count)

    def _drafts(
        self,
        body: Body,
        inputs: RoundsInputs,
        tables: Int[Array, "G*R+G P"],
        rows: Rows,
        room: Int[Array, " R"],
    ) -> tuple[Int[Array, "R W-1"], tuple[LayerCache, ...]]:
        """Drafts of tokens that exist and have room, NO_TOKEN from the first place without one on; and the caches.

        Those of the host where it has any, all others of the drafter.
        """
        count, device_rows, caches = self.layout.bucket.width - 1, inputs.rows, rows.caches
        if count == 0:
            return jnp.zeros((device_rows.shape[0], 0), jnp.int32), caches
        asked = Asked(
            rows=device_rows,
            tables=tables[device_rows + table_line(0, self.drafter.group, self.layout.max_rows)],
            lens=rows.length[device_rows],
            room=jnp.where(_hosted(inputs), 0, room),
            params=inputs.params,
            sampling=rows.sampling,
        )
        drafts, caches = self.drafter.propose(rows.drafter, caches, asked, count, body)
        assert drafts.shape == (device_rows.shape[0], count), (drafts.shape, self.drafter)
        drafts = jnp.where(_hosted(inputs)[:, None], inputs.drafts, drafts)
        sound = (drafts >= 0) & (drafts < body.model.placement.num_tokens) & (jnp.arange(count) < room[:, None] - 1)
        return jnp.where(jnp.arange(count) < _leading(sound)[:, None], drafts, NO_TOKEN), caches

    def _flat(
        self, fed: Int[Array, "R W"], num_fed: Int[Array, " R"], lens: Int[Array, " R"]
    ) -> tuple[AttentionBatch, Int[Array, " T"]]:
        """The tokens of all rows behind each other, and where they belong. Block tables are those of no row yet."""
        num_rows, width = fed.shape
        token = jnp.arange(num_rows * width, dtype=jnp.int32)
        ends = jnp.cumsum(num_fed, dtype=jnp.int32)
        q_starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends])
        owner = jnp.sum(token[:, None] >= ends, axis=1, dtype=jnp.int32)  # [T], R for padding
        row = jnp.minimum(owner, num_rows - 1)
        offset = jnp.where(owner < num_rows, token - q_starts[row], 0)
        batch = AttentionBatch(
            positions=jnp.where(owner < num_rows, lens[row] + offset, 0),
            token_rows=owner,
            q_starts=q_starts,
            context_lens=jnp.where(num_fed > 0, lens + num_fed, 0),
            block_tables=jnp.zeros((num_rows, 0), jnp.int32),
            page_size=self.page_size,
            decode_only=width == 1 and self.layout.bucket.rounds == 1,
        )
        return batch, jnp.where(owner < num_rows, fed[row, jnp.minimum(offset, width - 1)], 0)


def _hosted(inputs: RoundsInputs) -> Bool[Array, " R"]:
    """Rows with drafts of the host, if only none at all."""
    if inputs.drafts.shape[1] == 0:
        return jnp.zeros(inputs.rows.shape, bool)
    return inputs.drafts[:, 0] != FROM_DEVICE


def _ahead(drafts: Int[Array, "R W-1"]) -> Int[Array, "R*W W-1"] | None:
    """Of each place, the drafts before it; None where there are never any."""
    num_rows, count = drafts.shape
    if count == 0:
        return None
    before = jnp.arange(count) < jnp.arange(count + 1)[:, None]  # [W, W-1]
    return jnp.where(before, drafts[:, None, :], NO_TOKEN).reshape(num_rows * (count + 1), count)


def _leading(holds: Bool[Array, "R N"]) -> Int[Array, " R"]:
    """How many places from the first on hold."""
    return jnp.sum(jnp.cumprod(holds.astype(jnp.int32), axis=1), axis=1)
