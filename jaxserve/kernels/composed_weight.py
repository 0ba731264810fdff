"""Weights made of others: parts side by side, inputs in another order, minima beside codes.

What an implementation of an op knows is the weights inside, which it converts one by one (`mapped`). So each of these
runs wherever its parts do.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxserve.kernels.matmul import Axes, Weight
from jaxserve.kernels.row_sum import row_sum
from jaxserve.kernels.xla_grouped_matmul import DenseExperts
from jaxserve.kernels.xla_matmul import DenseWeight

Change = Callable[[Any], Any]  # of a weight that is not made of others


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SideBySide(Weight):
    """Weights [*out, *in] that are pieces of one along an axis of its outputs, such as query, key and value.

    Attributes:
      parts: in the order of their outputs.
      axis: of *out, along which they follow one another.
    """

    parts: tuple[Any, ...]
    axis: int = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`."""
        return jnp.concatenate([part.multiply(x) for part in self.parts], axis=1 + self.axis)

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        raise AssertionError("no table is made of parts")

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        return tuple(found for part in self.parts for found in part.leaf_axes(axes))

    def mapped(self, change: Change, is_whole: Callable[[Any], bool]) -> "SideBySide":
        """The same of other parts."""
        return dataclasses.replace(self, parts=tuple(mapped(part, change, is_whole) for part in self.parts))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Reordered(Weight):
    """A weight whose inputs lie in an order of their own, by which inputs that share a scale follow one another.

    Attributes:
      weight: [*out, *in] in that order.
      order: int32 [*in], the index of each of its inputs among those of x, flat, of all devices.
      cut_over: axes of the mesh over which devices have different inputs; those that a device multiplies with may be
        others' then.
    """

    weight: Any
    order: Int[Array, "..."]
    cut_over: tuple[str, ...] = dataclasses.field(default=(), metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`."""
        flat = x.reshape(x.shape[0], -1)
        if self.cut_over:
            flat = jax.lax.all_gather(flat, self.cut_over, axis=1, tiled=True)
        taken = jnp.take(flat, self.order.reshape(-1), axis=1, mode="clip")
        return self.weight.multiply(taken.reshape(x.shape[0], *self.order.shape))

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        raise AssertionError("tables are not reordered")

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        return (*self.weight.leaf_axes(axes), axes[len(axes) - self.order.ndim :])

    def mapped(self, change: Change, is_whole: Callable[[Any], bool]) -> "Reordered":
        """The same around another weight."""
        return dataclasses.replace(self, weight=mapped(self.weight, change, is_whole))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class WithOffsets(Weight):
    """Codes whose groups have a number of their own that is subtracted: w = (code - zero) * scale - offset.

    A product is that of the codes, less that of the offsets and the sums of the groups of inputs, in float32.

    Attributes:
      codes: [*out, *in], with the last axis in groups.
      offsets: float32 [*out, *in / group], a weight like others.
      group: inputs.
    """

    codes: Any
    offsets: Any
    group: int = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`."""
        return self.codes.multiply(x) - self.offsets.multiply(group_sums(x, self.group))

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        codes, offsets = dataclasses.replace(self.codes, dtype="float32").take(rows), self.offsets.take(rows)
        by_group = codes.reshape(*offsets.shape, self.group) - offsets[..., None]
        return by_group.reshape(codes.shape).astype(self.codes.dtype)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        return (*self.codes.leaf_axes(axes), *self.offsets.leaf_axes(axes))

    def mapped(self, change: Change) -> "WithOffsets":
        """The same of other weights."""
        return dataclasses.replace(self, codes=change(self.codes), offsets=change(self.offsets))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsWithOffsets:
    """Experts [E, *out, in] of such codes. `offsets`: [E, *out, in / group]."""

    codes: Any
    offsets: Any
    group: int = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`."""
        sums = group_sums(x, self.group)
        return self.codes.multiply(x, group_sizes) - self.offsets.multiply(sums, group_sizes)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`."""
        return (*self.codes.leaf_axes(axes), *self.offsets.leaf_axes(axes))

    def mapped(self, change: Change) -> "ExpertsWithOffsets":
        """The same of other experts."""
        return dataclasses.replace(self, codes=change(self.codes), offsets=change(self.offsets))


def group_sums(x: Float[Array, "T ..."], group: int) -> Float[Array, "T ..."]:
    """float32 sums of each `group` numbers of the last axis, in an order that depends on nothing but their number."""
    sums = row_sum(x.astype(jnp.float32).reshape(-1, group))
    return sums.reshape(*x.shape[:-1], x.shape[-1] // group)


def mapped(weight: Any, change: Change, is_whole: Callable[[Any], bool] = lambda weight: False) -> Any:
    """`change` of a weight, or of all that it is made of. `is_whole`: of one with offsets, whether it is changed as
    one."""
    if isinstance(weight, SideBySide | Reordered):
        return weight.mapped(change, is_whole)
    if isinstance(weight, WithOffsets | ExpertsWithOffsets) and not is_whole(weight):
        return weight.mapped(change)
    return change(weight)


def numbers_of(weight: Any) -> np.ndarray:
    """The weight [*out, *in] in float64, on the host, inputs in the order of x."""
    if isinstance(weight, SideBySide):
        return np.concatenate([numbers_of(part) for part in weight.parts], axis=weight.axis)
    if isinstance(weight, Reordered):
        sorted_, order = numbers_of(weight.weight), np.asarray(weight.order).reshape(-1)
        flat = sorted_.reshape(-1, math.prod(weight.order.shape))
        found = np.zeros_like(flat)
        found[:, order] = flat
        return found.reshape(sorted_.shape)
    if isinstance(weight, WithOffsets | ExpertsWithOffsets):
        offsets = np.repeat(numbers_of(weight.offsets), weight.group, axis=-1)
        return weight.codes.numbers() - offsets
    return np.asarray(weight.array, np.float64) if isinstance(weight, DenseWeight | DenseExperts) else weight.numbers()
