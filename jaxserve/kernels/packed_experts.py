"""Experts in the order in which the CPU's own grouped product reads them, and that product.

Each expert's matrix lies in panels, as `packed_weight` has those of dense layers. The machine code, in
`cpu.grouped_matmul`, streams through the panels of the experts that have rows, and touches no others. A row's sum is
one chain over the depth: its bits depend on its own numbers and its expert alone.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.kernels import packed_coded_experts
from jaxserve.kernels.coded_experts import CodedExperts
from jaxserve.kernels.cpu import machine_code, scratch
from jaxserve.kernels.dispatch import Device
from jaxserve.kernels.grouped_matmul import ExpertWeight, GroupedMatmul, GroupedMatmulUse
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.packed_codes import LEAST_RUN
from jaxserve.kernels.packed_weight import as_elements, empty_panels, fill_panels, panel_width, panels_shape
from jaxserve.kernels.xla_grouped_matmul import DenseExperts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedExperts:
    """Experts [E, *out, in] of which [e, p, k, w] is what row p * W + w of [out, in] of expert e has in column k.

    Of bfloat16, two columns lie side by side: [e, p, k // 2, w, k % 2].

    Attributes:
      panels: W is the width of the processor's blocks; rows and columns past the last are zeros.
      out_shape: sizes of the axes of outputs.
    """

    panels: Float[Array, "E P K W"] | Float[Array, "E P K/2 W 2"]
    out_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`, of rows rounded to the dtype of the weights.

        A row's result does not depend on the other rows, to the last bit.
        """
        experts, panels, _, width = self.panels.shape[:4]
        results = (
            jax.ShapeDtypeStruct((x.shape[0], panels * width), jnp.float32),
            jax.ShapeDtypeStruct((experts * scratch.RUN_BYTES,), jnp.uint8),
        )
        target = machine_code.provide("grouped_matmul", self.panels.dtype.name)
        call = jax.ffi.ffi_call(target, results)
        out, _ = call(as_elements(x.astype(self.panels.dtype)), self.panels, group_sizes.astype(jnp.int32))
        return out[:, : math.prod(self.out_shape)].reshape(-1, *self.out_shape)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`: devices may have different experts; the panels of one are never cut."""
        return ((axes[0], *(None,) * (self.panels.ndim - 1)),)


def make_grouped_matmul(device: Device) -> GroupedMatmul:
    """The implementation for a device; it refuses all that are no CPUs."""

    def refuses(use: GroupedMatmulUse) -> str | None:
        if device.backend != "cpu":
            return f"it runs on CPUs alone, and this is a {device.backend}"
        if use.num_devices > 1:
            return (
                f"{use.num_devices} devices share each expert, and packed ones are never cut; set parallel.tensor to 1"
            )
        if use.dtype not in machine_code.DTYPES:
            return f"weights are {use.dtype}, and can be read as {' or '.join(machine_code.DTYPES)} alone"
        if use.storage is not None and use.storage.code not in packed_coded_experts.STORED:
            return f"it has no products with {use.storage.code}; model.quantization: none widens such weights"
        if use.storage is not None and (use.storage.group or 0) % LEAST_RUN:
            return (
                f"{use.storage.group} inputs share a scale, but groups must be a multiple of {LEAST_RUN}; "
                "model.quantization: none widens such weights"
            )
        return machine_code.missing()

    def convert(weight: DenseExperts | CodedExperts) -> ExpertWeight:
        if isinstance(weight, CodedExperts):
            return packed_coded_experts.pack_coded_experts(weight, panel_width())
        return pack_experts(weight, panel_width())

    def shapes(weight: DenseExperts | CodedExperts) -> ExpertWeight:
        if isinstance(weight, CodedExperts):
            return packed_coded_experts.coded_experts_shape(weight, panel_width())
        return packed_shape(weight, panel_width())

    def prepare(use: GroupedMatmulUse) -> None:
        if use.storage is None:
            machine_code.provide("grouped_matmul", use.dtype)
        else:
            storage, block = use.storage, use.arithmetic.block
            packed_coded_experts.prepare(code=storage.code, zeros=storage.zeros, block=block)

    return GroupedMatmul(
        name="numba_cpu",
        convert=convert,
        shapes=shapes,
        refuses=refuses,
        prepare=prepare,
        row_invariant=True,
    )


def pack_experts(weight: DenseExperts, width: int) -> ExpertWeight:
    """The same experts in panels of `width`; on the host, one expert after the other, without compiling."""
    shape = packed_shape(weight, width)
    panels = empty_panels(shape.panels)
    for own, matrix in zip(panels, np.asarray(weight.array), strict=True):
        fill_panels(own, matrix.reshape(-1, matrix.shape[-1]))
    sharding = weight.array.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return dataclasses.replace(shape, panels=jax.device_put(panels, sharding))


def packed_shape(weight: DenseExperts, width: int) -> PackedExperts:
    """The result of `pack_experts`, with a shape in place of its numbers."""
    experts, *out_shape, depth = weight.array.shape
    panels = panels_shape(tuple(out_shape), depth, width, weight.array.dtype)
    shape: Any = jax.ShapeDtypeStruct((experts, *panels), weight.array.dtype)
    return PackedExperts(panels=shape, out_shape=tuple(out_shape))
