"""The parts of a decoder: projections, norms, attention block, feed-forward block.

Parameter layouts, their logical axes and the arithmetic on them are here. The layout of the cache is not: attention
itself is the function that the block is given.

Kernels are [out, in] (`kernels.xla_matmul` says why). Fused parts are grouped by key/value head, and gate and up share
the column index, so that cutting the named axis over devices gives each device whole heads and matching halves.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxserve.kernels.activations import ACTIVATIONS
from jaxserve.kernels.low_rank import SlotArrays, TokenAdapters, TokenSlots
from jaxserve.kernels.paged_attention import (
    AttentionBatch,
    AttentionSpec,
    AttentionUse,
    KVScales,
    LayerCache,
    PagedAttention,
)
from jaxserve.kernels.row_sum import row_sum
from jaxserve.models.decoder_config import DecoderConfig, LayerSpec, MlpSpec, NormKind, NormSpec, QkNorm, RopeConfig
from jaxserve.models.rope import RopeTable, rotate
from jaxserve.models.sharding import Axes, Placement, Shards, param, weight


def soft_cap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap), or x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention_spec(config: DecoderConfig, layer: LayerSpec) -> AttentionSpec:
    """The use of paged attention by a layer."""
    return AttentionSpec(
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=layer.scale,
        window=layer.window,
        soft_cap=layer.soft_cap,
    )


def attention_use(
    config: DecoderConfig, layer: LayerSpec, *, page_size: int, query_dtype: DTypeLike, cache_dtype: DTypeLike
) -> AttentionUse:
    """All that is known of a layer's calls of paged attention. `config` has the sizes of one device."""
    return AttentionUse(
        spec=attention_spec(config, layer),
        page_size=page_size,
        query_dtype=jnp.dtype(query_dtype).name,
        cache_dtype=jnp.dtype(cache_dtype).name,
        sinks=layer.sinks,
        alibi=layer.alibi is not None,
    )


class Norm(nnx.Module):
    """Normalises over the last axis in float32, and returns x's dtype.

    `axes` name the axes of the weight: of the last axis of x, or of all after the first.
    """

    def __init__(self, shape: tuple[int, ...], axes: Axes, spec: NormSpec, dtype: DTypeLike) -> None:
        self.spec = spec
        self.weight = param(jnp.zeros(shape, dtype) if spec.zero_centred else jnp.ones(shape, dtype), axes)
        self.bias = param(jnp.zeros(shape, dtype), axes) if spec.bias else None

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        if self.spec.kind is NormKind.LAYER:
            wide = wide - _mean(wide)
        return self.scaled(wide, _mean(jnp.square(wide)), x.dtype)

    def scaled(self, wide: Float[Array, "... D"], variance: Float[Array, "... 1"], dtype: DTypeLike) -> Array:
        """`wide` over the root of its variance, times the weight, plus the bias."""
        normed = wide * jax.lax.rsqrt(variance + self.spec.eps)
        if self.spec.round_first:
            normed = normed.astype(dtype) * self.weight[...]
        else:
            weight = self.weight[...].astype(jnp.float32)
            normed = normed * (1 + weight if self.spec.zero_centred else weight)
        if self.bias is not None:
            normed = normed + self.bias[...].astype(normed.dtype)
        return normed.astype(dtype)


def _mean(wide: Float[Array, "... D"]) -> Float[Array, "... 1"]:
    """Over the last axis, in an order that depends on nothing but its length."""
    size = wide.shape[-1]
    return row_sum(wide.reshape(-1, size)).reshape(*wide.shape[:-1], 1) / size


class JointNorm(Norm):
    """Normalises all heads of a token together: the mean of squares is over the heads of all devices.

    `num_heads`: over all devices, those of padding not counted (they are zero), each copy counted once.
    """

    def __init__(
        self, shape: tuple[int, ...], axes: Axes, spec: NormSpec, num_heads: int, dtype: DTypeLike, shards: Shards
    ) -> None:
        assert spec.kind is NormKind.RMS and not spec.bias, spec
        super().__init__(shape, axes, spec, dtype)
        self.num_heads = num_heads
        self.shards = shards

    def __call__(self, x: Float[Array, "T M H"]) -> Float[Array, "T M H"]:
        wide = x.astype(jnp.float32)
        squares = self.shards.sum(row_sum(jnp.square(wide).reshape(wide.shape[0], -1)))  # [T, 1]
        variance = squares.reshape(-1, 1, 1) / (self.num_heads * wide.shape[-1])
        return self.scaled(wide, variance, x.dtype)


