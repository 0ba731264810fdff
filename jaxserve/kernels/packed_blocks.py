"""A weight as codes in blocks, in the order in which the CPU's own product reads them: at about a GGUF file's bytes.

Rows are rounded to eight bits in spans of 32 inputs, as llama.cpp rounds them, and products are sums of integers. The
machine code is in `cpu.matmul_blocks`, the table of codes in `block_codes`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int, UInt8

from jaxserve.kernels import halves
from jaxserve.kernels.block_codes import BLOCK_CODES, SPAN, STEPS, BlockCode
from jaxserve.kernels.coded_weight import CodedWeight
from jaxserve.kernels.composed_weight import WithOffsets
from jaxserve.kernels.cpu import machine_code, scratch
from jaxserve.kernels.matmul import Axes, Weight
from jaxserve.kernels.packed_weight import empty_panels
from jaxserve.kernels.xla_matmul import DenseWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBlocks(Weight):
    """A weight [*out, *in] of codes in blocks: (u - zero) * s, or (u - zero) * s - m where the code has minima.

    Row p * W + w of [out, in] is column w of panel p, and a block of a panel is a run of sections that each have the
    same bytes of all W columns: the scales and minima of the block, then of each span of 32 inputs its integer scales,
    its integer minima, and its codes. Of eight bits, four codes of a column are a word, eight words a span. Of fewer,
    the first four words have the low four bits of all codes, of inputs 8 j to 8 j + 3 in the low halves of word j and
    of the next four in the high halves; planes of words follow with the bits above: byte c of the planes has those of
    inputs 4 t + c, the lowest bits of the lowest t. Rows of a weight [2, F, *in] lie in another order (`halves`).

    Rows of x are cut into spans, which are rounded as blocks of `PackedCodes` are. The products of the inputs that
    share a scale are added as integers. An output is one chain over these groups, in order, from 0, of float32 fused
    multiply-adds: out = fma(sum, s * scale of x, out), and with minima, after each span, out = fma(sum of the codes of
    x * scale of x, -m, out). A scale s, or m, that is an integer times a float32 is their rounded product. NaN or an
    infinity in a row makes all outputs of this row NaN.

    So an output has the same bits on every processor and in every batch, whatever else is in it, as far as no number is
    smaller than the smallest normal one.

    Attributes:
      panels: outputs past the last have scales of 0.
      code: a name of `BLOCK_CODES`.
      zero: the unsigned code that stands for 0.
      width: columns of a panel, as the processor wants.
      out_shape, in_shape: sizes of the weight's axes. Inputs are a multiple of those of a block.
      dtype: of rows that are looked up.
    """

    panels: UInt8[Array, "P blocks bytes"]
    code: str = dataclasses.field(metadata={"static": True})
    zero: int = dataclasses.field(metadata={"static": True})
    width: int = dataclasses.field(metadata={"static": True})
    out_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    in_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    def multiply(self, x: Float[Array, "T ..."]) -> Float[Array, "T ..."]:
        """`Weight.multiply`, as the class says."""
        rows, rounded = self._rows(x)
        columns, num_bytes = len(self.panels) * self.width, len(rows) * rounded.row_bytes
        results = [
            jax.ShapeDtypeStruct((len(rows), columns), jnp.float32),
            jax.ShapeDtypeStruct((num_bytes,), jnp.uint8),
        ]
        out, _ = self._run(rows, rounded, jnp.zeros(0, jnp.int32), results)
        return halves.from_panels(out, self.out_shape, self.width)

    def multiply_gated(self, x: Float[Array, "T ..."], activation: str) -> Float[Array, "T F"]:
        """`Weight.multiply_gated`: both products as `multiply` gives them, and one rounding to the dtype of x."""
        if activation not in halves.FACTORS:
            return super().multiply_gated(x, activation)
        assert halves.has_halves(self.out_shape), self.out_shape
        rows, rounded = self._rows(x)
        rooms = halves.rooms_of(len(rows), self.width, begin=len(rows) * rounded.row_bytes)
        results = halves.gated_results(len(rows), len(self.panels) * self.width // 2, x.dtype, rooms)
        out, _ = self._run(rows, rounded, halves.gating_numbers(activation, x.dtype, rooms), results)
        return out[:, : self.out_shape[1]]

    def _rows(self, x: Float[Array, "T ..."]) -> tuple[Float[Array, "T K"], scratch.RoundedSpans]:
        """Rows as the machine code takes them, and where it keeps them rounded."""
        depth = math.prod(self.in_shape)
        groups = SPAN // BLOCK_CODES[self.code].group
        rounded = scratch.RoundedSpans.of(spans=depth // SPAN, groups=groups)
        return x.reshape(-1, depth).astype(jnp.float32), rounded

    def _run(
        self, rows: Array, rounded: scratch.RoundedSpans, gating: Array, results: list[jax.ShapeDtypeStruct]
    ) -> Sequence[Array]:
        sizes = (rounded.row_bytes, rounded.scales, rounded.starts, rounded.sums, self.zero)
        return jax.ffi.ffi_call(prepare(self.code), results)(rows, self.panels, jnp.asarray(sizes, jnp.int32), gating)

    def take(self, rows: Int[Array, " T"]) -> Float[Array, "T K"]:
        """`Weight.take`: the bytes of a row are gathered one by one."""
        assert not halves.has_halves(self.out_shape), "no table has"
        code, groups = BLOCK_CODES[self.code], SPAN // BLOCK_CODES[self.code].group
        starts, sizes, inside = _places(code)
        column = (rows % self.width)[:, None, None]
        places = starts * self.width + column * sizes + inside  # [T, 1, bytes of a block]
        blocks = np.arange(self.panels.shape[1])[:, None]
        raw = self.panels.at[(rows // self.width)[:, None, None], blocks, places].get(mode="fill", fill_value=0)
        body = raw[..., code.header :].reshape(*raw.shape[:2], -1, code.span_bytes)  # [T, B, spans, bytes]
        codes = _unpacked(body[..., code.span_scales :], code.bits).astype(jnp.float32) - self.zero

        def numbers(place: int, first: int, count: int) -> Array:
            """Scales or minima of spans, [T, B, spans, count]."""
            if code.scales == "float16":
                bits = raw[..., 2 * place : 2 * place + 2]
                return jax.lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)[..., None, None]
            factor = jax.lax.bitcast_convert_type(raw[..., 4 * place : 4 * place + 4], jnp.float32)
            whole = jax.lax.bitcast_convert_type(body[..., first : first + count], jnp.int8)
            return factor[..., None, None] * whole.astype(jnp.float32)

        values = codes * jnp.repeat(numbers(0, 0, groups), code.group, axis=-1)
        if code.minima:
            # XLA would make one operation of the product and the difference, with other bits than elsewhere.
            values = jax.lax.optimization_barrier(values) - numbers(1, groups, 1)
        return values.reshape(len(rows), -1).astype(self.dtype)

    def leaf_axes(self, axes: Axes) -> tuple[Axes, ...]:
        """`Weight.leaf_axes`: panels are never cut."""
        del axes
        return ((None, None, None),)


def _places(code: BlockCode) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each byte of an output's block: where its section begins, the section's bytes of an output, and which of these
    it is."""
    starts: list[int] = []
    sizes: list[int] = []
    inside: list[int] = []

    def add(size: int, count: int = 1) -> None:
        for _ in range(count):
            starts.extend([len(starts)] * size)
            sizes.extend([size] * size)
            inside.extend(range(size))

    add(2 if code.scales == "float16" else 4, 1 + code.minima)
    for _ in range(code.inputs // SPAN):
        add(1, code.span_scales)
        add(4, code.bits)
    return np.asarray(starts), np.asarray(sizes), np.asarray(inside)


def _unpacked(words: UInt8[Array, "... bytes"], bits: int) -> Array:
    """Unsigned codes [..., 32] of the words of spans."""
    if bits == 8:
        return words
    words = words.reshape(*words.shape[:-1], bits, 4)
    low = words[..., :4, :]
    codes = jnp.stack([low & 15, low >> 4], axis=-2).reshape(*words.shape[:-2], STEPS, 4)
    own = bits - 4
    if own > 0:
        steps = [(4 + own * step // 8, own * step % 8) for step in range(STEPS)]
        high = jnp.stack([words[..., word, :] >> place & (2**own - 1) for word, place in steps], axis=-2)
        codes = codes | high << 4
    return codes.reshape(*words.shape[:-2], SPAN)


def prepare(code: str) -> str:
    """Makes ready what products of such weights call by name (`Matmul.prepare`). Returns the name."""
    return machine_code.provide("matmul_blocks", code.lower())


def pack(weight: CodedWeight | WithOffsets, width: int) -> PackedBlocks:
    """A weight whose storage names a code of the table, in panels of `width`; on the host, without compiling."""
    coded, offsets = (weight.codes, weight.offsets) if isinstance(weight, WithOffsets) else (weight, None)
    assert isinstance(coded, CodedWeight), coded
    num_out = math.prod(coded.out_shape)
    codes, scales = (np.asarray(leaf).reshape(num_out, -1) for leaf in (coded.codes, coded.scales))
    minima = None
    if offsets is not None:
        assert isinstance(offsets, DenseWeight), offsets
        minima = np.asarray(offsets.array).reshape(num_out, -1)
    assert coded.zeros is None or (np.asarray(coded.zeros) == -8).all(), "codes of four bits that count from 0"
    shape = shape_of(weight, width)
    panels = pack_blocks(codes, scales, minima, BLOCK_CODES[shape.code], shape.zero, coded.out_shape, width)
    sharding = coded.codes.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec())
    return dataclasses.replace(shape, panels=jax.device_put(panels, sharding))


def shape_of(weight: CodedWeight | WithOffsets, width: int) -> PackedBlocks:
    """The result of `pack`, with shapes in place of its numbers, for a weight of shapes."""
    coded: CodedWeight = weight.codes if isinstance(weight, WithOffsets) else weight
    name = coded.storage.blocks
    assert name is not None, coded.storage
    code, depth = BLOCK_CODES[name], math.prod(coded.in_shape)
    assert depth % code.inputs == 0 and coded.storage.group == code.group, (depth, coded.storage)
    panels: Any = jax.ShapeDtypeStruct(
        (halves.num_panels(coded.out_shape, width), depth // code.inputs, code.block_bytes * width), jnp.uint8
    )
    return PackedBlocks(
        panels=panels,
        code=name,
        zero=0 if coded.storage.zeros else _signed_zero(code, minima=isinstance(weight, WithOffsets)),
        width=width,
        out_shape=coded.out_shape,
        in_shape=coded.in_shape,
        dtype=coded.dtype,
    )


def _signed_zero(code: BlockCode, *, minima: bool) -> int:
    """What is added to signed codes: half their number. Five bits beside minima count from 0 in a byte."""
    return 0 if minima and code.bits > 4 else 2 ** (code.bits - 1)


def pack_blocks(
    codes: np.ndarray,
    scales: np.ndarray,
    minima: np.ndarray | None,
    code: BlockCode,
    zero: int,
    out_shape: tuple[int, ...],
    width: int,
) -> np.ndarray:
    """Panels of signed codes int8 [out, in], or of those from 0 on, with scales and minima float32 [out, groups].

    Numbers are kept exactly: an AssertionError says that the code is not theirs.
    """
    depth = codes.shape[1]
    offset = 2**3 if zero == 0 and code.bits == 4 else zero
    num_blocks, spans = depth // code.inputs, code.inputs // SPAN
    num_panels = halves.num_panels(out_shape, width)
    found = empty_panels(jax.ShapeDtypeStruct((num_panels, num_blocks, code.block_bytes * width), jnp.uint8))
    codes, scales = (halves.side_by_side(rows, out_shape, width) for rows in (codes, scales))
    whole = np.zeros_like(scales, shape=(len(scales), depth // SPAN)) if minima is None else minima
    if minima is not None:
        whole = halves.side_by_side(minima, out_shape, width)
    headers, integers = _scales_apart(scales, whole, code)
    for panel, begin in enumerate(range(0, len(codes), width)):
        own = codes[begin : begin + width]
        num_own = len(own)

        def put(start: int, rows: np.ndarray, panel: int = panel, num_own: int = num_own) -> None:
            """Writes [own, B, bytes] to the section that begins `start` bytes of an output into each block."""
            size = rows.shape[2]
            place = found[panel, :, start * width : (start + size) * width].reshape(num_blocks, width, size)
            place[:, :num_own] = rows.swapaxes(0, 1)

        unsigned = (own.view(np.uint8) + np.uint8(offset)).reshape(num_own, num_blocks, spans, STEPS, 4)
        assert code.bits == 8 or not (unsigned >> code.bits).any(), "codes of more bits than the code has"
        words = _packed(unsigned, code.bits)  # [own, B, spans, words, 4]
        for number, header in enumerate(headers):
            size = header.dtype.itemsize
            put(size * number, header[begin : begin + width].view(np.uint8).reshape(num_own, num_blocks, size))
        for span in range(spans):
            start = code.header + span * code.span_bytes
            for number in range(code.span_scales):
                put(start + number, integers[begin : begin + width, :, span, number, None].view(np.uint8))
            for number in range(words.shape[3]):
                put(start + code.span_scales + 4 * number, words[:, :, span, number])
    return found


def _packed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Words uint8 [..., words, 4] of unsigned codes [..., 8, 4]."""
    if bits == 8:
        return codes
    words = [codes[..., 0::2, :] & 15 | codes[..., 1::2, :] << 4]
    own = bits - 4
    steps = 8 // own if own else 0  # of a word of a plane
    for first in range(0, STEPS if own else 0, steps or 1):
        plane = np.zeros_like(codes[..., :1, :])
        for place in range(steps):
            plane |= codes[..., first + place, None, :] >> 4 << own * place
        words.append(plane)
    return np.concatenate(words, axis=-2)


def _scales_apart(scales: np.ndarray, minima: np.ndarray, code: BlockCode) -> tuple[list[np.ndarray], np.ndarray]:
    """What stands at the front of blocks [out, B], and the integers of spans int8 [out, B, spans, numbers]."""
    num_out = len(scales)
    if code.scales == "float16":
        headers = [scales.astype(np.float16), *([minima.astype(np.float16)] if code.minima else [])]
        for header, given in zip(headers, (scales, minima), strict=False):
            assert (header.astype(np.float32) == given).all(), "scales are no float16 numbers"
        return headers, np.empty((num_out, 0), np.int8)
    spans = code.inputs // SPAN
    factor, integers = _factored(scales.reshape(num_out, -1, spans * SPAN // code.group))
    headers, numbers = [factor], [integers.reshape(*factor.shape, spans, -1)]
    if code.minima:
        factor, integers = _factored(minima.reshape(num_out, -1, spans))
        headers.append(factor)
        numbers.append(integers[..., None])
    return headers, np.concatenate(numbers, axis=-1)


def _factored(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [out, B] and int8 [out, B, n] of which float32 numbers [out, B, n] are the products, exactly.

    Their greatest common divisor: what a file has may be a part of it, times integers that share a factor.
    """
    mantissa, exponent = np.frexp(numbers)
    least = np.where(numbers == 0, np.iinfo(np.int32).max, exponent).min(axis=-1, keepdims=True)
    shift = np.where(numbers == 0, 0, exponent - least)
    assert (shift < 24).all(), "no integers of eight bits"
    whole = (mantissa * 2.0**24).astype(np.int64) << shift
    divisor = np.gcd.reduce(whole, axis=-1)
    integers = whole // np.maximum(divisor, 1)[..., None]
    turned = np.where(integers.max(axis=-1, initial=0) > 127, -1, 1)  # 128 is -128 times a negative number
    integers *= turned[..., None]
    assert integers.min(initial=0) >= -128 and integers.max(initial=0) <= 127, "no integers of eight bits"
    unit = np.where(divisor == 0, 0, least[..., 0] - 24)
    factor = np.ldexp((turned * divisor).astype(np.float32), unit)
    return factor.astype(np.float32), integers.astype(np.int8)
