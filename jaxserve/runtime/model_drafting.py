"""Drafts of a small model with the same vocabulary (speculative decoding as first published: arXiv:2211.17192).

It is a whole decoder that reads tokens alone. Its keys and values lie in arrays beside those of the model's layers,
under the same block tables, so that pages are shared, copied, given up and found again for both at once. That takes one
rule: every token that goes through the model goes through it, too, in the same step (`absorb`), prompts included.
Rejected drafts lie behind the row's length in its pages, as in the model's, and are written again.

A draft of k tokens is k passes of one token a row, and `absorb` one pass over all that was fed: where all drafts were
drawn, the last one has not been through the small model before.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxserve.models.decoder import CachePlace, Decoder
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.runtime.drafter import Asked, Body, Caches, Fed
from jaxserve.runtime.drafting import DraftSizes
from jaxserve.runtime.row_state import NO_TOKEN


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelDrafter:
    """A `Drafter` for the small decoder that the model carries (`Decoder.head`). It remembers nothing but its pages.

    Attributes:
      config: of the small model.
      group: of layers with its block tables.
    """

    config: DecoderConfig
    group: int

    @property
    def decoder(self) -> DecoderConfig:
        return self.config

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    @property
    def learner(self) -> None:
        return None

    def init_state(self, sizes: DraftSizes) -> tuple[()]:
        """`Drafter.init_state`."""
        return ()

    def observe(
        self,
        state: tuple[()],
        rows: Int[Array, " M"],
        positions: Int[Array, " M"],
        tokens: Int[Array, " M"],
        known: Bool[Array, " M"],
    ) -> tuple[()]:
        """`Drafter.observe`: what is in the model's pages is in its own."""
        return state

    def propose(
        self, state: tuple[()], caches: Caches, asked: Asked, count: int, body: Body
    ) -> tuple[Int[Array, "R count"], Caches]:
        """`Drafter.propose`. Past its last position no drafts are made."""
        small, (before, own) = self._model(body), self._split(caches)
        drafts = jnp.full((asked.rows.shape[0], count), NO_TOKEN, jnp.int32)
        tokens = asked.sampling.last_token[asked.rows]
        for place in range(count):
            # The page of this place is the row's if the place has room; the next place is where the guess would go.
            position = asked.lens + place
            active = (asked.room > place + 1) & (position + 1 < self.config.max_position)
            batch = asked.single(position, active, body.page_size)
            hidden, own = small(tokens, own, [batch], self._places, body.attention)
            drafts = asked.draw(small.logits(hidden), place, drafts, active, body.shards)
            tokens = jnp.where(active, drafts[:, place], 0)
        return drafts, (*before, *own)

    def absorb(
        self, state: tuple[()], caches: Caches, rows: Int[Array, " R"], fed: Fed, body: Body
    ) -> tuple[tuple[()], Caches]:
        """`Drafter.absorb`."""
        before, own = self._split(caches)
        _, own = self._model(body)(fed.tokens, own, [fed.batch], self._places, body.attention)
        return state, (*before, *own)

    def _model(self, body: Body) -> Decoder:
        assert isinstance(body.model.head, Decoder), body.model.head
        return body.model.head

    def _split(self, caches: Caches) -> tuple[Caches, Caches]:
        """Those of the model, and its own."""
        at = len(caches) - self.config.num_layers
        return caches[:at], caches[at:]

    @property
    def _places(self) -> list[CachePlace]:
        """All layers have the one block table, and an array each."""
        return [CachePlace(group=0, slot=number) for number in range(self.config.num_layers)]
