"""The parts of a decoder: matmuls, RMS norm, attention block, gated feed-forward block.

Owns parameter layouts, their logical axes, and the arithmetic on them. Refuses to know a family, a checkpoint or a
cache layout: attention itself is the body it is handed.

Why kernels are [out, in], as checkpoints store them: a CPU then multiplies a few rows fastest (see `matmul`), loading
copies without a transposition, and accelerators do not mind. Fused parts are grouped by key/value head, and gate and
up share the column index, so that cutting the named axis over devices gives each device whole heads and matching
halves.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, DTypeLike, Float

from jaxserve.kernels.packed_weight import PackedWeight
from jaxserve.kernels.paged_attention import AttentionBatch, AttentionSpec, LayerCache, PagedAttention
from jaxserve.models.decoder_config import DecoderConfig
from jaxserve.models.rope import RopeTable, rotate
from jaxserve.models.sharding import WHOLE, Axes, Shards, param

# Where weights are not packed: rows up to which a CPU takes float32 ones as the left operand. YNNPACK then streams over
# them once, where it reads a right operand of few rows in narrow blocks of columns. 1.5 times as fast at 16 rows, 1.2
# at 64, slower at 512 (docs/performance.md). A single row is a matrix-vector product, which XLA emits itself.
_MAX_COLUMNS = 64

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def matmul(
    x: Float[Array, "T ..."], weight: Float[Array, "..."] | PackedWeight, num_contracted: int = 1
) -> Float[Array, "T ..."]:
    """x [T, *in] times weight [*out, *in], accumulated and returned in float32.

    float32 operands ask for the highest precision, since the default of TPUs and GPUs would round them to bfloat16 or
    tf32, and "float32" must mean the same everywhere. bfloat16 operands are exact products already; asking for a
    float32 result is what makes XLA:CPU 6 times faster there (132 to 859 tokens/s at 16 rows).
    """
    if isinstance(weight, PackedWeight):
        return weight.multiply(x)
    precision = jax.lax.Precision.HIGHEST if weight.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    dot = functools.partial(jax.lax.dot_general, precision=precision, preferred_element_type=jnp.float32)
    num_out = weight.ndim - num_contracted
    num_rows = x.shape[0]
    out_shape = (num_rows, *weight.shape[:num_out])

    def on_accelerators(x: Array, weight: Array) -> Array:
        contracted = (tuple(range(1, x.ndim)), tuple(range(num_out, weight.ndim)))
        return dot(x, weight, (contracted, ((), ())))

    def on_cpus(x: Array, weight: Array) -> Array:
        # Two axes each: XLA:CPU would copy a weight of more into another order.
        x, weight = x.reshape(num_rows, -1), weight.reshape(math.prod(out_shape[1:]), -1)
        if weight.dtype == jnp.float32 and 1 < num_rows <= _MAX_COLUMNS:
            # Without the barriers XLA would turn the two transpositions into the product below again.
            columns = jax.lax.optimization_barrier(x.T)
            return jax.lax.optimization_barrier(dot(weight, columns, (((1,), (0,)), ((), ())))).T.reshape(out_shape)
        if weight.dtype != jnp.float32 and num_rows == 1:
            x = jnp.pad(x, ((0, 1), (0, 0)))  # a second row makes it a product of matrices, 9 times as fast
        return dot(x, weight, (((1,), (1,)), ((), ())))[:num_rows].reshape(out_shape)

    return jax.lax.platform_dependent(x, weight, cpu=on_cpus, default=on_accelerators)


def soft_cap(x: Array, cap: float | None) -> Array:
    """cap * tanh(x / cap), or x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def attention_spec(config: DecoderConfig, window: int | None) -> AttentionSpec:
    """What a layer with this window asks of a paged attention body."""
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
        self.num_contracted = len(in_shape)
        self.kernel = param(jnp.zeros((*out_shape, *in_shape), dtype), axes, num_in=len(in_shape))
        self.bias = param(jnp.zeros(out_shape, dtype), axes[: len(out_shape)]) if bias else None

    def __call__(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        out = matmul(x, self.kernel.get_value(), self.num_contracted)
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
