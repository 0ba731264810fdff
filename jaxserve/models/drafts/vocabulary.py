"""The part of the target's vocabulary that a draft head chooses from."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxserve.models.sharding import Placement, param


class DraftVocabulary(nnx.Module):
    """The target's id of each draft id, `ids` [W] int32, where the two vocabularies differ."""

    def __init__(self, size: int, is_mapped: bool, placement: Placement) -> None:
        self.size = size
        self.placement = placement
        self.ids = param(jnp.zeros(size, jnp.int32), ("draft_vocab",)) if is_mapped else None

    def spread(self, logits: Float[Array, "R W"], local_size: int) -> Float[Array, "R V"]:
        """Logits of all draft ids as those of this device's `local_size` tokens of the target; -inf for the others."""
        ids = jnp.arange(self.size) if self.ids is None else self.ids[...]
        local = self.placement.shards.local_ids(ids, local_size)
        out = jnp.full((logits.shape[0], local_size), -jnp.inf, logits.dtype)
        return out.at[:, local].set(logits, mode="drop")
