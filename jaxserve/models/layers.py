"""The parts of a decoder: projections, RMS norm, attention block, gated feed-forward block.

Parameter layouts, their logical axes and the arithmetic on them are here. The layout of the cache is not: attention
itself is the function that the block is given.

Kernels are [out, in] (`kernels.xla_matmul` says why). Fused parts are grouped by key/value head, and gate and up share
the column index, so that cutting the named axis over devices gives each device whole heads and matching halves.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, LayerCache, PagedAttention
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.rope import RopeTable, rotate
from jaxserve.models.sharding import WHOLE, Axes, Shards, param, weight

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def soft_cap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap), or x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention_spec(config: DecoderConfig, window: int | None) -> AttentionSpec:
    """The use of paged attention by a layer with this window."""
    return AttentionSpec(
        num_query_heads=config.num_query_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        window=window,
        soft_cap=config.attention_soft_cap,
    )


class RmsNorm(nnx.Module):
    """x / sqrt(mean(x ** 2) + eps) * weight over the last axis, in float32, returned in x's dtype (Zhang, 2019)."""

    def __init__(self, size: int, axis: str, eps: float, dtype: DTypeLike) -> None:
        self.eps = eps
        self.weight = param(jnp.ones(size, dtype), (axis,))

    def __call__(self, x: Float[Array, "... D"]) -> Float[Array, "... D"]:
        wide = x.astype(jnp.float32)
        normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        # Rounded before the weight, like the models were trained: it matters in bfloat16.
        return normed.astype(x.dtype) * self.weight[...]


class Projection(nnx.Module):
    """x [T, *in] to [T, *out] in x's dtype, with an optional bias [*out].

    `shards` are the devices over which the *in* axes are cut: their products are added up, rounded to x's dtype before
    they travel (half the bytes in bfloat16, and the rounding that a single device makes at the end anyway).
    """

    def __init__(
        self,
        in_shape: tuple[int, ...],
        out_shape: tuple[int, ...],
        axes: Axes,
        bias: bool,
        dtype: DTypeLike,
        shards: Shards = WHOLE,
    ) -> None:
        self.shards = shards
        self.kernel = weight(jnp.zeros((*out_shape, *in_shape), dtype), axes, num_in=len(in_shape))
        self.bias = param(jnp.zeros(out_shape, dtype), axes[: len(out_shape)]) if bias else None

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        out = self.kernel.get_value().multiply(x)
        if self.shards.count > 1:
            out = self.shards.sum(out.astype(x.dtype)).astype(jnp.float32)
        if self.bias is not None:
            out = out + self.bias[...].astype(jnp.float32)
        return out.astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions over the paged cache of one layer.

    `qkv.kernel` is [K, G + 2, H, D]: for each key/value head its G query heads, then its key, then its value.
    """

    def __init__(self, config: DecoderConfig, window: int | None, dtype: DTypeLike, shards: Shards) -> None:
        heads, kv_heads, head_dim = config.num_query_heads, config.num_kv_heads, config.head_dim
        self.spec = attention_spec(config, window)
        self.qkv = Projection(
            (config.hidden_size,),
            (kv_heads, config.group_size + 2, head_dim),
            ("kv_heads", "group", "head_dim", "embed"),
            config.qkv_bias,
            dtype,
        )
        self.out = Projection(
            (heads, head_dim), (config.hidden_size,), ("embed", "heads", "head_dim"), config.out_bias, dtype, shards
        )
        self.q_norm = RmsNorm(head_dim, "head_dim", config.norm_eps, dtype) if config.qk_norm else None
        self.k_norm = RmsNorm(head_dim, "head_dim", config.norm_eps, dtype) if config.qk_norm else None

    def __call__(
        self,
        x: Float[Array, "T D"],
        table: RopeTable,
        cache: LayerCache,
        batch: AttentionBatch,
        attention: PagedAttention,
    ) -> tuple[Float[Array, "T D"], LayerCache]:
        num_tokens, group = x.shape[0], self.spec.num_query_heads // self.spec.num_kv_heads
        with jax.named_scope("qkv"):
            qkv = self.qkv(x)  # [T, K, G + 2, H]
            q = qkv[:, :, :group].reshape(num_tokens, self.spec.num_query_heads, self.spec.head_dim)
            k, v = qkv[:, :, group], qkv[:, :, group + 1]
            if self.q_norm is not None and self.k_norm is not None:
                q, k = self.q_norm(q), self.k_norm(k)
        with jax.named_scope("rope"):
            q, k = rotate(q, table), rotate(k, table)
        with jax.named_scope("attend"):
            out, cache = attention.attend(q, k, v, cache, batch, self.spec)
        with jax.named_scope("out"):
            return self.out(out), cache


class GatedMlp(nnx.Module):
    """down(activation(gate(x)) * up(x)) (Shazeer, 2020). `gate_up.kernel` is [2, F, D]: gate, then up."""

    def __init__(self, config: DecoderConfig, dtype: DTypeLike, shards: Shards) -> None:
        self.activation = config.activation
        self.gate_up = Projection(
            (config.hidden_size,), (2, config.ffn_size), ("gate_up", "mlp", "embed"), config.mlp_bias, dtype
        )
        self.down = Projection(
            (config.ffn_size,), (config.hidden_size,), ("embed", "mlp"), config.mlp_bias, dtype, shards
        )

    def __call__(self, x: Float[Array, "T D"]) -> Float[Array, "T D"]:
        gate_up = self.gate_up(x)  # [T, 2, F]
        return self.down(ACTIVATIONS[self.activation](gate_up[:, 0]) * gate_up[:, 1])
