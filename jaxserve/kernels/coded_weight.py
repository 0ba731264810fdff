"""A weight as codes and scales (`storage`), multiplied by XLA: runs everywhere.

XLA reads codes of eight and four bits at their own width where one scale belongs to a whole row: the conversion is part
of the product. With groups of inputs it would write the widened weight to memory first, whatever way it is said, so
the groups are products of their own in a loop, each of which reads its codes once.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.kernels.matmul import Axes, Weight
from jaxserve.kernels.storage import (
    FLOAT,
    Arithmetic,
    Storage,
    T,
    decode_float4,
    largest_by_row,
    round_to_codes,
    scales_for,
)
from jaxserve.kernels.xla_matmul import DenseWeight

_LARGEST = 127.0  # magnitude of an int8 code of activations


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class CodedWeight(Weight):
    """A matrix [*out, *in], or a table [out, in] of rows, as codes.

    Attributes:
      codes: [*out, *in].
      scales: float32 [*out, *in], the last axis in groups; without groups, *in are axes of one.
      zeros: int16, as scales are; None: codes are symmetric.
      num_in: how many axes a product sums over, the last ones; 0: a table that is only looked up.
      storage: groups divide the part of the last axis that one device has.
      arithmetic: of products.
      dtype: of rows that are looked up.
      cut_over: axes of the mesh over which devices have different inputs.
      tied: rows are looked up in it beside products.
    """

    codes: Array
    scales: Float[Array, "..."]
    zeros: Int[Array, "..."] | None
    num_in: int = dataclasses.field(metadata={"static": True})
    storage: Storage = dataclasses.field(metadata={"static": True})
    arithmetic: Arithmetic = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})
    cut_over: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})
    tied: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def is_table(self) -> bool:
        """Whether rows are looked up in it."""
        return self.tied or self.num_in == 0

    @property
    def out_shape(self) -> tuple[int, ...]:
        """Outputs, axis by axis."""
        return self.codes.shape[: self.codes.ndim - max(1, self.num_in)]

    @property
    def in_shape(self) -> tuple[int, ...]:
        """Inputs, axis by axis."""
        return self.codes.shape[len(self.out_shape) :]

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`."""
        assert self.num_in > 0, "a table that is only looked up"
        if self.arithmetic.activations == "int8":
            return self.multiply_rounded(self.rounded(x)).reshape(-1, *self.out_shape)
        if self.storage.group is None:
            dense = DenseWeight(array=self._centred(self.codes, self.zeros, x.dtype), num_in=self.num_in)
            return dense.multiply(x) * self.scales.reshape(self.out_shape)
        return self._group_by_group(x.reshape(x.shape[0], -1)).reshape(-1, *self.out_shape)

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        assert self.codes.ndim == 2, "a table has rows"

        def taken(leaf: Array | None) -> Array | None:
            return None if leaf is None else leaf.at[rows].get(mode="fill", fill_value=0)

        codes, scales, zeros = taken(self.codes), taken(self.scales), taken(self.zeros)
        assert codes is not None and scales is not None
        by_group = codes.reshape(*scales.shape, -1)
        centred = self._centred(by_group, None if zeros is None else zeros[..., None], jnp.float32)
        return (centred * scales[..., None]).reshape(codes.shape).astype(self.dtype)

    def numbers(self) -> np.ndarray:
        """The weight [*out, *in] in float64, on the host."""
        codes, scales, zeros = (None if leaf is None else np.asarray(leaf, np.float64) for leaf in self._flat())
        assert codes is not None and scales is not None
        codes, size = self._decoded(codes), codes.shape[1] // len(scales)
        if zeros is not None:
            codes = codes - np.repeat(zeros.T, size, axis=1)
        return (codes * np.repeat(scales.T, size, axis=1)).reshape(self.codes.shape)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        by_scale = axes
        if self.storage.group is None:
            by_scale = (*axes[: len(self.out_shape)], *(None for _ in self.in_shape))
        return (axes, by_scale) if self.zeros is None else (axes, by_scale, by_scale)

    def _centred(self, codes: Array, zeros: Array | None, dtype: jax.typing.DTypeLike) -> Array:
        """Codes less their zeros. Exact in every dtype of activations: no difference has more than eight bits."""
        wide = self._decoded(codes.astype(dtype))
        return wide if zeros is None else wide - zeros.astype(dtype)

    def _decoded(self, codes: T) -> T:
        return decode_float4(codes) if self.storage.code == "float4_e2m1fn" else codes

    def _flat(self) -> tuple[Array, Array, Array | None]:
        """Codes [N, K], scales and zeros [G, N]."""
        num_out = math.prod(self.out_shape)
        zeros = None if self.zeros is None else self.zeros.reshape(num_out, -1).T
        return self.codes.reshape(num_out, -1), self.scales.reshape(num_out, -1).T, zeros

    def _group_by_group(self, x: Float[Array, "T K"]) -> Float[Array, "T N"]:
        codes, scales, zeros = self._flat()
        size = codes.shape[1] // len(scales)

        def turn(group: Array, total: Array) -> Array:
            part = jax.lax.dynamic_slice_in_dim(codes, group * size, size, axis=1)
            centred = self._centred(part, None if zeros is None else zeros[group][:, None], x.dtype)
            inputs = jax.lax.dynamic_slice_in_dim(x, group * size, size, axis=1)
            return total + DenseWeight(array=centred, num_in=1).multiply(inputs) * scales[group]

        return jax.lax.fori_loop(0, len(scales), turn, jnp.zeros((x.shape[0], len(codes)), jnp.float32))

    def multiply_batched(self, x: Float[Array, "T K"]) -> Float[Array, "T N"]:
        """The product with codes in groups, all groups at once: XLA may widen the codes of the whole weight for it."""
        codes, scales, zeros = self._flat()
        num_out, num_groups = len(codes), len(scales)
        by_group = codes.reshape(num_out, num_groups, -1)
        centred = self._centred(by_group, None if zeros is None else zeros.T[..., None], x.dtype)
        precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
        products = jax.lax.dot_general(
            x.reshape(len(x), num_groups, -1),
            centred,
            (((2,), (2,)), ((1,), (1,))),
            precision=precision,
            preferred_element_type=jnp.float32,
        )
        return jnp.sum(products * scales[:, None], axis=0)

    def rounded(self, x: Float[Array, "T ..."]) -> "RoundedRows":
        """Rows as codes, for products in integers."""
        x = x.reshape(x.shape[0], -1)
        block, depth = self.arithmetic.block, x.shape[1]
        if block is not None and self.cut_over and depth % block:
            codes, scales = _round_shared_blocks(x, block, self.cut_over)
            return RoundedRows(codes=codes, scales=scales, block=math.gcd(depth, block))
        size = min(block or depth, depth)
        codes, scales = round_activations(x, size, self.cut_over if block is None else ())
        return RoundedRows(codes=codes, scales=scales, block=size)

    def multiply_rounded(self, x: "RoundedRows") -> Float[Array, "T N"]:
        """Sums of products of codes are exact within a run of inputs that share both scales."""
        codes, scales, zeros = self._flat()
        depth, block = codes.shape[1], x.block
        of_group = depth // len(scales)
        run = math.gcd(block, of_group) if self.arithmetic.block else of_group

        def part(start: Array | int, size: int) -> Array:
            inputs = jax.lax.dynamic_slice_in_dim(x.codes, start, size, axis=1)
            weights = self._decoded(jax.lax.dynamic_slice_in_dim(codes, start, size, axis=1).astype(jnp.int8))
            total = jax.lax.dot_general(inputs, weights, (((1,), (1,)), ((), ())), preferred_element_type=jnp.int32)
            group = start // of_group
            if zeros is not None:
                sums = jnp.sum(inputs, axis=1, dtype=jnp.int32)
                total = total - sums[:, None] * zeros[group].astype(jnp.int32)
            return total.astype(jnp.float32) * (scales[group] * x.scales[:, start // block, None])

        if run == depth:
            return part(0, depth)
        total = jnp.zeros((x.codes.shape[0], len(codes)), jnp.float32)
        return jax.lax.fori_loop(0, depth // run, lambda i, total: total + part(i * run, run), total)


def round_weight(
    array: np.ndarray, num_in: int, storage: Storage, dtype: str, arithmetic: Arithmetic = FLOAT
) -> CodedWeight:
    """A float weight [*out, *in] in the nearest codes, each group by its largest magnitude. Codes have no zeros."""
    assert not storage.zeros, storage
    num_coded = max(1, num_in)
    out_shape, in_shape = array.shape[: array.ndim - num_coded], array.shape[array.ndim - num_coded :]
    size = storage.group or math.prod(in_shape)
    matrix = np.asarray(array, np.float32).reshape(-1, size)
    scales = scales_for(largest_by_row(matrix), storage)[:, None]
    codes = round_to_codes(matrix, scales, storage)
    by_scale = (1,) * num_coded if storage.group is None else (*in_shape[:-1], in_shape[-1] // size)
    return CodedWeight(
        codes=jnp.asarray(codes.astype(storage.dtype(jax.default_backend())).reshape(array.shape)),
        scales=jnp.asarray(scales.reshape(*out_shape, *by_scale)),
        zeros=None,
        num_in=num_in,
        storage=storage,
        arithmetic=arithmetic,
        dtype=dtype,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundedRows:
    """Activations as int8 codes, and a scale for each `block` inputs."""

    codes: Int[Array, "T K"]
    scales: Float[Array, "T B"]
    block: int


def _round_shared_blocks(
    x: Float[Array, "T K"], block: int, cut_over: tuple[str, ...]
) -> tuple[Int[Array, "T K"], Float[Array, "T B"]]:
    """`round_activations` in blocks of the inputs of all devices. Some lie on two or more, which share their scales."""
    num_rows, depth = x.shape
    run = math.gcd(depth, block)
    runs = jnp.abs(x.astype(jnp.float32)).reshape(num_rows, -1, run).max(axis=2)
    first = jax.lax.axis_index(cut_over) * (depth // run)
    block_of = (first + jnp.arange(depth // run)) * run // block
    num_blocks = -(-depth * jax.lax.psum(1, cut_over) // block)
    runs = jnp.where(jnp.isnan(runs), jnp.inf, runs)  # not every maximum keeps NaN
    largest = jnp.zeros((num_rows, num_blocks), jnp.float32).at[:, block_of].max(runs)
    largest = jax.lax.pmax(largest, cut_over)[:, block_of]
    return _codes_of(x, largest, run)


def round_activations(
    x: Float[Array, "T K"], block: int, cut_over: tuple[str, ...]
) -> tuple[Int[Array, "T K"], Float[Array, "T B"]]:
    """int8 codes, and a scale for each block of inputs: the largest magnitude over 127, of all devices in `cut_over`.

    A block of zeros has the scale 0. One with a number that is not finite has a scale that is not either, and so has
    the row's product.
    """
    depth = x.shape[1]
    blocks = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -depth % block))).reshape(len(x), -1, block)
    largest = jnp.max(jnp.abs(blocks), axis=2)
    if cut_over:
        largest = jax.lax.pmax(jnp.where(jnp.isnan(largest), jnp.inf, largest), cut_over)
    return _codes_of(x, largest, block)


def _codes_of(
    x: Float[Array, "T K"], largest: Float[Array, "T B"], block: int
) -> tuple[Int[Array, "T K"], Float[Array, "T B"]]:
    """The nearest codes and their scales, given the magnitude that is 127 in each block of inputs."""
    depth = x.shape[1]
    blocks = jnp.pad(x.astype(jnp.float32), ((0, 0), (0, -depth % block))).reshape(len(x), -1, block)
    by = largest[..., None]
    steps = blocks * jnp.where((by > 0) & (by < jnp.inf), _LARGEST / by, 0)
    codes = jnp.where(jnp.isfinite(steps), jnp.clip(jnp.round(steps), -_LARGEST, _LARGEST), 0).astype(jnp.int8)
    scales = jnp.where(largest < jnp.inf, largest / _LARGEST, jnp.nan)
    return codes.reshape(len(x), -1)[:, :depth], scales
