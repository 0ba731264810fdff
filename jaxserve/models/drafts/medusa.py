"""Medusa heads: a residual block for each drafted place, all of which read the target's last hidden state.

Head i guesses the token i + 2 places behind the one whose hidden state x it reads (i from 0), since the token right
behind it is the target's own:

    logits_i = head_i(x_L),    x_{l+1} = x_l + SiLU(W_{i,l} x_l + b_{i,l})

where head_i is an output projection of its own, or the target's. No guess sees another, so all come from one call.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxserve.models.decoder import Decoder
from jaxserve.models.drafts.config import MedusaConfig
from jaxserve.models.drafts.vocabulary import DraftVocabulary
from jaxserve.models.layers import Projection
from jaxserve.models.sharding import Placement, weight


class MedusaHead(nnx.Module):
    """All places; whole on every device but for the target's output projection. Parameters start at zero."""

    def __init__(self, config: MedusaConfig, dtype: DTypeLike, *, placement: Placement) -> None:
        hidden = config.hidden_size
        self.config = config
        self.placement = placement
        self.blocks = nnx.List(
            [
                nnx.List(
                    [
                        Projection((hidden,), (hidden,), ("embed", "features"), config.bias, dtype)
                        for _ in range(config.num_layers)
                    ]
                )
                for _ in range(config.num_heads)
            ]
        )
        self.lm_heads = nnx.List(
            [
                weight(jnp.zeros((config.vocab_size, hidden), dtype), ("draft_vocab", "embed"), num_in=1)
                for _ in range(config.num_heads if config.own_lm_head else 0)
            ]
        )
        self.vocabulary = DraftVocabulary(config.vocab_size, False, placement)

    def outputs(self, hidden: Float[Array, "T D"]) -> tuple[Float[Array, "T D"], ...]:
        """Of each head, from hidden states behind the target's final norm."""
        found = []
        for block in self.blocks:
            x = hidden
            for linear in block:
                x = x + jax.nn.silu(linear(x).astype(jnp.float32)).astype(x.dtype)
            found.append(x)
        return tuple(found)

    def draft_logits(self, place: int, x: Float[Array, "R D"]) -> Float[Array, "R W"]:
        """Of one head over the whole vocabulary, float32; of heads with output projections."""
        return self.lm_heads[place].get_value().multiply(x)

    def logits(self, place: int, x: Float[Array, "R D"], target: Decoder) -> Float[Array, "R V"]:
        """Of one head over the target's vocabulary, this device's part, as `Decoder.logits`."""
        if not len(self.lm_heads):
            return target.logits(x)
        return self.vocabulary.spread(self.draft_logits(place, x), target.config.vocab_size)
