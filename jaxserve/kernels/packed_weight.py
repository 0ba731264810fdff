"""A weight in the order in which the CPU's own product reads it, and that product.

XLA:CPU multiplies weights where they lie, or packs them anew in every call. In panels of the width that vector
registers hold, each number is read once and in order: one row at the speed of the memory, many at that of the
arithmetic units (docs/performance.md). The machine code is in `cpu.matmul`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.kernels import halves
from jaxserve.kernels.cpu import machine_code
from jaxserve.kernels.low_rank import LowRank, TokenAdapters
from jaxserve.kernels.matmul import Axes, Weight
from jaxserve.kernels.packed_low_rank import PackedLowRank

_ALIGNMENT = 64  # bytes, of buffers of XLA:CPU


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedWeight(Weight):
    """A weight [*out, *in] of which [p, k, w] is what row p * W + w of [out, in] has in column k.

    Of bfloat16, two columns lie side by side, as the instructions of processors take them: [p, k // 2, w, k % 2].
    Of a weight [2, F, *in], a panel has W / 2 rows of the first half and the same of the second (`halves`).

    Attributes:
      panels: W is the width of the processor's blocks; rows and columns past the last are zeros.
      out_shape, in_shape: sizes of the weight's axes.
    """

    panels: Float[Array, "P K W"] | Float[Array, "P K/2 W 2"]
    out_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    in_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """x [T, *in], rounded to the dtype of the weight, as [T, *out] in float32.

        An output is one chain of fused multiply-adds in float32, in the order of inputs; of bfloat16 in the order 1, 0,
        3, 2, and so on. So a row's result does not depend on the other rows, to the last bit.
        """
        rows, width = self._rows(x), self.panels.shape[2]
        target, plain = machine_code.provide("matmul", self.panels.dtype.name), jnp.zeros(0, jnp.int32)
        out = jax.ffi.ffi_call(target, self._products(rows))(rows, self.panels, plain)
        return halves.from_panels(out, self.out_shape, width)

    def multiply_gated(self, x: Float[Array, "T ..."], activation: str) -> Float[Array, "T F"]:
        """`Weight.multiply_gated`: both products as `multiply` gives them, and one rounding to the dtype of x."""
        if activation not in halves.FACTORS:
            return super().multiply_gated(x, activation)
        target = machine_code.provide("matmul", self.panels.dtype.name)
        return self._gated(x, activation, target, 0, ())

    def slots_for(self, one: LowRank, num_slots: int) -> Any:
        """`Weight.slots_for`: in panels as the weight, where they have numbers of its dtype."""
        if one.down.dtype != self.panels.dtype:
            return super().slots_for(one, num_slots)
        return PackedLowRank.shapes(one, num_slots, self.out_shape, self.panels.shape[2])

    def multiply_adapted(self, x: Float[Array, "T ..."], adapters: TokenAdapters) -> Float[Array, "T ..."]:
        """`Weight.multiply_adapted`; a token without an adapter has the bits of `multiply`."""
        if not isinstance(adapters.arrays, PackedLowRank):
            return super().multiply_adapted(x, adapters)
        rows, width = self._rows(x), self.panels.shape[2]
        operands, scratch = adapters.arrays.operands(adapters.slots)
        results = (self._products(rows), jax.ShapeDtypeStruct((scratch,), jnp.uint8))
        call = jax.ffi.ffi_call(self._adapted_target(), results)
        out, _ = call(rows, self.panels, jnp.zeros(0, jnp.int32), *operands)
        return halves.from_panels(out, self.out_shape, width)

    def multiply_gated_adapted(
        self, x: Float[Array, "T ..."], activation: str, adapters: TokenAdapters
    ) -> Float[Array, "T F"]:
        """`Weight.multiply_gated_adapted`; a token without an adapter has the bits of `multiply_gated`."""
        if activation not in halves.FACTORS or not isinstance(adapters.arrays, PackedLowRank):
            return super().multiply_gated_adapted(x, activation, adapters)
        operands, scratch = adapters.arrays.operands(adapters.slots)
        return self._gated(x, activation, self._adapted_target(), scratch, operands)

    def _rows(self, x: Float[Array, "T ..."]) -> Float[Array, "T K"]:
        return as_elements(x.reshape(-1, math.prod(self.in_shape)).astype(self.panels.dtype))

    def _products(self, rows: Float[Array, "T K"]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows.shape[0], self.panels.shape[0] * self.panels.shape[2]), jnp.float32)

    def _adapted_target(self) -> str:
        return machine_code.provide("matmul", f"adapted_{self.panels.dtype.name}")

    def _gated(
        self, x: Float[Array, "T ..."], activation: str, target: str, scratch: int, operands: Sequence[Array]
    ) -> Float[Array, "T F"]:
        """`scratch`: bytes before the rooms."""
        assert halves.has_halves(self.out_shape), self.out_shape
        rows, (panels, _, width) = self._rows(x), self.panels.shape[:3]
        rooms = halves.rooms_of(rows.shape[0], width, begin=scratch)
        numbers = halves.gating_numbers(activation, x.dtype, rooms)
        results = halves.gated_results(rows.shape[0], panels * width // 2, x.dtype, rooms)
        out, _ = jax.ffi.ffi_call(target, results)(rows, self.panels, numbers, *operands)
        return out[:, : self.out_shape[1]]

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T K"]:
        """`Weight.take`."""
        width = self.panels.shape[2]
        assert not halves.has_halves(self.out_shape), "no table has"
        taken = self.panels.at[rows // width, :, rows % width].get(mode="fill", fill_value=0)
        return taken.reshape(rows.shape[0], -1)[:, : math.prod(self.in_shape)]

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`: panels are never cut."""
        del axes
        return ((None,) * self.panels.ndim,)


def panel_width() -> int:
    """Columns of a panel, W, on this machine."""
    from jaxserve.kernels.cpu.target import find_target  # needs Numba

    return find_target().width


def pack(weight: Float[Array, "..."], num_in: int, width: int) -> PackedWeight:
    """A weight whose last `num_in` axes are multiplied away, in panels of `width`; on the host, without compiling."""
    shape = packed_shape(weight, num_in, width)
    num_out, depth = math.prod(shape.out_shape), math.prod(shape.in_shape)
    flat = halves.side_by_side(np.asarray(weight).reshape(num_out, depth), shape.out_shape, width)
    panels = empty_panels(shape.panels)
    fill_panels(panels, flat)
    sharding = weight.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return dataclasses.replace(shape, panels=jax.device_put(panels, sharding))


def empty_panels(shape: Any) -> np.ndarray:
    """Panels of zeros, of the shape and dtype of `shape`, that JAX takes as they are instead of copying them.

    They begin where a buffer of XLA may begin. NumPy asks Linux for huge pages for arrays of 4 MiB and more, which XLA
    does not for its copy: pages of 4 KiB cost a tenth of the speed of experts, which lie too far apart for the
    processor to know all their addresses.
    """
    num_bytes = math.prod(shape.shape) * shape.dtype.itemsize
    room = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    begin = -room.ctypes.data % _ALIGNMENT
    return room[begin : begin + num_bytes].view(shape.dtype).reshape(shape.shape)


def fill_panels(panels: np.ndarray, matrix: np.ndarray) -> None:
    """Writes a matrix [out, in] into panels [P, in, W] of zeros, or of bfloat16 into [P, in / 2, W, 2]."""
    if panels.ndim == 4:  # pairs are numbers of 32 bits
        if matrix.shape[1] % 2:
            matrix = np.pad(matrix, ((0, 0), (0, 1)))
        panels, matrix = panels.view(np.uint32)[..., 0], np.ascontiguousarray(matrix).view(np.uint32)
    _, depth, width = panels.shape
    whole, rest = divmod(len(matrix), width)
    panels[:whole] = matrix[: whole * width].reshape(whole, width, depth).transpose(0, 2, 1)
    if rest:
        panels[whole, :, :rest] = matrix[whole * width :].T


def packed_shape(weight: jax.ShapeDtypeStruct | Array, num_in: int, width: int) -> PackedWeight:
    """The result of `pack`, with a shape in place of its numbers."""
    out_shape, in_shape = weight.shape[: weight.ndim - num_in], weight.shape[weight.ndim - num_in :]
    shape: Any = jax.ShapeDtypeStruct(panels_shape(out_shape, math.prod(in_shape), width, weight.dtype), weight.dtype)
    return PackedWeight(panels=shape, out_shape=out_shape, in_shape=in_shape)


def panels_shape(out_shape: tuple[int, ...], depth: int, width: int, dtype: Any) -> tuple[int, ...]:
    """Axes of the panels of one matrix."""
    num_panels = halves.num_panels(out_shape, width)
    return (num_panels, -(-depth // 2), width, 2) if dtype == jnp.bfloat16 else (num_panels, depth, width)


def as_elements(rows: Float[Array, "T K"]) -> Float[Array, "T ..."]:
    """Rows whose inputs are whole elements of panels: of bfloat16 an even number."""
    return jnp.pad(rows, ((0, 0), (0, rows.shape[1] % 2))) if rows.dtype == jnp.bfloat16 else rows
