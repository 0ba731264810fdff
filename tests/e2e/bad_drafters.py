"""A drafter that no sensible person would use: what it proposes is wrong, ends the text, or is no token at all."""

import dataclasses

import jax.numpy as jnp

from jaxserve.runtime.drafting import DrafterOptions, TokenDrafter

VOCAB = 1160  # of the demo model
END = 6
OUTSIDE = 1  # of three rows, the one whose drafts are no tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Bad:
    """Another kind of draft for each of three rows. It remembers nothing."""

    def init_state(self, sizes):
        return ()

    def observe(self, state, rows, positions, tokens, known):
        return state

    def propose(self, state, rows, lengths, count):
        place = lengths[:, None] + jnp.arange(count)
        noise = (place * 7919 + rows[:, None] * 104729) % VOCAB
        outside = jnp.where(place % 3 == 0, -5, jnp.where(place % 3 == 1, VOCAB, 2**31 - 2))
        kind = rows[:, None] % 3
        return jnp.where(kind == 0, noise, jnp.where(kind == OUTSIDE, outside, END)).astype(jnp.int32)


def make_bad(options: DrafterOptions) -> TokenDrafter:
    return Bad()