class Projection(nnx.Module):
    """x [T, *in] to [T, *out] in x's dtype, with an optional bias [*out]."""

    def __init__(
        self, in_shape: tuple[int, ...], out_shape: tuple[int, ...], axes: Axes, bias: bool, dtype: DTypeLike
    ) -> None:
        self.kernel = weight(jnp.zeros((*out_shape, *in_shape), dtype), axes, num_in=len(in_shape))
        self.bias = param(jnp.zeros(out_shape, dtype), axes[: len(out_shape)]) if bias else None

    def __call__(self, x: Float[Array, "T ..."], adapters: TokenAdapters | None = None) -> Float[Array, "T ..."]:
        out = self._product(x, adapters)
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out.astype(x.dtype)

    def summand(self, x: Float[Array, "T ..."], adapters: TokenAdapters | None = None) -> "Summand":
        """The product of this device, where the *in* axes are cut over devices; and so is what adapters add."""
        return Summand(self._product(x, adapters), None if self.bias is None else self.bias[...])

    def _product(self, x: Float[Array, "T ..."], adapters: TokenAdapters | None) -> Float[Array, "T ..."]:
        kernel = self.kernel.get_value()
        return kernel.multiply(x) if adapters is None else kernel.multiply_adapted(x, adapters)


class LayerAdapters(NamedTuple):
    """The adapters of a layer, and the slots of the step's tokens.

    `projections` has the adapters of each projection that adapters can change, by its name in the layer.
    """

    projections: dict[str, SlotArrays]
    slots: TokenSlots


def _of(adapters: LayerAdapters | None, name: str) -> TokenAdapters | None:
    """Those of a projection."""
    return None if adapters is None else TokenAdapters(adapters.projections[name], adapters.slots)


class Summand(NamedTuple):
    """What one sub-block adds to the hidden states: a product, float32, of this device alone, and a bias of all."""

    product: Float[Array, "T D"]
    bias: Float[Array, " D"] | Float[Array, "T D"] | None


