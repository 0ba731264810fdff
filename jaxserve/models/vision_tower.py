"""What all vision towers share: their config, patches as vectors, blocks of full or windowed attention.

A family has its own tower in its file: a `VisionTower` that puts these together, a table of weights, and the arrays
that follow from the shape of a picture. Towers are the same on all devices, so nothing here is cut.
"""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, DTypeLike, Float, Int, UInt8

from jaxserve.models.decoder_config import MlpSpec, NormSpec
from jaxserve.models.hf_config import HfConfig
from jaxserve.models.layers import Mlp, Norm, Projection, total
from jaxserve.models.rope import RopeTable, rotate
from jaxserve.models.sharding import WHOLE, param
from jaxserve.models.weight_rules import Rule

Attend = Callable[[Float[Array, "P N H"], Float[Array, "P N H"], Float[Array, "P N H"]], Float[Array, "P N H"]]

_CHANNELS = 3
# Scores of attention at once. A CPU takes them head by head and keeps them in its cache, twice as fast.
_SCORE_BYTES = 64 * 2**20
_CPU_SCORE_BYTES = 2**20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TowerConfig:
    """Everything static of one vision tower.

    Attributes:
      width: of its hidden states.
      num_heads [N], num_layers: of its blocks.
      mlp, norm: of each block.
      patch_size: rows and columns of pixels of a patch.
      frames: that a patch spans; those of a picture are all the same.
      merge: patches of a token, along each side.
      out_size [D]: of an embedding; the hidden size of the decoder.
      rope_theta: of the rotation by rows and columns; None: positions are learned.
      window: pixels of a side of the squares that patches attend in; None: they attend to all.
      full_layers: those that attend to all nevertheless.
      grid: rows and columns of patches where all pictures have the same; None: any.
      module: the class of the tower.
    """

    width: int
    num_heads: int
    num_layers: int
    mlp: MlpSpec
    norm: NormSpec
    patch_size: int
    out_size: int
    module: "type[VisionTower]"
    frames: int = 1
    merge: int = 1
    rope_theta: float | None = None
    window: int | None = None
    full_layers: tuple[int, ...] = ()
    grid: tuple[int, int] | None = None

    @property
    def head_dim(self) -> int:
        """[H]."""
        return self.width // self.num_heads

    @property
    def num_values(self) -> int:
        """[V], numbers of a patch of one frame."""
        return _CHANNELS * self.patch_size**2

    def num_tokens(self, num_patches: int) -> int:
        """Tokens of so many patches."""
        return num_patches // self.merge**2

    @property
    def window_patches(self) -> int:
        """Most patches of a window."""
        assert self.window is not None
        return (self.window // self.patch_size) ** 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TowerFamily:
    """The tower of an architecture, beside its `Family`.

    Attributes:
      adapt: from the whole config.json; raises CheckpointError for values that are not implemented.
      weights: rules, whose targets are parameters of the tower; `{layer}` is a block.
      owns: regular expression of the tensor names that are the tower's.
      ignored: regular expressions of those that it does not read.
    """

    adapt: Callable[[HfConfig], TowerConfig]
    weights: tuple[Rule, ...]
    owns: str
    ignored: tuple[str, ...] = ()


class VisionTower(nnx.Module, abc.ABC):
    """Pixels to embeddings, of one picture that is padded to a bucket of patches.

    All parameters start at zero (norms at one): build it under `nnx.eval_shape` and load them.
    """

    def __init__(self, config: TowerConfig, mean: Sequence[float], std: Sequence[float], dtype: DTypeLike) -> None:
        """`mean`, `std`: of the channels of pixels in 0..1, as the processor has them."""
        self.config = config
        self.patches = Patches(config, tuple(mean), tuple(std), dtype)
        self.blocks = nnx.List([TowerBlock(config, dtype) for _ in range(config.num_layers)])

    @staticmethod
    @abc.abstractmethod
    def inputs(config: TowerConfig, grid: tuple[int, int, int], bucket: int) -> Mapping[str, np.ndarray]:
        """The arrays beside the pixels of a picture with that grid; their shapes depend on the bucket alone."""

    @abc.abstractmethod
    def __call__(self, pixels: UInt8[Array, "P V"], inputs: Mapping[str, Array]) -> Float[Array, "M D"]:
        """Embeddings; lines behind those of the picture's tokens are finite and mean nothing."""


class Patches(nnx.Module):
    """A convolution whose windows do not overlap: one product with the pixels of each patch, float32.

    `kernel` is [width, channels, frames, rows, columns]. The frames of a picture are equal, so the kernel is added over
    them first. The product is float32 whatever the activations are, a thousandth of the tower's work, so that pixels
    are not rounded.
    """

    def __init__(self, config: TowerConfig, mean: tuple[float, ...], std: tuple[float, ...], dtype: DTypeLike) -> None:
        size = config.patch_size
        shape = (config.width, _CHANNELS, config.frames, size, size)
        self.kernel = param(jnp.zeros(shape, dtype), ("embed", "channel", "frame", "row", "column"))
        self.mean, self.std, self.dtype = mean, std, dtype

    def __call__(self, pixels: UInt8[Array, "P V"]) -> Float[Array, "P width"]:
        with jax.named_scope("patches"):
            mean, std = (np.asarray(values, np.float32)[:, None] for values in (self.mean, self.std))
            scaled = pixels.reshape(pixels.shape[0], _CHANNELS, -1).astype(jnp.float32) / 255
            kernel = self.kernel[...].astype(jnp.float32).sum(axis=2).reshape(self.kernel.shape[0], -1)
            values = ((scaled - mean) / std).reshape(pixels.shape)
            return jnp.matmul(values, kernel.T, precision=jax.lax.Precision.HIGHEST).astype(self.dtype)


class TowerBlock(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). `qkv.kernel` is [3, N, H, width]."""

    def __init__(self, config: TowerConfig, dtype: DTypeLike) -> None:
        width, heads = config.width, (config.num_heads, config.head_dim)
        self.attention_norm = Norm((width,), ("embed",), config.norm, dtype)
        self.qkv = Projection((width,), (3, *heads), ("qkv", "heads", "head_dim", "embed"), True, dtype)
        self.out = Projection(heads, (width,), ("embed", "heads", "head_dim"), True, dtype)
        self.mlp_norm = Norm((width,), ("embed",), config.norm, dtype)
        self.mlp = Mlp(width, config.mlp, dtype)

    def __call__(self, x: Float[Array, "P width"], table: RopeTable | None, attend: Attend) -> Float[Array, "P width"]:
        with jax.named_scope("attention"):
            qkv = self.qkv(self.attention_norm(x))
            q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
            if table is not None:
                q, k = rotate(q, table), rotate(k, table)
            x = x + self.out(attend(q, k, v))
        with jax.named_scope("mlp"):
            return x + total((self.mlp(self.mlp_norm(x)),), x.dtype, WHOLE)


class Merger(nnx.Module):
    """Patches of a token behind each other, normed each for itself, through two products with a gelu between."""

    def __init__(self, config: TowerConfig, dtype: DTypeLike) -> None:
        self.num_inputs = merged = config.width * config.merge**2
        self.norm = Norm((config.width,), ("embed",), config.norm, dtype)
        self.up = Projection((merged,), (merged,), ("mlp", "merged"), True, dtype)
        self.down = Projection((merged,), (config.out_size,), ("out", "mlp"), True, dtype)

    def __call__(self, x: Float[Array, "P width"]) -> Float[Array, "M D"]:
        with jax.named_scope("merger"):
            merged = self.norm(x).reshape(-1, self.num_inputs)
            return self.down(jax.nn.gelu(self.up(merged), approximate=False))


def grid_positions(config: TowerConfig, grid: tuple[int, int, int], bucket: int) -> np.ndarray:
    """Row and column of each patch, int32 [P, 2], where the patches of a token lie behind each other."""
    frames, rows, columns = grid
    merge = config.merge
    where = np.indices((rows, columns), np.int32).reshape(2, rows // merge, merge, columns // merge, merge)
    where = where.transpose(1, 3, 2, 4, 0).reshape(-1, 2)
    found = np.zeros((bucket, 2), np.int32)
    found[: frames * rows * columns] = np.tile(where, (frames, 1))
    return found


def axial_table(config: TowerConfig, positions: Int[Array, "P 2"]) -> RopeTable:
    """cos and sin [P, H/2]: of a head's pairs the first half turns by the row, the second by the column."""
    assert config.rope_theta is not None
    half = config.head_dim // 2
    exponents = np.arange(0, half, 2, dtype=np.float32) / np.float32(half)
    frequencies = np.float32(1.0) / np.float32(config.rope_theta) ** exponents  # [H/4]
    angles = positions.astype(jnp.float32)[:, :, None] * frequencies  # [P, 2, H/4]
    angles = angles.reshape(positions.shape[0], half)
    return jax.lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles)))


