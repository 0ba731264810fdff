"""Products of rows with a run of codes, held in vector registers: the inside of `matmul_codes`.

A run is a piece of the inputs whose codes share their scales. Four codes of one output lie side by side, which is what
the dot instructions of processors take: `vpdpbusd` multiplies four unsigned bytes with four signed ones and adds all to
a 32-bit sum. Processors without it add the same integers after widening them.

Codes of four bits share a byte: four inputs in the low halves of four bytes, the next four in the high halves. Two
instructions make them the bytes that codes of eight bits are, and all that follows is the same.

Codes of float8_e4m3fn are multiplied as float32 numbers alone. Seven of their bits, shifted, are those of a half that
is their value over 256, small numbers without a leading one included, and processors widen halves in one instruction.

The type of the four codes of an output (`codes_kind` below) says how they lie: uint32, a byte each; uint16, half a
byte each; int32, float8_e4m3fn.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm
import llvmlite.ir as ir
from numba.core import types

from jaxserve.kernels.cpu.emit import (
    BYTE,
    FLOAT,
    LANE,
    LINE,
    WORD,
    declare,
    element,
    everywhere,
    load,
    prefetch,
    store,
    word,
)
from jaxserve.kernels.cpu.simd import intrinsic
from jaxserve.kernels.cpu.target import Target

_CODES = 4  # that lie side by side, and are one step of a loop
_LOW_HALVES = 0x0F0F0F0F  # of the bytes of a word
_BYTE_OPERANDS = 22  # version of LLVM since which its dot instruction takes vectors of bytes
_PARTS = {types.uint32: 1, types.int32: 1, types.uint16: 2}  # codes that share a byte, by the type of four codes
_TWO_23 = 0x4B000000  # bits of 2^23 in float32: its last bits count ones


def run_product(rows: int, panels: int, target: Target) -> Callable[..., Any]:
    """A function for Numba: c[rows, panels * W] = s * (x (u - z)) over one run, or c + that where `add`.

        product(x, x_stride, codes, steps, sums, sums_stride, zeros, x_scales, x_scales_stride, scales,
                c, c_stride, add, panel_strides, ahead, ahead_step, x_kind, zeros_kind, codes_kind)

    u are unsigned codes of each output, bytes [steps, W, 4] at `codes`, of which a step holds the next `line_inputs` of
    `codes_kind`; s float32 and z int16 of each output lie at `scales` and `zeros`. A second panel lies `panel_strides`
    bytes further: (codes, scales, zeros). Strides of x, its sums and scales are in bytes, that of c too. z is half the
    number of codes where `zeros_kind` is none. Of float8_e4m3fn, u - z is the value of a code over 256.

    Where `x_kind` is int8, x are codes [rows, inputs], with the int32 sum of each row at `sums` and its float32
    scale at `x_scales`. The product of codes is exact in 32 bits, and c is one fused multiply-add: product * (s *
    x_scale) + c. Where it is float32, the run is a chain of fused multiply-adds in the order of inputs, and c is one
    more: chain * s + c.

    Each step fetches the lines of the cache at `ahead`, as many as a step of a panel has, and the next step those
    `ahead_step` bytes further.
    """
    lanes, vectors = target.lanes, target.vectors
    floats, integers = ir.VectorType(FLOAT, lanes), ir.VectorType(LANE, lanes)
    vector_bytes = _CODES * lanes
    columns = [(panel, vector) for panel in range(panels) for vector in range(vectors)]

    @intrinsic
    def product(
        context: Any,
        x: Any,
        x_stride: Any,
        codes: Any,
        steps: Any,
        sums: Any,
        sums_stride: Any,
        zeros: Any,
        x_scales: Any,
        x_scales_stride: Any,
        scales: Any,
        c: Any,
        c_stride: Any,
        add: Any,
        panel_strides: Any,
        ahead: Any,
        ahead_step: Any,
        x_kind: Any,
        zeros_kind: Any,
        codes_kind: Any,
    ):
        del context, x, x_stride, codes, steps, sums, sums_stride, zeros, x_scales, x_scales_stride, scales
        del c, c_stride, add, panel_strides, ahead, ahead_step
        strides = types.UniTuple(types.intp, 3)
        kinds = (x_kind, zeros_kind, codes_kind)
        signature = types.void(*[types.intp] * 12, types.boolean, strides, types.intp, types.intp, *kinds)
        by_codes, has_zeros = x_kind == types.int8, zeros_kind == types.int16
        is_float8 = codes_kind == types.int32
        assert not (is_float8 and (by_codes or has_zeros)), "float8 has no zeros, and is multiplied with floats"
        parts, bits = _PARTS[codes_kind], 8 // _PARTS[codes_kind]

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del signature
            x, x_stride, codes, steps, sums, sums_stride, zeros, x_scales, x_scales_stride, scales = args[:10]
            c, c_stride, add, panel_strides, ahead, ahead_step = args[10:16]
            code_stride, scale_stride, zero_stride = (builder.extract_value(panel_strides, n) for n in range(3))
            fma = declare(builder, f"llvm.fma.v{lanes}f32", floats, [floats] * 3)

            def place(start: Any, number: int, stride: Any, offset: int = 0) -> Any:
                """The address that is `offset` bytes into row, or panel, `number`."""
                return builder.add(builder.add(start, builder.mul(word(number), stride)), word(offset))

            x_rows = [place(x, row, x_stride) for row in range(rows)]
            zero_codes = [ir.Constant(integers, [2 ** (bits - 1)] * lanes)] * len(columns)
            if has_zeros:
                kept = ir.VectorType(ir.IntType(16), lanes)
                places = [place(zeros, panel, zero_stride, 2 * lanes * vector) for panel, vector in columns]
                zero_codes = [builder.sext(load(builder, at, kept, 2), integers) for at in places]
            above = ir.Constant(integers, [_TWO_23] * lanes)
            zero_floats = [
                builder.bitcast(builder.add(above, zero), floats) if has_zeros else None for zero in zero_codes
            ]
            if by_codes:
                empty: list[Any] = []
                for row in range(rows):
                    total = load(builder, place(sums, row, sums_stride), LANE)
                    total = everywhere(builder, builder.neg(total), integers)
                    empty += [builder.mul(zero, total) for zero in zero_codes]
            else:
                empty = [ir.Constant(floats, None)] * (rows * len(columns))

            before = builder.block
            loop, after = builder.append_basic_block("run"), builder.append_basic_block("scales")
            builder.branch(loop)
            builder.position_at_end(loop)
            step = builder.phi(WORD)
            held = [builder.phi(value.type) for value in empty]
            step.add_incoming(word(0), before)
            for sum_, value in zip(held, empty, strict=True):
                sum_.add_incoming(value, before)
            line = builder.add(codes, builder.mul(step, word(vectors * vector_bytes)))
            raw = [
                load(builder, place(line, panel, code_stride, vector * vector_bytes), integers)
                for panel, vector in columns
            ]
            new: list[Any] = list(held)
            for part in range(parts):
                inputs = builder.add(builder.mul(step, word(parts * _CODES)), word(part * _CODES))
                if by_codes:
                    dot = make_dot(builder, target, [_bytes_of_part(builder, value, part, parts) for value in raw])
                    for row, start in enumerate(x_rows):
                        four = load(builder, builder.add(start, inputs), LANE, 1)
                        begin = row * len(columns)
                        new[begin : begin + len(columns)] = dot(new[begin : begin + len(columns)], four)
                    continue
                for code in range(_CODES):
                    if is_float8:
                        wide = [_float_of_float8(builder, value, 8 * code, floats) for value in raw]
                    else:
                        first, pairs = 8 * code + bits * part, zip(raw, zero_floats, strict=True)
                        widen = _float_of_code if bits == 8 or lanes != 16 else _float_of_half_byte
                        wide = [widen(builder, value, first, bits, zero) for value, zero in pairs]
                    for row, start in enumerate(x_rows):
                        at = element(builder, start, builder.add(inputs, word(code)), 4)
                        number = everywhere(builder, load(builder, at, FLOAT), floats)
                        for column, value in enumerate(wide):
                            n = row * len(columns) + column
                            new[n] = builder.call(fma, [number, value, new[n]])
            further = builder.add(ahead, builder.mul(step, ahead_step))
            for panel in range(panels):
                for begin in range(0, vectors * vector_bytes, LINE):
                    prefetch(builder, place(further, panel, code_stride, begin))
            following = builder.add(step, word(1))
            step.add_incoming(following, builder.block)
            for sum_, value in zip(held, new, strict=True):
                sum_.add_incoming(value, builder.block)
            builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)

            builder.position_at_end(after)
            own = [
                load(builder, place(scales, panel, scale_stride, 4 * lanes * vector), floats)
                for panel, vector in columns
            ]
            for row in range(rows):
                if by_codes:
                    x_scale = load(builder, place(x_scales, row, x_scales_stride), FLOAT)
                    row_scales = [builder.fmul(everywhere(builder, x_scale, floats), scale) for scale in own]
                else:
                    row_scales = own
                start = place(c, row, c_stride)
                for column, scale in enumerate(row_scales):
                    value = new[row * len(columns) + column]
                    at = builder.add(start, word(4 * lanes * column))
                    old = builder.select(add, load(builder, at, floats), ir.Constant(floats, None))
                    value = builder.sitofp(value, floats) if by_codes else value
                    store(builder, at, builder.call(fma, [value, scale, old]))
            return context.get_dummy_value()

        return signature, generate

    return product


def make_dot(
    builder: ir.IRBuilder, target: Target, codes: list[Any], bits: int = 8
) -> Callable[[list[Any], Any], list[Any]]:
    """What adds to sums [lanes] of each vector of unsigned codes of `bits` their products with the same four signed
    ones, which are -127 to 127."""
    lanes = target.lanes
    integers = ir.VectorType(LANE, lanes)
    if target.dot_int8:
        kind = ir.VectorType(BYTE, _CODES * lanes) if llvm.llvm_version_info[0] >= _BYTE_OPERANDS else integers
        instruction = declare(builder, f"llvm.x86.avx512.vpdpbusd.{32 * lanes}", integers, [integers, kind, kind])
        unsigned = [builder.bitcast(value, kind) for value in codes]

        def add_dots(sums: list[Any], four: Any) -> list[Any]:
            signed = builder.bitcast(everywhere(builder, four, integers), kind)
            return [
                builder.call(instruction, [sum_, value, signed]) for sum_, value in zip(sums, unsigned, strict=True)
            ]

        return add_dots
    if bits < 8 and target.dot_pairs:
        return _make_pair_dot(builder, target, codes)

    # 16 bits each: the even codes of all groups of four, and the odd ones. Neighbours are multiplied and added in
    # pairs, which is an instruction of its own on most processors.
    halves, wide = ir.VectorType(ir.IntType(16), 2 * lanes), ir.VectorType(LANE, 2 * lanes)
    mask, byte = ir.Constant(integers, [0x00FF00FF] * lanes), ir.Constant(halves, [8] * (2 * lanes))
    eight = ir.Constant(integers, [8] * lanes)
    pairs = [
        [builder.bitcast(builder.and_(value, mask), halves) for value in (given, builder.lshr(given, eight))]
        for given in codes
    ]
    undefined = ir.Constant(wide, ir.Undefined)
    chosen = [ir.Constant(integers, list(range(first, 2 * lanes, 2))) for first in (0, 1)]

    def add_widened(sums: list[Any], four: Any) -> list[Any]:
        signed = builder.bitcast(everywhere(builder, four, integers), halves)
        parts = [builder.ashr(builder.shl(signed, byte), byte), builder.ashr(signed, byte)]
        new = []
        for sum_, given in zip(sums, pairs, strict=True):
            for value, part in zip(given, parts, strict=True):
                products = builder.mul(builder.sext(value, wide), builder.sext(part, wide))
                first, second = (builder.shuffle_vector(products, undefined, mask) for mask in chosen)
                sum_ = builder.add(sum_, builder.add(first, second))
            new.append(sum_)
        return new

    return add_widened


def _make_pair_dot(builder: ir.IRBuilder, target: Target, codes: list[Any]) -> Callable[[list[Any], Any], list[Any]]:
    """`make_dot` for codes of fewer than seven bits, with the instruction that adds two products of bytes in 16 bits:
    two of 63 * 127 fit there, two of 255 * 127 would not."""
    lanes = target.lanes
    integers, halves = ir.VectorType(LANE, lanes), ir.VectorType(ir.IntType(16), 2 * lanes)
    kind = ir.VectorType(BYTE, _CODES * lanes)
    pairs, fours = {8: ("avx2.pmadd.ub.sw", "avx2.pmadd.wd"), 16: ("avx512.pmaddubs.w.512", "avx512.pmaddw.d.512")}[
        lanes
    ]
    add_pairs = declare(builder, f"llvm.x86.{pairs}", halves, [kind, kind])
    add_fours = declare(builder, f"llvm.x86.{fours}", integers, [halves, halves])
    ones, unsigned = ir.Constant(halves, [1] * (2 * lanes)), [builder.bitcast(value, kind) for value in codes]

    def add_dots(sums: list[Any], four: Any) -> list[Any]:
        signed = builder.bitcast(everywhere(builder, four, integers), kind)
        return [
            builder.add(sum_, builder.call(add_fours, [builder.call(add_pairs, [value, signed]), ones]))
            for sum_, value in zip(sums, unsigned, strict=True)
        ]

    return add_dots


def _bytes_of_part(builder: ir.IRBuilder, raw: Any, part: int, parts: int) -> Any:
    """Four codes of each output as unsigned bytes: all of `raw`, or the low or the high halves of its bytes."""
    if parts == 1:
        return raw
    lanes = raw.type.count
    shifted = builder.lshr(raw, ir.Constant(raw.type, [4] * lanes)) if part else raw
    return builder.and_(shifted, ir.Constant(raw.type, [_LOW_HALVES] * lanes))


def _float_of_code(builder: ir.IRBuilder, codes: Any, first: int, bits: int, zero: Any) -> Any:
    """The code that begins at bit `first`, less its zero, as float32: 2^23 + u and 2^23 + z are both exact.

    `zero` has 2^23 + z; None: z is half the number of codes.
    """
    lanes = codes.type.count
    if zero is None:
        zero = ir.Constant(ir.VectorType(FLOAT, lanes), [2.0**23 + 2 ** (bits - 1)] * lanes)
    shifted = builder.lshr(codes, ir.Constant(codes.type, [first] * lanes)) if first else codes
    low = builder.and_(shifted, ir.Constant(codes.type, [2**bits - 1] * lanes))
    above = builder.or_(low, ir.Constant(codes.type, [_TWO_23] * lanes))
    return builder.fsub(builder.bitcast(above, zero.type), zero)


def _float_of_half_byte(builder: ir.IRBuilder, codes: Any, first: int, bits: int, zero: Any) -> Any:
    """`_float_of_code` of four bits in vectors of 16, which one instruction looks up in a vector of 16 numbers."""
    assert (codes.type.count, bits) == (16, 4), codes.type
    floats = ir.VectorType(FLOAT, 16)
    look_up = declare(builder, "llvm.x86.avx512.permvar.sf.512", floats, [floats, codes.type])
    shifted = builder.lshr(codes, ir.Constant(codes.type, [first] * 16)) if first else codes
    table = ir.Constant(floats, [float(code - 8) if zero is None else 2.0**23 + code for code in range(16)])
    found = builder.call(look_up, [table, shifted])
    return found if zero is None else builder.fsub(found, zero)


def _float_of_float8(builder: ir.IRBuilder, codes: Any, first: int, floats: ir.VectorType) -> Any:
    """The float8_e4m3fn that begins at bit `first`, over 256, as float32; what stands for NaN is 480 / 256."""
    lanes = codes.type.count

    def constant(value: int) -> ir.Constant:
        return ir.Constant(codes.type, [value] * lanes)

    shifted = builder.lshr(codes, constant(first)) if first else codes
    size = builder.shl(builder.and_(shifted, constant(0x7F)), constant(7))
    sign = builder.shl(builder.and_(shifted, constant(0x80)), constant(8))
    halves = builder.trunc(builder.or_(size, sign), ir.VectorType(ir.IntType(16), lanes))
    return builder.fpext(builder.bitcast(halves, ir.VectorType(ir.HalfType(), lanes)), floats)


@intrinsic
def line_inputs(context: Any, codes_kind: Any):
    """Inputs of a step of `run_product`, whose codes of W outputs lie in 4 * W bytes."""
    del context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, builder, args
        return word(_CODES * _PARTS[signature.args[0]])

    return types.intp(codes_kind), generate
