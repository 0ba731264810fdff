"""A table of rows whose width is made a multiple of a TPU's tile of 128, when it is loaded.

XLA lays an array [V, D] out so that tiles add the least: with D no multiple of 128, column by column. A product takes
that as it is. A lookup of rows wants them row by row, and so each step would copy the whole table first.
"""

import dataclasses
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.matmul import Axes, Weight
from jaxserve.kernels.xla_matmul import DenseWeight

_TILE = 128  # numbers of the last axis, of every TPU and dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PaddedTable(Weight):
    """A table [out, in] with zeros behind each row, which add exact zeros to products.

    Attributes:
      weight: [out, in rounded up to a multiple of 128].
      width: *in*, which devices never cut.
    """

    weight: DenseWeight | CodedWeight
    width: int = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "T D"]) -> Float[Array, "T V"]:
        """`Weight.multiply`."""
        return self.weight.multiply(jnp.pad(x, ((0, 0), (0, -self.width % _TILE))))

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T D"]:
        """`Weight.take`."""
        return self.weight.take(rows)[:, : self.width]

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`."""
        return self.weight.leaf_axes(axes)


def needs_padding(weight: Any) -> TypeGuard[DenseWeight | CodedWeight]:
    """Whether rows of this weight are looked up, and are no multiple of a tile.

    Codes whose scales belong to groups of inputs are left as they are: accelerators look nothing up in them.
    """
    if isinstance(weight, CodedWeight):
        return weight.is_table and weight.storage.group is None and weight.codes.shape[-1] % _TILE != 0
    return isinstance(weight, DenseWeight) and weight.is_table and weight.array.shape[-1] % _TILE != 0


@jax.jit
def pad(weight: DenseWeight | CodedWeight) -> PaddedTable:
    """The same table in this form."""
    if isinstance(weight, CodedWeight):
        return PaddedTable(weight=dataclasses.replace(weight, codes=_wide(weight.codes)), width=weight.codes.shape[-1])
    return PaddedTable(weight=dataclasses.replace(weight, array=_wide(weight.array)), width=weight.array.shape[-1])


def _wide(rows: Array) -> Array:
    return jnp.pad(rows, ((0, 0), (0, -rows.shape[-1] % _TILE)))
