"""A weight as codes beside their scales, in the order in which the CPU's own product reads them.

Codes are a quarter or an eighth of the bytes of float32, which is what one row waits for. Where rows are rounded to
eight bits, too, products are sums of integers, at four times the rate. The machine code is in `cpu.matmul_codes`.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, Float, Int, Int16, UInt8

from jaxserve.kernels import halves
from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.cpu import machine_code, scratch
from jaxserve.kernels.matmul import Axes, Weight
from jaxserve.kernels.packed_weight import empty_panels

FLOAT8 = "float8_e4m3fn"
STORED = {"int8": 4, "int4": 8, FLOAT8: 4}  # codes by name, and how many inputs of an output four bytes hold
BLOCK = scratch.BLOCK
LEAST_RUN = 16  # inputs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedCodes(Weight):
    """A weight [*out, *in] of codes: row p * W + w of [out, in] is (u - z) * s in column k.

    Of eight bits, the unsigned code u is panels[p, k // 4, w, k % 4]. Of four bits it is half of the byte
    panels[p, k // 8, w, k % 4]: the low half where k % 8 < 4, else the high one. Scale and zero are those of its group:
    s = scales[p, k // group, w], and z is zeros[p, k // group, w]; 128, or 8 of four bits, where there are no zeros.
    Of float8_e4m3fn, u - z is the value of the code over 256, and `scales` are 256 times those of the weight. Rows of a
    weight [2, F, *in] lie in another order (`halves`).

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
        to a multiple of four or eight, have the code 128 or 8, or 0.
      scales: of each group of inputs and output.
      zeros: as unsigned codes; None: 128 or 8 everywhere.
      code: a name of `STORED`.
      out_shape, in_shape: sizes of the weight's axes.
      group: inputs that share a scale, a multiple of 16; None: all of an output.
      block: 128 or None, as above.
      dtype: of rows that are looked up.
    """

    panels: UInt8[Array, "P K/4 W 4"] | UInt8[Array, "P K/8 W 4"]
    scales: Float[Array, "P G W"]
    zeros: Int16[Array, "P G W"] | None = None
    out_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    in_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    group: int | None = dataclasses.field(metadata={"static": True})
    block: int | None = dataclasses.field(default=BLOCK, metadata={"static": True})
    code: str = dataclasses.field(default="int8", metadata={"static": True})
    dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`, as the class says."""
        panels, _, width, _ = self.panels.shape
        call = self.call(x)
        results = [jax.ShapeDtypeStruct((call.rows.shape[0], panels * width), jnp.float32), *call.scratch]
        out, *_ = self._run(call, jnp.zeros(0, jnp.int32), results)
        return halves.from_panels(out, self.out_shape, width)

    def multiply_gated(self, x: Float[Array, "T ..."], activation: str) -> Float[Array, "T F"]:
        """`Weight.multiply_gated`: both products as `multiply` gives them, and one rounding to the dtype of x."""
        if activation not in halves.FACTORS:
            return super().multiply_gated(x, activation)
        assert halves.has_halves(self.out_shape), self.out_shape
        panels, _, width, _ = self.panels.shape
        call = self.call(x)
        rooms = halves.rooms_of(call.rows.shape[0], width, begin=sum(array.size for array in call.scratch))
        results = halves.gated_results(call.rows.shape[0], panels * width // 2, x.dtype, rooms)
        out, _ = self._run(call, halves.gating_numbers(activation, x.dtype, rooms), results)
        return out[:, : self.out_shape[1]]

    def call(self, x: Float[Array, "T ..."]) -> "Call":
        """What the machine code is given beside the weight."""
        depth = math.prod(self.in_shape)
        rows = x.reshape(-1, depth).astype(jnp.float32)
        if self.block is None:
            rows = jnp.pad(rows, ((0, 0), (0, -depth % STORED[self.code])))
            return Call(rows=rows, sizes=(self.group or rows.shape[1], 1), scratch=())
        run = math.gcd(self.group or self.block, self.block)
        rounded = scratch.RoundedRows.of(num_rows=rows.shape[0], depth=depth, run=run)
        places = (rounded.row_bytes, rounded.scales_begin, rounded.sums_begin)
        return Call(
            rows=rows,
            sizes=(run, -(-(self.group or depth) // run), *places),
            scratch=(jax.ShapeDtypeStruct((rounded.num_bytes,), jnp.uint8),),
        )

    def _run(self, call: "Call", gating: Array, results: list[jax.ShapeDtypeStruct]) -> list[Array]:
        target = prepare(code=self.code, zeros=self.zeros is not None, block=self.block)
        zeros = () if self.zeros is None else (self.zeros,)
        return jax.ffi.ffi_call(target, results)(
            call.rows, self.panels, self.scales, *zeros, jnp.asarray(call.sizes, jnp.int32), gating
        )

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T K"]:
        """`Weight.take`."""
        width, depth, middle = self.panels.shape[2], math.prod(self.in_shape), _middle(self.code)
        assert not halves.has_halves(self.out_shape), "no table has"
        panel, column = rows // width, rows % width
        codes = self.panels.at[panel, :, column].get(mode="fill", fill_value=0)  # [T, K / 4, 4]: scales are then 0
        if self.code == "int4":
            codes = jnp.stack([codes & 15, codes >> 4], axis=2)
        codes = codes.reshape(rows.shape[0], -1)[:, :depth].astype(jnp.int32)
        group_of = np.arange(depth) // (self.group or depth)
        scales = self.scales.at[panel, :, column].get(mode="fill", fill_value=0)[:, group_of]
        if self.code == FLOAT8:
            values = jax.lax.bitcast_convert_type(codes.astype(jnp.uint8), jnp.float8_e4m3fn).astype(jnp.float32)
            return (values * (scales / 256)).astype(self.dtype)
        if self.zeros is None:
            return ((codes - middle).astype(jnp.float32) * scales).astype(self.dtype)
        zeros = self.zeros.at[panel, :, column].get(mode="fill", fill_value=0)[:, group_of]
        return ((codes - zeros).astype(jnp.float32) * scales).astype(self.dtype)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`: panels are never cut."""
        del axes
        scales: Axes = (None, None, None)
        return ((None, None, None, None), *[scales] * (1 if self.zeros is None else 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """Rows as the machine code takes them, its sizes, and the shapes of its scratch arrays, of bytes."""

    rows: Float[Array, "T K"]
    sizes: tuple[int, ...]
    scratch: tuple[jax.ShapeDtypeStruct, ...]


def _middle(code: str) -> int:
    """The unsigned code of zero, where there are no zeros."""
    return {"int8": 128, "int4": 8, FLOAT8: 0}[code]


def prepare(*, code: str, zeros: bool, block: int | None) -> str:
    """Makes ready what products of such weights call by name (`Matmul.prepare`). Returns the name."""
    form = f"{code}_by_{'float32' if block is None else 'int8'}"
    return machine_code.provide("matmul_codes", f"{form}_zeros" if zeros else form)


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
    packed = pack_codes(codes, scales, *shapes, code=storage.code, zeros=zeros, block=block, sharding=sharding)
    return dataclasses.replace(packed, dtype=weight.dtype)


def shape_of(weight: CodedWeight, width: int) -> PackedCodes:
    """The result of `pack`, with shapes in place of its numbers, for a weight of shapes."""
    storage, block = weight.storage, weight.arithmetic.block
    shapes = (weight.out_shape, weight.in_shape, storage.group, width)
    packed = packed_codes_shape(*shapes, code=storage.code, zeros=storage.zeros, block=block)
    return dataclasses.replace(packed, dtype=weight.dtype)


def pack_codes(
    codes: np.ndarray,
    scales: np.ndarray,
    out_shape: tuple[int, ...],
    in_shape: tuple[int, ...],
    group: int | None,
    width: int,
    *,
    code: str = "int8",
    zeros: np.ndarray | None = None,
    block: int | None = BLOCK,
    sharding: Sharding | None = None,
) -> PackedCodes:
    """Codes [out, in] with scales float32 [out, G], in panels of `width`; on the host, a panel at a time.

    A weight is (code - zero) * scale; `zeros` are integers [out, G], -32640 to 32639, or None for 0. With `code`
    'int4' codes are -8 to 7. Codes are int8, or float8_e4m3fn without zeros. A code that is no number makes its group
    of the output none.
    """
    shape = packed_codes_shape(out_shape, in_shape, group, width, code=code, zeros=zeros is not None, block=block)
    num_out, depth = math.prod(out_shape), math.prod(in_shape)
    num_groups, middle = shape.scales.shape[1], _middle(code)
    assert codes.dtype == (FLOAT8 if code == FLOAT8 else np.int8), (codes.dtype, code)
    assert codes.shape == (num_out, depth), (codes.shape, shape)
    assert scales.shape == (num_out, num_groups), (scales.shape, num_groups)
    assert zeros is None or zeros.shape == scales.shape, zeros.shape
    if code == FLOAT8:
        codes, scales = codes.view(np.int8), 256 * scales
        first = np.arange(0, depth, group or depth)
        scales[np.logical_or.reduceat(codes & 0x7F == 0x7F, first, axis=1)] = np.nan
    codes, scales = (halves.side_by_side(rows, out_shape, width) for rows in (codes, scales))
    zeros = None if zeros is None else halves.side_by_side(zeros, out_shape, width)
    num_out = len(codes)
    panels, packed_scales = empty_panels(shape.panels), empty_panels(shape.scales)
    words = panels.view(np.uint32)[..., 0]
    padded = STORED[code] * panels.shape[1]
    tail = np.zeros((width, padded), np.int8) if depth < padded else None
    for panel, begin in enumerate(range(0, num_out, width)):
        own = codes[begin : begin + width]
        if tail is not None:
            tail[: len(own), :depth] = own
            own = tail[: len(own)]
        in_bytes = _in_half_bytes(own) if code == "int4" else np.ascontiguousarray(own)
        words[panel, :, : len(own)] = in_bytes.view(np.uint32).T
        packed_scales[panel, :, : len(own)] = scales[begin : begin + width].T
    # In two's complement this adds half the number of codes, to signed codes of eight bits and to those of four.
    np.bitwise_xor(panels, middle * 17 if code == "int4" else middle, out=panels)
    leaves: list[np.ndarray] = [panels, packed_scales]
    if zeros is not None:
        packed_zeros = empty_panels(shape.zeros)
        packed_zeros += middle
        for panel, begin in enumerate(range(0, num_out, width)):
            own = zeros[begin : begin + width]
            packed_zeros[panel, :, : len(own)] += own.T.astype(np.int16)
        leaves.append(packed_zeros)
    placed = jax.device_put(leaves, sharding)
    return jax.tree.unflatten(jax.tree.structure(shape), placed)


def _in_half_bytes(codes: np.ndarray) -> np.ndarray:
    """Bytes [out, in / 2] of signed codes int8 [out, in]: of each eight the first four in the low halves."""
    assert codes.size == 0 or (codes.min() >= -8 and codes.max() <= 7), "codes of more than four bits"
    eights = codes.view(np.uint8).reshape(len(codes), -1, 2, 4)
    return (eights[:, :, 0] & 15 | eights[:, :, 1] << 4).reshape(len(codes), -1)


def packed_codes_shape(
    out_shape: tuple[int, ...],
    in_shape: tuple[int, ...],
    group: int | None,
    width: int,
    *,
    code: str = "int8",
    zeros: bool = False,
    block: int | None = BLOCK,
) -> PackedCodes:
    """The result of `pack_codes`, with shapes in place of its numbers."""
    assert group is None or group % LEAST_RUN == 0, group
    assert block in (None, BLOCK), block
    assert code != FLOAT8 or (block is None and not zeros), (block, zeros)
    depth, num_panels = math.prod(in_shape), halves.num_panels(out_shape, width)
    num_groups = 1 if group is None else -(-depth // group)
    panels: Any = jax.ShapeDtypeStruct((num_panels, -(-depth // STORED[code]), width, 4), jnp.uint8)
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
        code=code,
    )
