"""Grouped products of TPUs: `lax.ragged_dot`, for which XLA has a kernel there that reads only the experts hit.

The kernel is taken on two conditions, and without a word XLA does something dear where they fail: the number of rows is
a multiple of 8, or it multiplies all rows with all experts; the weight lies as [E, in, out], or it is copied, all of
it, in each step. tests/kernels/test_grouped_compile.py reads both in compiled programs.
"""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, Int

from jaxserve.kernels.coded_experts import CodedExperts
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.grouped_matmul import ExpertWeight, GroupedMatmul, GroupedMatmulUse
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.pallas.tpu_expert_codes import refuses_codes, to_expert_codes
from jaxserve.kernels.xla_grouped_matmul import DenseExperts, zero_past

_ROWS = 8
# Up to this depth XLA sums a product in one piece whatever the number of rows. Beyond, its pieces grow smaller with
# more rows, and the last bits of a row would depend on the bucket; then the tile is named here.
_MAX_DEPTH = 8192
_MAX_TILE, _TILE_COLUMNS, _LANES = 256, 256, 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class InOutExperts:
    """Experts [E, *out, in] as matrices [E, in, out].

    Attributes:
      parts: one array, or, where there are two axes of outputs (gate and up), one for each index of the first: a device
        that has a part of the second could not multiply both in one without a copy.
      is_split: whether there are two axes of outputs.
    """

    parts: tuple[Float[Array, "E D F"], ...]
    is_split: bool = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`."""
        num_rows = x.shape[0]
        x = jnp.pad(x, ((0, -num_rows % _ROWS), (0, 0)))
        outs = [zero_past(_ragged(x, part, group_sizes)[:num_rows], group_sizes) for part in self.parts]
        return jnp.stack(outs, axis=1) if self.is_split else outs[0]

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`."""
        return ((axes[0], axes[-1], axes[-2]),) * len(self.parts)


def _ragged(x: Array, part: Array, group_sizes: Array) -> Array:
    tiling = _tiling(x.shape[0], part.shape[1])
    precision = jax.lax.Precision.HIGHEST if part.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    with contextlib.nullcontext() if tiling is None else set_xla_metadata(ragged_dot_tiling=tiling):
        return jax.lax.ragged_dot(x, part, group_sizes, precision=precision, preferred_element_type=jnp.float32)


def _tiling(num_rows: int, depth: int) -> str | None:
    """Rows, depth and columns of a tile, for a depth of which XLA would not take all at any number of rows."""
    if depth <= _MAX_DEPTH:
        return None
    pieces = -(-depth // _MAX_DEPTH)
    rows = min(num_rows & -num_rows, _MAX_TILE)  # the largest power of two that divides them
    return f"{rows},{-(-depth // (pieces * _LANES)) * _LANES},{_TILE_COLUMNS}"


def _convert(weight: DenseExperts) -> ExpertWeight:
    array = weight.array
    assert array.ndim in (3, 4), array.shape
    parts = (array,) if array.ndim == 3 else tuple(array[:, i] for i in range(array.shape[1]))
    return InOutExperts(parts=tuple(jnp.swapaxes(part, 1, 2) for part in parts), is_split=array.ndim == 4)


def make_grouped_matmul(device: Device, interpret: pltpu.InterpretParams | None = None) -> GroupedMatmul:
    """The implementation for a device; it refuses all that are no TPUs.

    Experts that are codes have a kernel of their own (`pallas.tpu_expert_codes`); `interpret` runs it on a CPU.
    """

    def refuses(use: GroupedMatmulUse) -> str | None:
        if device.backend != "tpu":
            return f"it runs on TPUs alone, and this is a {device.backend}"
        return refuses_codes(use)

    def form(weight: DenseExperts | CodedExperts) -> ExpertWeight:
        return to_expert_codes(weight, interpret) if isinstance(weight, CodedExperts) else _convert(weight)

    return GroupedMatmul(
        name="ragged_tpu",
        convert=jax.jit(form),
        shapes=lambda weight: jax.eval_shape(form, weight),
        refuses=refuses,
    )
