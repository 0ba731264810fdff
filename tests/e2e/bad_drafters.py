"""Drafters that no sensible person would use: what they propose is wrong, or no token at all."""

import dataclasses

import jax.numpy as jnp

from jaxserve.runtime.drafting import DrafterOptions, TokenDrafter

VOCAB = 1160  # of the demo model


@dataclasses.dataclass(frozen=True, slots=True)
class Bad:
    """`kind` says what it proposes; it remembers nothing."""

    kind: str

    def init_state(self, sizes):
        return ()

    def observe(self, state, rows, positions, tokens, known):
        return state

    def propose(self, state, rows, lengths, count):
        place = lengths[:, None] + jnp.arange(count)
        if self.kind == "noise":
            return (place * 7919 + rows[:, None] * 104729) % VOCAB
        if self.kind == "outside":
            return jnp.where(place % 3 == 0, -5, jnp.where(place % 3 == 1, VOCAB, 2**31 - 2)).astype(jnp.int32)
        return jnp.full(place.shape, int(self.kind), jnp.int32)  # always the same token


def make_noise(options: DrafterOptions) -> TokenDrafter:
    return Bad("noise")


def make_outside(options: DrafterOptions) -> TokenDrafter:
    return Bad("outside")


def make_stop(options: DrafterOptions) -> TokenDrafter:
    return Bad("6")
