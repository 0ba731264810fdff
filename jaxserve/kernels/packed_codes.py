"""A weight as eight-bit codes beside their scales, in the order in which the CPU's own product reads them.

Codes are a quarter of the bytes of float32, which is what one row waits for. Where rows are rounded to eight bits, too,
products are sums of integers, at four times the rate. The machine code is in `cpu.matmul_int8`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int, Int16, UInt8

from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.cpu import machine_code, scratch
from jaxserve.kernels.matmul import Axes
from jaxserve.kernels.packed_weight import empty_panels

STORED = ("int8", "int4")  # both in a byte each
BLOCK = scratch.BLOCK
_SYMMETRIC = 128  # the unsigned code of zero, where there are no zeros
LEAST_RUN = 16  # inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCodes:
    """A weight [*out, *in] of codes: row p * W + w of [out, in] is (panels[p, k // 4, w, k % 4] - z) * s in column k.

    Its scale and zero are those of its group: s = scales[p, k // group, w], and z is zeros[p, k // group, w], or 128
    where there are no zeros.

    **Rounded rows** (`block` is 128). A row is cut into blocks of 128 inputs. With a = max |x| of a block in float32,
    its scale is a / 127 and its codes are round(x * (127 / a)), half to even; both quotients and the product are
    float32. A block with a < 2^-119 counts as zeros. The products of one run of inputs (those that share a block and a
    group) are added as integers. An output is then one chain over the runs, in order, from 0, of float32 fused
    multiply-adds: out = fma(sum, s * scale, out). NaN or an infinity in a row makes all outputs of this row NaN.

    **Rows as they are** (`block` is None), in float32. An output is one chain over the groups, in order, from 0:
    out = fma(sum, s, out), and the sum one over the inputs of the group, in order, from 0: sum = fma(x, code - z, sum).

    So an output has the same bits on every processor and in every batch, whatever else is in it, as far as no number is
    smaller than the smallest normal one.

    Attributes:
      panels: W is the width of the processor's blocks; outputs past the last have scales of 0. Inputs past the last, up
        to a multiple of four, have the code 128.
      scales: of each group of inputs and output.
      zeros: as unsigned codes; None: 128 everywhere.
      out_shape, in_shape: sizes of the weight's axes.
      group: inputs that share a scale, a multiple of 16; None: all of an output.
      block: 128 or None, as above.
      dtype: of rows that are looked up.
    """

    panels: UInt8[Array, "P K/4 W 4"]
    scales: Float[Array, "P G W"]
    zeros: Int16[Array, "P G W"] | None = None
    out_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    in_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    group: int | None = dataclasses.field(metadata={"static": True})
    block: int | None = dataclasses.field(default=BLOCK, metadata={"static": True})
    dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`, as the class says."""
        panels, _, width, _ = self.panels.shape
        call = self.call(x)
        results = [jax.ShapeDtypeStruct((call.rows.shape[0], panels * width), jnp.float32), *call.scratch]
        zeros = () if self.zeros is None else (self.zeros,)
        target = prepare(zeros=self.zeros is not None, block=self.block)
        out, *_ = jax.ffi.ffi_call(target, results)(
            call.rows, self.panels, self.scales, *zeros, jnp.asarray(call.sizes, jnp.int32)
        )
        return out[:, : math.prod(self.out_shape)].reshape(-1, *self.out_shape)

    def call(self, x: Float[Array, "T ..."]) -> "Call":
        """What the machine code is given beside the weight."""
        depth = math.prod(self.in_shape)
        rows = x.reshape(-1, depth).astype(jnp.float32)
        if self.block is None:
            rows = jnp.pad(rows, ((0, 0), (0, -depth % 4)))
            return Call(rows=rows, sizes=(self.group or rows.shape[1], 1), scratch=())
        run = math.gcd(self.group or self.block, self.block)
        rounded = scratch.RoundedRows.of(num_rows=rows.shape[0], depth=depth, run=run)
        places = (rounded.row_bytes, rounded.scales_begin, rounded.sums_begin)
        return Call(
            rows=rows,
            sizes=(run, -(-(self.group or depth) // run), *places),
            scratch=(jax.ShapeDtypeStruct((rounded.num_bytes,), jnp.uint8),),
        )

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T K"]:
        """`Weight.take`."""
        width, depth = self.panels.shape[2], math.prod(self.in_shape)
        panel, column = rows // width, rows % width
        codes = self.panels.at[panel, :, column].get(mode="fill", fill_value=_SYMMETRIC)
        codes = codes.reshape(rows.shape[0], -1)[:, :depth].astype(jnp.int32)
        group_of = np.arange(depth) // (self.group or depth)
        scales = self.scales.at[panel, :, column].get(mode="fill", fill_value=0)[:, group_of]
        if self.zeros is None:
            return ((codes - _SYMMETRIC).astype(jnp.float32) * scales).astype(self.dtype)
        zeros = self.zeros.at[panel, :, column].get(mode="fill", fill_value=_SYMMETRIC)[:, group_of]
        return ((codes - zeros).astype(jnp.float32) * scales).astype(self.dtype)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`: panels are never cut."""
        del axes
        scales: Axes = (None, None, None)
        return ((None, None, None, None), *[scales] * (1 if self.zeros is None else 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Rows as the machine code takes them, its sizes, and the shapes of its scratch arrays."""

    rows: Float[Array, "T K"]
    sizes: tuple[int, ...]
    scratch: tuple[jax.ShapeDtypeStruct, ...]


def prepare(*, zeros: bool, block: int | None) -> str:
    """Makes ready what products of such weights call by name (`Matmul.prepare`). Returns the name."""
    form = "by_float32" if block is None else "by_int8"
    return machine_code.provide("matmul_int8", f"{form}_zeros" if zeros else form)


def pack(weight: CodedWeight, width: int) -> PackedCodes:
    """A weight of integer codes in panels of `width`; on the host, without compiling."""
    num_out = math.prod(weight.out_shape)
    codes, scales, zeros = (
        None if leaf is None else np.asarray(leaf).reshape(num_out, -1)
        for leaf in (weight.codes, weight.scales, weight.zeros)
    )
    assert codes is not None and scales is not None
    sharding = weight.codes.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    storage, block = weight.storage, weight.arithmetic.block
    shapes = (weight.out_shape, weight.in_shape, storage.group, width)
    packed = pack_codes(codes, scales, *shapes, zeros=zeros, block=block, sharding=sharding)
    return dataclasses.replace(packed, dtype=weight.dtype)


def shape_of(weight: CodedWeight, width: int) -> PackedCodes:
    """The result of `pack`, with shapes in place of its numbers, for a weight of shapes."""
    storage, block = weight.storage, weight.arithmetic.block
    shapes = (weight.out_shape, weight.in_shape, storage.group, width)
    packed = packed_codes_shape(*shapes, zeros=storage.zeros, block=block)
    return dataclasses.replace(packed, dtype=weight.dtype)


def pack_codes(
    codes: np.ndarray,
    scales: np.ndarray,
    out_shape: tuple[int, ...],
    in_shape: tuple[int, ...],
    group: int | None,
    width: int,
    *,
    zeros: np.ndarray | None = None,
    block: int | None = BLOCK,
    sharding: Sharding | None = None,
) -> PackedCodes:
    """Codes int8 [out, in] with scales float32 [out, G], in panels of `width`; on the host, a panel at a time.

    A weight is (code - zero) * scale; `zeros` are integers [out, G], -32896 to 32639, or None for 0.
    """
    shape = packed_codes_shape(out_shape, in_shape, group, width, zeros=zeros is not None, block=block)
    num_out, depth = math.prod(out_shape), math.prod(in_shape)
    num_groups = shape.scales.shape[1]
    assert codes.dtype == np.int8 and codes.shape == (num_out, depth), (codes.dtype, codes.shape)
    assert scales.shape == (num_out, num_groups), (scales.shape, num_groups)
    assert zeros is None or zeros.shape == scales.shape, zeros.shape
    panels, packed_scales = empty_panels(shape.panels), empty_panels(shape.scales)
    words = panels.view(np.uint32)[..., 0]
    tail = np.zeros((width, 4 * panels.shape[1]), np.int8) if depth % 4 else None
    for panel, begin in enumerate(range(0, num_out, width)):
        own = codes[begin : begin + width]
        if tail is not None:
            tail[: len(own), :depth] = own
            own = tail[: len(own)]
        words[panel, :, : len(own)] = np.ascontiguousarray(own).view(np.uint32).T
        packed_scales[panel, :, : len(own)] = scales[begin : begin + width].T
    np.bitwise_xor(panels, _SYMMETRIC, out=panels)  # adds 128 to signed bytes
    leaves: list[np.ndarray] = [panels, packed_scales]
    if zeros is not None:
        packed_zeros = empty_panels(shape.zeros)
        packed_zeros += _SYMMETRIC
        for panel, begin in enumerate(range(0, num_out, width)):
            own = zeros[begin : begin + width]
            packed_zeros[panel, :, : len(own)] += own.T.astype(np.int16)
        leaves.append(packed_zeros)
    placed = jax.device_put(leaves, sharding)
    return jax.tree.unflatten(jax.tree.structure(shape), placed)


def packed_codes_shape(
    out_shape: tuple[int, ...],
    in_shape: tuple[int, ...],
    group: int | None,
    width: int,
    *,
    zeros: bool = False,
    block: int | None = BLOCK,
) -> PackedCodes:
    """The result of `pack_codes`, with shapes in place of its numbers."""
    assert group is None or group % LEAST_RUN == 0, group
    assert block in (None, BLOCK), block
    depth, num_panels = math.prod(in_shape), -(-math.prod(out_shape) // width)
    num_groups = 1 if group is None else -(-depth // group)
    panels: Any = jax.ShapeDtypeStruct((num_panels, -(-depth // 4), width, 4), jnp.uint8)
    scales: Any = jax.ShapeDtypeStruct((num_panels, num_groups, width), jnp.float32)
    packed_zeros: Any = jax.ShapeDtypeStruct((num_panels, num_groups, width), jnp.int16) if zeros else None
    return PackedCodes(
        panels=panels,
        scales=scales,
        zeros=packed_zeros,
        out_shape=out_shape,
        in_shape=in_shape,
        group=group,
        block=block,
    )