def full_attention(count: Int[Array, ""]) -> Attend:
    """Each patch sees the first `count`, those of the picture. Queries go in blocks, so that the scores stay small."""

    def attend(q: Float[Array, "P N H"], k: Float[Array, "P N H"], v: Float[Array, "P N H"]) -> Float[Array, "P N H"]:
        size = q.shape[0]
        keys, values = k.transpose(1, 2, 0), v.transpose(1, 0, 2)  # [N, H, P], [N, P, H]
        seen = jnp.arange(size) < count

        def blocked(q: Array, keys: Array, values: Array, *, heads: int, score_bytes: int) -> Array:
            """So many heads and a block of queries at once."""
            block, groups = size, keys.shape[0] // heads
            while block % 2 == 0 and 4 * heads * block * size > score_bytes:
                block //= 2
            queries = q.reshape(size // block, block, groups, heads, -1).transpose(2, 0, 3, 1, 4)
            keys, values = (x.reshape(groups, heads, *x.shape[1:]) for x in (keys, values))

            def group(inputs: tuple[Array, Array, Array]) -> Array:
                queries, keys, values = inputs  # [P / B, heads, B, H], [heads, H, P], [heads, P, H]
                return _map(lambda block: _softmax_product(block, keys, values, seen), queries)

            out = _map(group, (queries, keys, values))  # [groups, P / B, heads, B, H]
            return out.transpose(1, 3, 0, 2, 4).reshape(q.shape)

        return jax.lax.platform_dependent(
            q,
            keys,
            values,
            cpu=functools.partial(blocked, heads=1, score_bytes=_CPU_SCORE_BYTES),
            default=functools.partial(blocked, heads=q.shape[1], score_bytes=_SCORE_BYTES),
        )

    return attend


def window_attention(windows: Int[Array, " P"], most: int) -> Attend:
    """Each patch sees those of its window. The patches of a window follow each other, and are `most` at most: so a
    block of so many queries finds all of its keys in the block before it, in itself and in the block behind it."""

    def attend(q: Float[Array, "P N H"], k: Float[Array, "P N H"], v: Float[Array, "P N H"]) -> Float[Array, "P N H"]:
        size, _, dim = q.shape
        assert size % most == 0, (size, most)
        count = size // most

        def around(x: Array, fill: int = 0) -> Array:
            """[..., P, H] as [..., P / most, 3 * most, H]."""
            edge = jnp.full((*x.shape[:-2], most, x.shape[-1]), fill, x.dtype)
            padded = jnp.concatenate([edge, x, edge], axis=-2).reshape(*x.shape[:-2], count + 2, most, x.shape[-1])
            return jnp.concatenate([padded[..., :-2, :, :], padded[..., 1:-1, :, :], padded[..., 2:, :, :]], axis=-2)

        own = windows[:, None]
        seen = own.reshape(count, most, 1) == around(own, -2).reshape(count, 1, 3 * most)  # [C, B, 3B]

        def heads(inputs: tuple[Array, Array, Array]) -> Array:
            """Of arrays [..., P, H]."""
            q, k, v = inputs
            queries = q.reshape(*q.shape[:-2], count, most, dim)
            out = _softmax_product(queries, around(k).swapaxes(-1, -2), around(v), seen)
            return out.reshape(q.shape)

        by_head = tuple(x.transpose(1, 0, 2) for x in (q, k, v))
        out = jax.lax.platform_dependent(
            *by_head, cpu=lambda *qkv: jax.lax.map(heads, qkv), default=lambda *qkv: heads(qkv)
        )
        return out.transpose(1, 0, 2)

    return attend


def _map(fn: Callable[[Any], Array], xs: Any) -> Array:
    """`jax.lax.map`, without a loop over a single element."""
    if jax.tree.leaves(xs)[0].shape[0] == 1:
        return fn(jax.tree.map(lambda x: x[0], xs))[None]
    return jax.lax.map(fn, xs)


def _softmax_product(
    queries: Float[Array, "... B H"], keys: Float[Array, "... H S"], values: Float[Array, "... S H"], seen: Array
) -> Float[Array, "... B H"]:
    """Attention in float32 sums; `seen` broadcasts to the scores [..., B, S]."""
    precision = jax.lax.Precision.HIGHEST if queries.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    product = functools.partial(jnp.matmul, precision=precision, preferred_element_type=jnp.float32)
    scores = jnp.where(seen, product(queries, keys) * queries.shape[-1] ** -0.5, -jnp.inf)
    powers = jnp.exp(scores - scores.max(axis=-1, keepdims=True))
    sums = powers.sum(axis=-1, keepdims=True)
    return (product(powers.astype(queries.dtype), values) / sums).astype(queries.dtype)
