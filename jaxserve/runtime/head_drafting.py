"""Drafts of a head that reads the target's hidden states: EAGLE, MTP, Medusa (`models.drafts`).

Such a drafter is told more than tokens: the hidden states of each token that went through the model (`absorb`). It
keeps the newest feature of each row, and EAGLE's keys and values in an array beside those of the layers, under the same
block tables. There, slot i has the token i with the feature of the place before it: a page then depends on nothing but
its own tokens and those before them, so pages are shared and found again as the model's are. Behind pages that were
found, the feature of the last place is not known, and is zeros; heads are trained to bear that.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.drafts.config import EagleConfig, HeadConfig
from jaxserve.models.drafts.eagle import EagleHead
from jaxserve.models.drafts.medusa import MedusaHead
from jaxserve.runtime.drafter import Asked, Body, Caches, Fed
from jaxserve.runtime.drafting import DraftSizes
from jaxserve.runtime.row_state import NO_TOKEN

UNKNOWN = -1  # in place of a position: no feature is known


class HeadState(NamedTuple):
    """The newest features of the device rows: of the hidden states at `positions`, UNKNOWN where there is none."""

    features: Float[Array, "R+1 D"]
    positions: Int[Array, " R+1"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeadDrafter:
    """A `Drafter` for the head that the decoder has (`Decoder.head`).

    Attributes:
      config: of that head.
      group: of layers with its block tables.
      dtype: of activations.
    """

    config: HeadConfig
    group: int
    dtype: str

    @property
    def taps(self) -> tuple[int, ...]:
        """Layers whose inputs `absorb` wants."""
        return self.config.taps

    @property
    def decoder(self) -> DecoderConfig | None:
        """EAGLE's one layer; Medusa heads attend to nothing."""
        return self.config.decoder if isinstance(self.config, EagleConfig) else None

    @property
    def learner(self) -> None:
        return None

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

    def propose(
        self, state: HeadState, caches: Caches, asked: Asked, count: int, body: Body
    ) -> tuple[Int[Array, "R count"], Caches]:
        """`Drafter.propose`."""
        model, head = body.model, body.model.head
        known = state.positions[asked.rows] == asked.lens - 1
        features = jnp.where(known[:, None], state.features[asked.rows], 0)
        drafts = jnp.full((asked.rows.shape[0], count), NO_TOKEN, jnp.int32)
        if isinstance(head, MedusaHead):
            outputs = head.outputs(features)
            for place in range(min(count, len(outputs))):
                active = known & (asked.room > place + 1)
                drafts = asked.draw(head.logits(place, outputs[place], model), place, drafts, active, body.shards)
            return drafts, caches
        assert isinstance(head, EagleHead), head
        *before, cache = caches
        tokens = asked.sampling.last_token[asked.rows]
        for place in range(count):
            # The page of this place is the row's if the place has room; the next place is where the guess would go.
            position = asked.lens + place
            active = (asked.room > place + 1) & (position + 1 < head.config.decoder.max_position)
            batch = asked.single(position, active, body.page_size)
            x, cache = head(head.token_embeddings(tokens, model), features, cache, batch, body.attention)
            drafts = asked.draw(head.logits(x, model), place, drafts, active, body.shards)
            tokens, features = jnp.where(active, drafts[:, place], 0), head.next_features(x)
        return drafts, (*before, cache)

    def absorb(
        self, state: HeadState, caches: Caches, rows: Int[Array, " R"], fed: Fed, body: Body
    ) -> tuple[HeadState, Caches]:
        """`Drafter.absorb`: the feature of the last token that each row keeps is what the next draft begins from."""
        head, batch = body.model.head, fed.batch
        features = fed.hidden
        if isinstance(head, EagleHead):
            features = head.first_features(fed.hidden, fed.taps)
            *before, cache = caches
            row = jnp.minimum(batch.token_rows, rows.shape[0] - 1)
            kept, at = state.features[rows][row], state.positions[rows][row]
            known = (at == batch.positions - 1) & (batch.positions > 0)
            is_first = batch.q_starts[row] == jnp.arange(fed.tokens.shape[0])
            shifted = jnp.where(is_first[:, None], jnp.where(known[:, None], kept, 0), jnp.roll(features, 1, axis=0))
            cache = head.write(head.token_embeddings(fed.tokens, body.model), shifted, cache, batch, body.attention)
            caches = (*before, cache)
        last = jnp.clip(batch.q_starts[:-1] + fed.num_kept - 1, 0, fed.tokens.shape[0] - 1)
        written = jnp.where(fed.num_kept > 0, rows, state.positions.shape[0])
        newest = features[last].astype(state.features.dtype)
        return (
            HeadState(
                features=state.features.at[written].set(newest, mode="drop"),
                positions=state.positions.at[written].set(batch.positions[last], mode="drop"),
            ),
            caches,
        )
