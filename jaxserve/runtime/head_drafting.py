"""Drafts of a head that reads the target's hidden states: EAGLE, MTP, Medusa (`models.drafts`).

Such a drafter is told more than tokens: the hidden states of each token that went through the model (`absorb`). It
keeps the newest feature of each row, and EAGLE's keys and values in an array beside those of the layers, under the same
block tables. There, slot i has the token i with the feature of the place before it: a page then depends on nothing but
its own tokens and those before them, so pages are shared and found again as the model's are. Behind pages that were
found, the feature of the last place is not known, and is zeros; heads are trained to bear that.

A draft is drawn as the model's own token will be: with the row's temperature, thresholds, penalties and noise. The
noise of a token at a position is the same for both, so where the head's distribution is near the model's, so is the
token (arXiv:2408.07978).
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, LayerCache, PagedAttention
from jaxserve.models.decoder import Decoder
from jaxserve.models.drafts.config import EagleConfig, HeadConfig
from jaxserve.models.drafts.eagle import EagleHead
from jaxserve.models.drafts.medusa import MedusaHead
from jaxserve.models.partition import Partition
from jaxserve.models.sharding import Shards
from jaxserve.runtime.drafting import DraftSizes
from jaxserve.runtime.row_state import NO_TOKEN, SamplingState
from jaxserve.runtime.sampling import choose_tokens

UNKNOWN = -1  # in place of a position: no feature is known


class HeadState(NamedTuple):
    """The newest features of the device rows: of the hidden states at `positions`, UNKNOWN where there is none."""

    features: Float[Array, "R+1 D"]
    positions: Int[Array, " R+1"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowsView:
    """The rows that drafts are made for.

    Attributes:
      rows: device rows.
      tables: their block tables, of the group of layers that the head belongs to.
      lens: tokens in the pages of each, which is the position of the last token.
      room: tokens that each may draw, and so places that its pages have; 0: no draft is made.
      params, sampling: how each draws.
    """

    rows: Int[Array, " R"]
    tables: Int[Array, "R P"]
    lens: Int[Array, " R"]
    room: Int[Array, " R"]
    params: Int[Array, "R F"]
    sampling: SamplingState


class Fed(NamedTuple):
    """Tokens that went through the model, and what became of them.

    Attributes:
      tokens: [T], in rows as `batch` says, whose block tables are those of the head's group.
      hidden: behind the final norm.
      taps: those that the head asked for.
      last: of each row of the batch, the token whose feature is to be kept.
      positions: of that token.
      kept: rows that have one.
    """

    tokens: Int[Array, " T"]
    batch: AttentionBatch
    hidden: Float[Array, "T D"]
    taps: tuple[Float[Array, "T D"], ...]
    last: Int[Array, " R"]
    positions: Int[Array, " R"]
    kept: Bool[Array, " R"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadDrafter:
    """A `Drafter` for the head that the decoder has (`Decoder.head`).

    Attributes:
      config: of that head.
      group: of layers with its block tables.
      dtype: of activations, and of the head's keys and values.
    """

    config: HeadConfig
    group: int
    dtype: str

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose inputs `absorb` wants."""
        return self.config.taps

    def init_cache(
        self, attention: PagedAttention, num_pages: int, page_size: int, devices: int
    ) -> tuple[LayerCache, ...]:
        """Pages of the head's layer, over all devices; none for Medusa."""
        if not isinstance(self.config, EagleConfig):
            return ()
        sizes = Partition.of(self.config.decoder, devices).padded
        return (
            attention.init_cache(
                num_pages, page_size, sizes.num_kv_heads, sizes.head_dim, np.dtype(jnp.dtype(self.dtype))
            ),
        )

    def init_state(self, sizes: DraftSizes) -> HeadState:
        """`Drafter.init_state`."""
        num_rows = sizes.max_rows + 1
        return HeadState(
            features=jnp.zeros((num_rows, self.config.hidden_size), jnp.dtype(self.dtype)),
            positions=jnp.full(num_rows, UNKNOWN, jnp.int32),
        )

    def observe(
        self,
        state: HeadState,
        rows: Int[Array, " M"],
        positions: Int[Array, " M"],
        tokens: Int[Array, " M"],
        known: Bool[Array, " M"],
    ) -> HeadState:
        """Tokens that are in the pages already: whatever the row's feature was, it is another sequence's."""
        nowhere = state.positions.shape[0]
        return state._replace(positions=state.positions.at[jnp.where(known, rows, nowhere)].set(UNKNOWN, mode="drop"))

    def propose(self, state, rows, lengths, count) -> Int[Array, "R count"]:
        raise AssertionError("a head needs more than tokens: `draft`")

    def draft(
        self,
        model: Decoder,
        state: HeadState,
        caches: tuple[LayerCache, ...],
        view: RowsView,
        count: int,
        attention: PagedAttention,
        page_size: int,
        shards: Shards,
    ) -> tuple[Int[Array, "R count"], tuple[LayerCache, ...]]:
        """Guesses as `Drafter.propose` returns them, and `caches`, the last of which may be the head's."""
        head, known = model.head, state.positions[view.rows] == view.lens - 1
        features = jnp.where(known[:, None], state.features[view.rows], 0)
        drafts = jnp.full((view.rows.shape[0], count), NO_TOKEN, jnp.int32)

        def drawn(logits: Float[Array, "R V"], place: int, drafts: Array, active: Bool[Array, " R"]) -> Array:
            """`drafts` with those of one place."""
            found = choose_tokens(
                logits, view.rows, view.lens + 1 + place, view.params, active, view.sampling, shards, ahead=drafts
            )
            return drafts.at[:, place].set(jnp.where(active, found.token_ids, NO_TOKEN))

        if isinstance(head, MedusaHead):
            outputs = head.outputs(features)
            for place in range(min(count, len(outputs))):
                active = known & (view.room > place + 1)
                drafts = drawn(head.logits(place, outputs[place], model), place, drafts, active)
            return drafts, caches
        assert isinstance(head, EagleHead), head
        *before, cache = caches
        tokens = view.sampling.last_token[view.rows]
        for place in range(count):
            # The page of this place is the row's if the place has room; the next place is where the guess would go.
            position = view.lens + place
            active = (view.room > place + 1) & (position + 1 < head.config.decoder.max_position)
            batch = _single(position, view.tables, active, page_size)
            x, cache = head(head.token_embeddings(tokens, model), features, cache, batch, attention)
            drafts = drawn(head.logits(x, model), place, drafts, active)
            tokens, features = jnp.maximum(drafts[:, place], 0), head.next_features(x)
        return drafts, (*before, cache)

    def absorb(
        self,
        model: Decoder,
        state: HeadState,
        caches: tuple[LayerCache, ...],
        rows: Int[Array, " R"],
        fed: Fed,
        attention: PagedAttention,
    ) -> tuple[HeadState, tuple[LayerCache, ...]]:
        """Hidden states of tokens became known. `rows` are the device rows of the batch; `caches` as in `draft`."""
        head, batch = model.head, fed.batch
        features = fed.hidden if isinstance(head, MedusaHead) else head.first_features(fed.hidden, fed.taps)
        if isinstance(head, EagleHead):
            *before, cache = caches
            row = jnp.minimum(batch.token_rows, rows.shape[0] - 1)
            kept, at = state.features[rows][row], state.positions[rows][row]
            known = (at == batch.positions - 1) & (batch.positions > 0)
            is_first = batch.q_starts[row] == jnp.arange(fed.tokens.shape[0])
            shifted = jnp.where(is_first[:, None], jnp.where(known[:, None], kept, 0), jnp.roll(features, 1, axis=0))
            cache = head.write(head.token_embeddings(fed.tokens, model), shifted, cache, batch, attention)
            caches = (*before, cache)
        written = jnp.where(fed.kept, rows, state.positions.shape[0])
        return (
            HeadState(
                features=state.features.at[written].set(features[fed.last].astype(state.features.dtype), mode="drop"),
                positions=state.positions.at[written].set(fed.positions, mode="drop"),
            ),
            caches,
        )


def _single(
    positions: Int[Array, " R"], tables: Int[Array, "R P"], active: Bool[Array, " R"], page_size: int
) -> AttentionBatch:
    """A token of each row. Rows that are not active have the dummy page, so that every row has a token."""
    count = positions.shape[0]
    positions = jnp.where(active, positions, 0)
    return AttentionBatch(
        positions=positions,
        token_rows=jnp.arange(count, dtype=jnp.int32),
        q_starts=jnp.arange(count + 1, dtype=jnp.int32),
        context_lens=positions + 1,
        block_tables=jnp.where(active[:, None], tables, 0),
        page_size=page_size,
        decode_only=True,
    )