def total(summands: tuple[Summand, ...], dtype: DTypeLike, shards: Shards) -> Float[Array, "T D"]:
    """The sum of all, over all devices, with one collective.

    It is rounded to the dtype of activations before it travels: half the bytes in bfloat16, and the rounding that a
    single device makes at the end anyway.
    """
    out = sum((s.product for s in summands[1:]), summands[0].product)
    if shards.count > 1:
        out = shards.sum(out.astype(dtype)).astype(jnp.float32)
    for summand in summands:
        if summand.bias is not None:
            out = out + summand.bias.astype(jnp.float32)
    return out.astype(dtype)


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache of one layer.

    `qkv.kernel` is [K, G + 2, H, D]: for each key/value head its G query heads, then its key, then its value.
    `k_scale`, `v_scale` are float32 [K], of a cache of eight bits: it keeps keys and values divided by them.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: LayerSpec,
        dtype: DTypeLike,
        placement: Placement,
        num_inputs: int | None = None,
    ) -> None:
        """`num_inputs`: numbers of a token that queries, keys and values are made of; None: hidden_size of them."""
        heads, kv_heads, head_dim = config.num_query_heads, config.num_kv_heads, config.head_dim
        self.spec = attention_spec(config, layer)
        self.layer = layer
        self.placement = placement
        self.qkv = Projection(
            (num_inputs or config.hidden_size,),
            (kv_heads, config.group_size + 2, head_dim),
            ("kv_heads", "slots", "head_dim", "embed"),
            layer.qkv_bias,
            dtype,
        )
        self.out = Projection(
            (heads, head_dim), (config.hidden_size,), ("embed", "heads", "head_dim"), layer.out_bias, dtype
        )
        self.q_norm = self._qk_norm(config, "heads", heads, placement.num_query_heads, dtype)
        self.k_norm = self._qk_norm(config, "kv_heads", kv_heads, placement.num_kv_heads, dtype)
        self.sinks = param(jnp.zeros(heads, dtype), ("heads",)) if layer.sinks else None
        self.k_scale, self.v_scale = (
            param(jnp.ones(kv_heads, jnp.float32), ("kv_heads",)) if config.cache_scales else None for _ in range(2)
        )

    def _qk_norm(self, config: DecoderConfig, axis: str, local: int, whole: int, dtype: DTypeLike) -> Norm | None:
        """Of queries or of keys: `local` heads of this device, of `whole` in all."""
        if self.layer.qk_norm is QkNorm.HEAD:
            return Norm((config.head_dim,), ("head_dim",), config.norm, dtype)
        if self.layer.qk_norm is QkNorm.JOINT:
            shape, axes = (local, config.head_dim), (axis, "head_dim")
            return JointNorm(shape, axes, config.norm, whole, dtype, self.placement.shards)
        return None

    def __call__(
        self,
        x: Float[Array, "T D"],
        tables: dict[RopeConfig, RopeTable],
        cache: LayerCache,
        batch: AttentionBatch,
        attention: PagedAttention,
        adapters: LayerAdapters | None = None,
    ) -> tuple[Summand, LayerCache]:
        """What this device adds to the hidden states, and the cache. `tables` has one for each rotation."""
        q, k, v = self._queries_keys_values(x, tables, adapters)
        with jax.named_scope("attend"):
            sinks = None if self.sinks is None else self.sinks[...]
            out, cache = attention.attend(q, k, v, cache, batch, self.spec, sinks, self._slopes(), self._scales())
        with jax.named_scope("out"):
            return self.out.summand(out, _of(adapters, "out")), cache

    def write(
        self,
        x: Float[Array, "T D"],
        tables: dict[RopeConfig, RopeTable],
        cache: LayerCache,
        batch: AttentionBatch,
        attention: PagedAttention,
    ) -> LayerCache:
        """The cache alone: with the keys and values of these tokens, which attend to nothing."""
        _, k, v = self._queries_keys_values(x, tables)
        return attention.write(k, v, cache, batch, self._scales())

    def _queries_keys_values(
        self, x: Float[Array, "T D"], tables: dict[RopeConfig, RopeTable], adapters: LayerAdapters | None = None
    ) -> tuple[Float[Array, "T N H"], Float[Array, "T K H"], Float[Array, "T K H"]]:
        num_tokens, group = x.shape[0], self.spec.num_query_heads // self.spec.num_kv_heads
        with jax.named_scope("qkv"):
            qkv = self.qkv(x, _of(adapters, "qkv"))  # [T, K, G + 2, H]
            if self.layer.qkv_clip is not None:
                qkv = jnp.clip(qkv, -self.layer.qkv_clip, self.layer.qkv_clip)
            q = qkv[:, :, :group].reshape(num_tokens, self.spec.num_query_heads, self.spec.head_dim)
            k, v = qkv[:, :, group], qkv[:, :, group + 1]
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
        if self.layer.rope is not None:
            with jax.named_scope("rope"):
                q, k = rotate(q, tables[self.layer.rope]), rotate(k, tables[self.layer.rope])
        return q, k, v

    def _scales(self) -> KVScales | None:
        """Of a cache of eight bits."""
        if self.k_scale is None or self.v_scale is None:
            return None
        return KVScales(keys=self.k_scale[...], values=self.v_scale[...])

    def _slopes(self) -> Float[Array, " N"] | None:
        """Of this device's query heads."""
        if self.layer.alibi is None:
            return None
        slopes = self.placement.of_query_heads(self.layer.alibi.slopes(self.placement.num_query_heads))
        count = self.spec.num_query_heads
        return jax.lax.dynamic_slice_in_dim(jnp.asarray(slopes), self.placement.shards.start(count), count)


class Mlp(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020), or down(activation(up(x))).

    `gate_up.kernel` is [2, F, D]: gate, then up; `up.kernel` is [F, D].
    """

    def __init__(self, hidden: int, spec: MlpSpec, dtype: DTypeLike) -> None:
        """`hidden`: numbers of a token, before and behind it."""
        self.activation = spec.activation
        bias = spec.bias
        self.gate_up = (
            Projection((hidden,), (2, spec.size), ("gate_up", "mlp", "embed"), bias, dtype) if spec.gated else None
        )
        self.up = None if spec.gated else Projection((hidden,), (spec.size,), ("mlp", "embed"), bias, dtype)
        self.down = Projection((spec.size,), (hidden,), ("embed", "mlp"), bias, dtype)

    def __call__(self, x: Float[Array, "T D"], adapters: LayerAdapters | None = None) -> Summand:
        """What this device adds to the hidden states."""
        return self.down.summand(self._inner(x, adapters), _of(adapters, "down"))

    def _inner(self, x: Float[Array, "T D"], adapters: LayerAdapters | None) -> Float[Array, "T F"]:
        activation = ACTIVATIONS[self.activation]
        if self.up is not None:
            return activation(self.up(x, _of(adapters, "up")))
        assert self.gate_up is not None
        own = _of(adapters, "gate_up")
        if self.gate_up.bias is None:
            kernel = self.gate_up.kernel.get_value()
            if own is None:
                return kernel.multiply_gated(x, self.activation)
            return kernel.multiply_gated_adapted(x, self.activation, own)
        gate_up = self.gate_up(x, own)  # [T, 2, F]
        return activation(gate_up[:, 0]) * gate_up[:, 1]
