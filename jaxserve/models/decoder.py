"""The one decoder of all families: embedding, layers, final norm, output projection; or one stage of it.

The config says what to build, `loading` fills the parameters, and the batch comes packed from `runtime`. The named
scopes are those that profiles show.

Why layers are unrolled: on CPUs a scan over stacked weights ran at 0.3-0.6 times the speed, and windows may differ by
layer.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, LayerCache, PagedAttention
from jaxserve.models.decoder_config import DecoderConfig, MlpKind, NormKind, PositionKind
from jaxserve.models.layers import Attention, GatedMlp, RmsNorm, soft_cap
from jaxserve.models.rope import RopeTable, rope_table
from jaxserve.models.sharding import WHOLE, Shards, weight

__all__ = ["Decoder", "DecoderConfig"]


class DecoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, window: int | None, dtype: DTypeLike, shards: Shards) -> None:
        assert config.norm is NormKind.RMS and config.mlp is MlpKind.GATED, (config.norm, config.mlp)
        self.attention_norm = RmsNorm(config.hidden_size, "embed", config.norm_eps, dtype)
        self.attention = Attention(config, window, dtype, shards)
        self.mlp_norm = RmsNorm(config.hidden_size, "embed", config.norm_eps, dtype)
        self.mlp = GatedMlp(config, dtype, shards)

    def __call__(
        self,
        x: Float[Array, "T D"],
        table: RopeTable,
        cache: LayerCache,
        batch: AttentionBatch,
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        with jax.named_scope("attention"):
            attended, cache = self.attention(self.attention_norm(x), table, cache, batch, attention)
            x = x + attended
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x)), cache


class Decoder(nnx.Module):
    """A decoder-only transformer over a paged cache. Parameters do not change after loading.

    All parameters start at zero (norms at one): build it under `nnx.eval_shape` and load them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        dtype: DTypeLike,
        *,
        layers: range | None = None,
        shards: Shards = WHOLE,
        num_tokens: int | None = None,
    ) -> None:
        """A part of the decoder, or all of it.

        Args:
          config: with the sizes of the arrays: of one device where it is to run under `shard_map`.
          layers: which of them this stage of a pipeline has; the first stage embeds, the last computes logits.
          shards: the devices that share each layer.
          num_tokens: the vocabulary without padding, over all devices; None: `config.vocab_size` of each.
        """
        assert config.position is PositionKind.ROPE, config.position
        self.config = config
        self.shards = shards
        self.num_tokens = num_tokens if num_tokens is not None else config.vocab_size * shards.count
        chosen = range(config.num_layers) if layers is None else layers
        self.is_first, self.is_last = chosen.start == 0, chosen.stop == config.num_layers
        self.embedding = (
            weight(
                jnp.zeros((config.vocab_size, config.hidden_size), dtype),
                ("vocab", "embed"),
                num_in=1 if self.is_last and config.tied_embeddings else 0,
            )
            if self.is_first or (self.is_last and config.tied_embeddings)
            else None
        )
        self.layers = nnx.List([DecoderLayer(config, config.windows[i], dtype, shards) for i in chosen])
        self.final_norm = RmsNorm(config.hidden_size, "embed", config.norm_eps, dtype) if self.is_last else None
        self.lm_head = (
            weight(jnp.zeros((config.vocab_size, config.hidden_size), dtype), ("vocab", "embed"), num_in=1)
            if self.is_last and not config.tied_embeddings
            else None
        )

    def __call__(
        self,
        inputs: Int[Array, " T"] | Float[Array, "T D"],
        caches: tuple[LayerCache, ...],
        batch: AttentionBatch,
        attention: PagedAttention,
        rope_lengths: Int[Array, " R"] | None = None,
    ) -> tuple[Float[Array, "T D"], tuple[LayerCache, ...]]:
        """Hidden states after the final norm, and the caches with the keys and values of these tokens written.

        `inputs` are tokens; a stage that is not the first takes the hidden states of the one before, and one that is
        not the last returns them before the final norm. `caches` has one entry per layer and should be donated by the
        jit around this. The rows of padding tokens are finite and mean nothing.

        `rope_lengths` matters to the dynamic NTK scaling alone, which turns a token by an angle that depends on the
        length of the sequence it was computed in. A paged cache keeps keys as they were turned when written, so that
        length must be a property of the token, not of the step: None takes position + 1, which equals HF for prompts
        within the trained length and any number of tokens generated after them, and does not depend on chunks,
        preemption or prefix hits. Giving the prompt length of each row takes max(prompt length, position + 1), which
        equals HF's single prefill of a prompt beyond the trained length too; pages of such prompts must then not be
        shared between prompts of different lengths.
        """
        assert len(caches) == len(self.layers), (len(caches), len(self.layers))
        x = self._embed(inputs) if self.is_first else inputs  # [T, D]
        with jax.named_scope("rope_table"):
            lengths = batch.positions + 1
            if rope_lengths is not None:
                rows = jnp.minimum(batch.token_rows, rope_lengths.shape[0] - 1)  # padding tokens name no row
                lengths = jnp.maximum(lengths, rope_lengths[rows])
            table = rope_table(self.config.rope, batch.positions, lengths)
        written = []
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            with jax.named_scope(f"layer_{index}"):
                x, cache = layer(x, table, cache, batch, attention)
            written.append(cache)
        if self.final_norm is None:
            return x, tuple(written)
        with jax.named_scope("final_norm"):
            return self.final_norm(x), tuple(written)

    @jax.named_scope("embed")
    def _embed(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Each device looks up the tokens it has; the others' contribution is zero, so the sum is exact."""
        assert self.embedding is not None
        local = self.shards.local_ids(tokens, self.config.vocab_size)
        return self.shards.sum(self.embedding.get_value().take(local))

    @jax.named_scope("logits")
    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Unnormalised log-probabilities of the next token, float32, for hidden states that `__call__` returned.

        Of this device's part of the vocabulary; padding has -inf.
        """
        head = self.embedding if self.lm_head is None else self.lm_head
        assert head is not None, "logits are the last stage's"
        logits = soft_cap(head.get_value().multiply(hidden), self.config.logit_soft_cap)
        size = logits.shape[1]
        if size * self.shards.count == self.num_tokens:
            return logits
        token_ids = self.shards.start(size) + jnp.arange(size)
        return jnp.where(token_ids < self.num_tokens, logits, -jnp.inf)
