"""EAGLE heads of the first and the third kind, and MTP heads: one decoder layer that guesses token after token.

Step j of a draft reads the token before the guess and a feature: a projection of the target's hidden states where the
target has computed them, the head's own output behind a guess. Keys and values of the layer lie in a paged cache, so
attention is the function that the caller gives, as in `decoder`.

With e the token's embedding and f its feature,

    EAGLE    x = layer(fc [e; f])                                        logits = target(x)     f' = x
    EAGLE-3  x = layer(e, f), whose q, k, v read [norm(e); norm(f)]      logits = own(norm(x))  f' = x
    MTP      x = norm(layer(fc [norm(e); norm(f)]))                      logits = target(x)     f' = x

where EAGLE's layer has no first norm, and EAGLE-3's first feature is fc [h_a; h_b; h_c].
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from jaxserve.kernels.paged_attention import AttentionBatch, LayerCache, PagedAttention
from jaxserve.models.decoder import Decoder, DecoderLayer
from jaxserve.models.decoder_config import RopeConfig
from jaxserve.models.drafts.config import EagleConfig, HeadKind
from jaxserve.models.drafts.vocabulary import DraftVocabulary
from jaxserve.models.layers import Attention, Norm, Projection, total
from jaxserve.models.rope import RopeTable, rope_table
from jaxserve.models.sharding import Placement, weight


class WideLayer(DecoderLayer):
    """The layer of EAGLE-3, whose queries, keys and values read an embedding beside a feature."""

    def __init__(self, config: EagleConfig, dtype: DTypeLike, placement: Placement) -> None:
        decoder = config.decoder
        super().__init__(decoder, decoder.layers[0], dtype, placement)
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = Norm((decoder.hidden_size,), ("embed",), decoder.norm, dtype)
        self.attention = Attention(decoder, decoder.layers[0], dtype, placement, num_inputs=2 * decoder.hidden_size)

    def inputs(
        self, embeddings: Float[Array, "T D"], features: Float[Array, "T D"]
    ) -> tuple[Float[Array, "T E"], Float[Array, "T D"]]:
        """What queries, keys and values are made of, E = 2 D, and its second half: the normalised features."""
        assert self.attention_norm is not None
        normed = self.hidden_norm(features)
        return jnp.concatenate([self.attention_norm(embeddings), normed], axis=1), normed

    def read(
        self,
        embeddings: Float[Array, "T D"],
        features: Float[Array, "T D"],
        tables: dict[RopeConfig, RopeTable],
        cache: LayerCache,
        batch: AttentionBatch,
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """What the layer makes of both, before the final norm."""
        assert self.mlp_norm is not None
        with jax.named_scope("attention"):
            inputs, normed = self.inputs(embeddings, features)
            x = normed if self.norm_before_residual else features
            attended, cache = self.attention(inputs, tables, cache, batch, attention)
            x = x + total((attended,), x.dtype, self.shards)
        with jax.named_scope("mlp"):
            fed = self._feed_forward(self.mlp_norm(x), batch, adapters=None)
            return x + total((fed,), x.dtype, self.shards), cache


class EagleHead(nnx.Module):
    """A head with the sizes of `config`, for one device of `placement`. Parameters start at zero, as a decoder's."""

    def __init__(self, config: EagleConfig, dtype: DTypeLike, *, placement: Placement) -> None:
        decoder, hidden = config.decoder, config.hidden_size
        self.config = config
        self.placement = placement
        is_eagle3, is_mtp = config.kind is HeadKind.EAGLE3, config.kind is HeadKind.MTP
        num_inputs = (len(config.taps) if is_eagle3 else 2) * hidden

        def norm(wanted: bool, size: int = hidden, axis: str = "embed") -> Norm | None:
            return Norm((size,), (axis,), decoder.norm, dtype) if wanted else None

        self.fc = Projection((num_inputs,), (hidden,), ("embed", "features"), config.fc_bias, dtype)
        self.input_norm = norm(config.norm_before_fc, num_inputs, "features")
        self.embedding_norm, self.feature_norm = norm(is_mtp), norm(is_mtp)
        self.layers = nnx.List(
            [
                WideLayer(config, dtype, placement)
                if is_eagle3
                else DecoderLayer(decoder, decoder.layers[0], dtype, placement)
            ]
        )
        if config.kind is HeadKind.EAGLE:
            self.layers[0].attention_norm = None
        self.final_norm = norm(is_eagle3 or is_mtp)
        self.embedding = (
            weight(jnp.zeros((decoder.vocab_size, hidden), dtype), ("vocab", "embed"), num_in=0)
            if config.own_embedding
            else None
        )
        # Whole on every device: it is small, and its ids are spread over the target's vocabulary.
        self.lm_head = (
            weight(jnp.zeros((config.draft_vocab_size, hidden), dtype), ("draft_vocab", "embed"), num_in=1)
            if config.own_lm_head
            else None
        )
        self.vocabulary = DraftVocabulary(config.draft_vocab_size, config.is_mapped, placement)

    def first_features(self, hidden: Float[Array, "T D"], taps: tuple[Float[Array, "T D"], ...]) -> Float[Array, "T D"]:
        """Features of tokens that the target has computed, from `Decoder.with_taps`."""
        if self.config.kind is not HeadKind.EAGLE3:
            return hidden
        x = jnp.concatenate(taps, axis=1)
        return self.fc(x if self.input_norm is None else self.input_norm(x))

    def token_embeddings(self, tokens: Int[Array, " T"], target: Decoder) -> Float[Array, "T D"]:
        """Of the head's own table, or of the target's."""
        if self.embedding is None:
            return target.token_embeddings(tokens)
        shards = self.placement.shards
        local = shards.local_ids(tokens, self.config.decoder.vocab_size)
        return shards.sum(self.embedding.get_value().take(local))

    def __call__(
        self,
        embeddings: Float[Array, "T D"],
        features: Float[Array, "T D"],
        cache: LayerCache,
        batch: AttentionBatch,
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        """Outputs, from which the next features and the logits follow, and the cache with the tokens written.

        `features` of a token are those of the place before it. Rows of padding tokens are finite and mean nothing.
        """
        layer, tables = self.layers[0], self._tables(batch)
        if isinstance(layer, WideLayer):
            return layer.read(embeddings, features, tables, cache, batch, attention)
        x, cache = layer(self._joined(embeddings, features), tables, cache, batch, attention)
        return x if self.final_norm is None else self.final_norm(x), cache

    def write(
        self,
        embeddings: Float[Array, "T D"],
        features: Float[Array, "T D"],
        cache: LayerCache,
        batch: AttentionBatch,
        attention: PagedAttention,
    ) -> LayerCache:
        """The cache of `__call__` alone. The head has one layer, so keys and values need no attention."""
        layer, tables = self.layers[0], self._tables(batch)
        if isinstance(layer, WideLayer):
            return layer.attention.write(layer.inputs(embeddings, features)[0], tables, cache, batch, attention)
        x = self._joined(embeddings, features)
        x = x if layer.attention_norm is None else layer.attention_norm(x)
        return layer.attention.write(x, tables, cache, batch, attention)

    @jax.named_scope("rope_table")
    def _tables(self, batch: AttentionBatch) -> dict[RopeConfig, RopeTable]:
        ropes = self.config.decoder.ropes
        return {rope: rope_table(rope, batch.positions, batch.positions + 1) for rope in ropes}

    def _joined(self, embeddings: Float[Array, "T D"], features: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """The input of a layer that reads both through `fc`."""
        if self.embedding_norm is not None and self.feature_norm is not None:
            embeddings, features = self.embedding_norm(embeddings), self.feature_norm(features)
        return self.fc(jnp.concatenate([embeddings, features], axis=1))

    def next_features(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        """Features of the place behind a guess, from outputs of `__call__`."""
        return self._normed(x) if self.config.norm_output else x

    def draft_logits(self, x: Float[Array, "R D"]) -> Float[Array, "R W"]:
        """Logits over the W tokens of the head's own vocabulary, float32; of heads with an output projection."""
        assert self.lm_head is not None, "the target's output projection follows"
        return self.lm_head.get_value().multiply(self._normed(x))

    def logits(self, x: Float[Array, "R D"], target: Decoder) -> Float[Array, "R V"]:
        """Over the target's vocabulary, this device's part, as `Decoder.logits`; -inf for tokens that are no drafts."""
        if self.lm_head is None:
            return target.logits(x)
        return self.vocabulary.spread(self.draft_logits(x), target.config.vocab_size)

    def _normed(self, x: Float[Array, "R D"]) -> Float[Array, "R D"]:
        """MTP's outputs have gone through the norm already."""
        return x if self.final_norm is None or self.config.kind is HeadKind.MTP else self.final_norm(x)
