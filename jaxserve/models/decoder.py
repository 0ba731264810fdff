"""The one decoder of all families: embedding, layers, final norm, output projection; or one stage of it.

The config says what to build, `loading` fills the parameters, and the batch comes packed from `runtime`. The named
scopes are those that profiles show.

Why layers are unrolled: on CPUs a scan over stacked weights ran at 0.3-0.6 times the speed, and layers may differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int

from jaxserve.kernels.low_rank import SlotArrays, TokenSlots
from jaxserve.kernels.paged_attention import AttentionBatch, LayerCache, PagedAttention
from jaxserve.models.decoder_config import Block, DecoderConfig, LayerSpec, MlpSpec, NormPlace, RopeConfig
from jaxserve.models.experts import Experts
from jaxserve.models.layers import Attention, LayerAdapters, Mlp, Norm, Projection, Summand, soft_cap, total
from jaxserve.models.rope import RopeTable, rope_table
from jaxserve.models.sharding import Placement, WeightParameter, param, weight

__all__ = ["CachePlace", "Decoder", "DecoderConfig"]


class CachePlace(NamedTuple):
    """Where a layer has its keys and values.

    Attributes:
      group: of layers that share block tables.
      slot: of the cache arrays, which layers of several groups share: no two groups have a page in common.
    """

    group: int
    slot: int


class PictureInputs(NamedTuple):
    """What the tokens of a step have of pictures, in models that take these.

    `runtime.step` makes it from the packed buffer and the pool of embeddings; None in its place is a text-only model.

    Attributes:
      pool: embeddings that vision towers have made.
      slots: of each token its line of `pool`; -1: its embedding is that of its token id. None: so it is of all, in a
        step that feeds drawn tokens alone.
      positions: what turns queries and keys: three numbers a token (frame, row, column) or, for steps without tokens of
        pictures, one; None where the family has no sections (`DecoderConfig.has_sections`), and `AttentionBatch` has
        the only positions.
    """

    pool: Float[Array, "S D"]
    slots: Int[Array, " T"] | None
    positions: Int[Array, "3 T"] | Int[Array, " T"] | None = None


class Adapters(NamedTuple):
    """LoRA adapters in a step: of each layer those of its projections by their names (`layers.LayerAdapters`), and the
    slot of each token. `runtime.step` makes it; None in its place is an engine without adapters."""

    layers: tuple[dict[str, SlotArrays], ...]
    slots: TokenSlots


class DecoderLayer(nnx.Module):
    """Attention and a feed-forward block, each added to the hidden states, in the order that the layer's spec says."""

    def __init__(self, config: DecoderConfig, spec: LayerSpec, dtype: DTypeLike, placement: Placement) -> None:
        self.spec = spec
        self.shards = placement.shards
        before, after, of_sum = (place in spec.norms for place in (NormPlace.BEFORE, NormPlace.AFTER, NormPlace.SUM))
        self.attention_norm = _hidden_norm(config, dtype, before)
        self.attention_after = _hidden_norm(config, dtype, after)
        self.attention_sum = _hidden_norm(config, dtype, of_sum)
        self.mlp_norm = _hidden_norm(config, dtype, before and spec.block is not Block.SHARED)
        self.mlp_after = _hidden_norm(config, dtype, after)
        self.mlp_sum = _hidden_norm(config, dtype, of_sum)
        self.attention = Attention(config, spec, dtype, placement)
        self.mlp = (
            Mlp(config.hidden_size, spec.mlp, dtype)
            if isinstance(spec.mlp, MlpSpec)
            else Experts(spec.mlp, config.hidden_size, dtype, experts=placement.experts)
        )

    def __call__(
        self,
        x: Float[Array, "T D"],
        tables: dict[RopeConfig, RopeTable],
        cache: LayerCache,
        batch: AttentionBatch,
        attention: PagedAttention,
        adapters: LayerAdapters | None = None,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        with jax.named_scope("attention"):
            normed = _maybe(self.attention_norm, x)
            attended, cache = self.attention(normed, tables, cache, batch, attention, adapters)
            if self.spec.block is Block.SEQUENTIAL:
                added = total((attended,), x.dtype, self.shards)
                x = _maybe(self.attention_sum, x + _maybe(self.attention_after, added))
        with jax.named_scope("mlp"):
            inputs = normed if self.spec.block is Block.SHARED else _maybe(self.mlp_norm, x)
            fed = self._feed_forward(inputs, batch, adapters)
            if self.spec.block is Block.SEQUENTIAL:
                added = total((fed,), x.dtype, self.shards)
                return _maybe(self.mlp_sum, x + _maybe(self.mlp_after, added)), cache
            return x + total((attended, fed), x.dtype, self.shards), cache  # one sum over devices, not two

    def _feed_forward(self, x: Float[Array, "T D"], batch: AttentionBatch, adapters: LayerAdapters | None) -> Summand:
        if isinstance(self.mlp, Mlp):
            return self.mlp(x, adapters)
        return self.mlp(x, batch.token_rows < batch.context_lens.shape[0])  # padding tokens go to no expert


def _hidden_norm(config: DecoderConfig, dtype: DTypeLike, wanted: bool) -> Norm | None:
    return Norm((config.hidden_size,), ("embed",), config.norm, dtype) if wanted else None


def _maybe(norm: Norm | None, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
    return x if norm is None else norm(x)


class Decoder(nnx.Module):
    """A decoder-only transformer over a paged cache. Parameters do not change after loading.

    All parameters start at zero (norms at one): build it under `nnx.eval_shape` and load them.
    """

    def __init__(
        self, config: DecoderConfig, dtype: DTypeLike, *, placement: Placement, layers: range | None = None
    ) -> None:
        """A part of the decoder, or all of it.

        Args:
          config: with the sizes of the arrays: of one device where it is to run under `shard_map`.
          placement: of that part in the whole.
          layers: which of them this stage of a pipeline has; the first stage embeds, the last computes logits.
        """
        self.config = config
        self.placement = placement
        chosen = range(config.num_layers) if layers is None else layers
        self.is_first, self.is_last = chosen.start == 0, chosen.stop == config.num_layers
        self.head: nnx.Module | None = nnx.data(None)  # a draft head (`drafts.attaching`), which reads hidden states
        spec, hidden, tied = config.embedding, config.hidden_size, config.tied_embeddings
        width = hidden if spec.width is None else spec.width

        def table(num_in: int, *, tied: bool = False) -> WeightParameter:
            return weight(jnp.zeros((config.vocab_size, width), dtype), ("vocab", "embed"), num_in=num_in, tied=tied)

        def projection(wanted: bool, *axes: tuple[str, int]) -> Projection | None:
            (out_axis, out_size), (in_axis, in_size) = axes
            return Projection((in_size,), (out_size,), (out_axis, in_axis), False, dtype) if wanted else None

        has_table, is_narrow = self.is_first or (self.is_last and tied), spec.width is not None
        positions = (spec.num_positions + spec.position_offset, hidden)
        multiplied = self.is_last and tied
        self.embedding = table(1 if multiplied else 0, tied=multiplied and self.is_first) if has_table else None
        self.embed_in = projection(self.is_first and is_narrow, ("embed", hidden), ("width", width))
        self.position_embedding = (
            weight(jnp.zeros(positions, dtype), ("position", "embed"), num_in=0)
            if self.is_first and spec.num_positions
            else None
        )
        self.embedding_norm = _hidden_norm(config, dtype, self.is_first and spec.norm)
        self.layers = nnx.List([DecoderLayer(config, config.layers[i], dtype, placement) for i in chosen])
        self.final_norm = _hidden_norm(config, dtype, self.is_last and config.final_norm)
        self.embed_out = projection(self.is_last and is_narrow, ("width", width), ("embed", hidden))
        self.lm_head = table(1) if self.is_last and not tied else None
        self.lm_head_bias = (
            param(jnp.zeros(config.vocab_size, dtype), ("vocab",)) if self.is_last and config.lm_head_bias else None
        )

    def __call__(
        self,
        inputs: Int[Array, " T"] | Float[Array, "T D"],
        caches: Sequence[LayerCache],
        batches: Sequence[AttentionBatch],
        places: Sequence[CachePlace],
        attention: PagedAttention,
        rope_lengths: Int[Array, " R"] | None = None,
        pictures: PictureInputs | None = None,
    ) -> tuple[Float[Array, "T D"], tuple[LayerCache, ...]]:
        """Hidden states after the final norm, and the caches with the keys and values of these tokens written.

        `inputs` are tokens; a stage that is not the first takes the hidden states of the one before, and one that is
        not the last returns them before the final norm. `places` has an entry for each layer: `batches` has the block
        tables of each group, and is the same in everything else; `caches` has an array (or a tree of them) for each
        slot, and should be donated by the jit around this. The rows of padding tokens are finite and mean nothing.

        `rope_lengths` matters to the dynamic NTK scaling alone, which turns a token by an angle that depends on the
        length of the sequence it was computed in. A paged cache keeps keys as they were turned when written, so that
        length must be a property of the token, not of the step: None takes position + 1, which equals HF for prompts
        within the trained length and any number of tokens generated after them, and does not depend on chunks,
        preemption or prefix hits. Giving the prompt length of each row takes max(prompt length, position + 1), which
        equals HF's single prefill of a prompt beyond the trained length too; pages of such prompts must then not be
        shared between prompts of different lengths.
        """
        return self.with_taps(inputs, caches, batches, places, attention, rope_lengths, pictures)[:2]

    def with_taps(
        self,
        inputs: Int[Array, " T"] | Float[Array, "T D"],
        caches: Sequence[LayerCache],
        batches: Sequence[AttentionBatch],
        places: Sequence[CachePlace],
        attention: PagedAttention,
        rope_lengths: Int[Array, " R"] | None = None,
        pictures: PictureInputs | None = None,
        *,
        taps: Sequence[int] = (),
        adapters: Adapters | None = None,
    ) -> tuple[Float[Array, "T D"], tuple[LayerCache, ...], tuple[Float[Array, "T D"], ...]]:
        """`__call__`, and the hidden states that layers of the numbers `taps` are given, which draft heads read.

        The number of layers stands for the hidden states behind the last one, before the final norm. Of a whole decoder
        alone, since a stage of a pipeline has not all layers. `adapters`: whose products are added.
        """
        assert not taps or (self.is_first and self.is_last), taps
        batch, written = batches[0], list(caches)
        tapped: dict[int, Float[Array, "T D"]] = {}
        x = self._embed(inputs, batch.positions, pictures) if self.is_first else inputs  # [T, D]
        with jax.named_scope("rope_table"):
            lengths = batch.positions + 1
            if rope_lengths is not None:
                rows = jnp.minimum(batch.token_rows, rope_lengths.shape[0] - 1)  # padding tokens name no row
                lengths = jnp.maximum(lengths, rope_lengths[rows])
            turns = batch.positions if pictures is None or pictures.positions is None else pictures.positions
            tables = {rope: rope_table(rope, turns, lengths) for rope in self.config.ropes}
        for index, (layer, (group, slot)) in enumerate(zip(self.layers, places, strict=True)):
            tapped[index] = x
            with jax.named_scope(f"layer_{index}"):
                own = None if adapters is None else LayerAdapters(adapters.layers[index], adapters.slots)
                x, written[slot] = layer(x, tables, written[slot], batches[group], attention, own)
        tapped[len(self.layers)] = x
        if self.final_norm is not None:
            with jax.named_scope("final_norm"):
                x = self.final_norm(x)
        return x, tuple(written), tuple(tapped[tap] for tap in taps)

    def token_embeddings(self, tokens: Int[Array, " T"]) -> Float[Array, "T D"]:
        """Embeddings without positions, which a draft head reads, too.

        Each device looks up the tokens it has; the others' contribution is zero, so the sum is exact.
        """
        assert self.embedding is not None
        spec, shards = self.config.embedding, self.placement.shards
        x = shards.sum(self.embedding.get_value().take(shards.local_ids(tokens, self.config.vocab_size)))
        if spec.scale != 1.0:
            x = x * jnp.asarray(spec.scale, x.dtype)
        return x if self.embed_in is None else self.embed_in(x)

    @jax.named_scope("embed")
    def _embed(
        self, tokens: Int[Array, " T"], positions: Int[Array, " T"], pictures: PictureInputs | None
    ) -> Float[Array, "T D"]:
        spec, x = self.config.embedding, self.token_embeddings(tokens)
        if pictures is not None and pictures.slots is not None:
            seen = pictures.pool[jnp.maximum(pictures.slots, 0)].astype(x.dtype)
            x = jnp.where((pictures.slots >= 0)[:, None], seen, x)
        if self.position_embedding is not None:
            x = x + self.position_embedding.get_value().take(positions + spec.position_offset)
        return _maybe(self.embedding_norm, x)

    @jax.named_scope("logits")
    def logits(self, hidden: Float[Array, "R D"]) -> Float[Array, "R V"]:
        """Unnormalised log-probabilities of the next token, float32, for hidden states that `__call__` returned.

        Of this device's part of the vocabulary; padding has -inf.
        """
        head, shards = self.embedding if self.lm_head is None else self.lm_head, self.placement.shards
        assert head is not None, "logits are the last stage's"
        if self.embed_out is not None:
            hidden = self.embed_out(hidden)
        logits = head.get_value().multiply(hidden)
        if self.lm_head_bias is not None:
            logits = logits + self.lm_head_bias[...].astype(jnp.float32)
        logits = soft_cap(logits, self.config.logit_soft_cap)
        size = logits.shape[1]
        if size * shards.count == self.placement.num_tokens:
            return logits
        token_ids = shards.start(size) + jnp.arange(size)
        return jnp.where(token_ids < self.placement.num_tokens, logits, -jnp.inf)
