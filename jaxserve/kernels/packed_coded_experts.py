"""Experts as codes in the order in which the CPU's own product reads them, and that product.

Each expert's codes lie as `packed_codes` has those of a dense weight, and are multiplied as those are, bit for bit. The
machine code, in `cpu.grouped_codes`, reads the panels of the experts that have rows, and touches no others.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxserve.kernels import halves, packed_codes
from jaxserve.kernels.coded_experts import CodedExperts
from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.cpu import machine_code, scratch
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.packed_codes import PackedCodes
from jaxserve.kernels.packed_weight import empty_panels
from jaxserve.kernels.storage import decode_float4

_SIZES = 5  # of the dense product
STORED = (*packed_codes.STORED, "float4_e2m1fn")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCodedExperts:
    """Experts [E, *out, in].

    Attributes:
      codes: of all of them: the leaves of `PackedCodes` with an axis of experts before their own.
    """

    codes: PackedCodes

    def multiply(self, x: Float[Array, "M D"], group_sizes: Int[Array, " E"]) -> Float[Array, "M ..."]:
        """`ExpertWeight.multiply`. A row's result has the bits of the dense product with its expert."""
        codes = self.codes
        experts, panels, _, width = codes.panels.shape[:4]
        call = codes.call(x)
        results = [
            jax.ShapeDtypeStruct((x.shape[0], panels * width), jnp.float32),
            *call.scratch,
            jax.ShapeDtypeStruct((scratch.coded_experts_bytes(experts),), jnp.uint8),
        ]
        flat = (leaf.reshape(-1, *leaf.shape[2:]) for leaf in jax.tree.leaves(codes))
        sizes = jnp.asarray([*call.sizes, *(0,) * (_SIZES - len(call.sizes)), experts, panels], jnp.int32)
        target = prepare(code=codes.code, zeros=codes.zeros is not None, block=codes.block)
        gating = jnp.zeros(0, jnp.int32)
        out, *_ = jax.ffi.ffi_call(target, results)(call.rows, *flat, sizes, gating, group_sizes.astype(jnp.int32))
        return halves.from_panels(out, codes.out_shape, width)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`ExpertWeight.leaf_axes`: devices may have different experts; the panels of one are never cut."""
        return tuple((axes[0], *(None,) * (leaf.ndim - 1)) for leaf in jax.tree.leaves(self.codes))


def prepare(*, code: str, zeros: bool, block: int | None) -> str:
    """Makes ready what products of such experts call by name (`GroupedMatmul.prepare`). Returns the name."""
    code = "int8" if code == "float4_e2m1fn" else code
    form = f"{code}_by_{'float32' if block is None else 'int8'}"
    return machine_code.provide("grouped_codes", f"{form}_zeros" if zeros else form)


def pack_coded_experts(weight: CodedExperts, width: int) -> PackedCodedExperts:
    """The same experts in panels of `width`; on the host, one expert after the other, without compiling."""
    shape = coded_experts_shape(weight, width)
    leaves = [empty_panels(leaf) for leaf in jax.tree.leaves(shape)]
    codes, scales, zeros = (
        None if leaf is None else np.asarray(leaf) for leaf in (weight.codes, weight.scales, weight.zeros)
    )
    assert codes is not None and scales is not None
    for expert in range(len(codes)):
        own_codes = codes[expert]
        if weight.storage.code == "float4_e2m1fn":
            own_codes = decode_float4(own_codes)
        own_zeros = None if zeros is None else jnp.asarray(zeros[expert])
        one = packed_codes.pack(_one(weight, jnp.asarray(own_codes), jnp.asarray(scales[expert]), own_zeros), width)
        for own, leaf in zip(leaves, jax.tree.leaves(one), strict=True):
            own[expert] = np.asarray(leaf)
    sharding = weight.codes.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
    return jax.tree.unflatten(jax.tree.structure(shape), jax.device_put(leaves, sharding))


def coded_experts_shape(weight: CodedExperts, width: int) -> PackedCodedExperts:
    """The result of `pack_coded_experts`, with shapes in place of its numbers, for experts of shapes."""
    codes, scales, zeros = (
        None if leaf is None else jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype)
        for leaf in (weight.codes, weight.scales, weight.zeros)
    )
    one = packed_codes.shape_of(_one(weight, codes, scales, zeros), width)
    experts = weight.codes.shape[0]
    return PackedCodedExperts(
        codes=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((experts, *leaf.shape), leaf.dtype), one)
    )


def _one(weight: CodedExperts, codes: Any, scales: Any, zeros: Any) -> CodedWeight:
    """One expert. float4 is twice its value, a whole number."""
    storage = weight.storage
    if storage.code == "float4_e2m1fn":
        storage = dataclasses.replace(storage, code="int8")
    return CodedWeight(
        codes=codes,
        scales=scales,
        zeros=zeros,
        num_in=1,
        storage=storage,
        arithmetic=weight.arithmetic,
        dtype=weight.dtype,
    )
