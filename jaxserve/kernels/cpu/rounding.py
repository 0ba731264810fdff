"""Float32 numbers to eight bits, in vector registers: the largest of a block, then the codes of a run and their sum."""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import types

from jaxserve.kernels.cpu.emit import BYTE, FLOAT, LANE, WORD, declare, everywhere, load, store, word
from jaxserve.kernels.cpu.simd import intrinsic

_SIZE = 0x7FFFFFFF  # all bits of a float but its sign: as integers, they are in the order of sizes, NaN last
_LEAST, _INFINITY = 0x04000000, 0x7F800000  # bits of 2^-119, below which numbers count as zeros, and of infinity


def largest_size(lanes: int) -> Callable[..., int]:
    """A function for Numba: (address, vectors) -> the bits of the largest |x| of `vectors` * `lanes` float32 numbers.

    More than those of infinity where one is NaN; 0 of no numbers.
    """
    integers = ir.VectorType(LANE, lanes)

    @intrinsic
    def largest(context: Any, address: Any, vectors: Any):
        del context, address, vectors

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del context, signature
            larger = declare(builder, f"llvm.smax.v{lanes}i32", integers, [integers] * 2)
            across = declare(builder, f"llvm.vector.reduce.smax.v{lanes}i32", LANE, [integers])
            size = ir.Constant(integers, [_SIZE] * lanes)

            def step(index: Any, held: Any) -> Any:
                at = builder.add(args[0], builder.mul(index, word(4 * lanes)))
                return builder.call(larger, [held, builder.and_(load(builder, at, integers), size)])

            found = _over_vectors(builder, args[1], ir.Constant(integers, None), step)
            return builder.zext(builder.call(across, [found]), WORD)

        return types.intp(types.intp, types.intp), generate

    return largest


def round_vectors(lanes: int) -> Callable[..., int]:
    """A function for Numba: (x, vectors, inverse, codes) -> sum of the codes; code = round(x * inverse), half to even.

    x and codes are addresses of `vectors` * `lanes` float32 numbers and bytes, inverse is float32.
    """
    floats, integers = ir.VectorType(FLOAT, lanes), ir.VectorType(LANE, lanes)
    bytes_ = ir.VectorType(BYTE, lanes)

    @intrinsic
    def round_all(context: Any, x: Any, vectors: Any, inverse: Any, codes: Any):
        del context, x, vectors, inverse, codes

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del context, signature
            x, vectors, inverse, codes = args
            rint = declare(builder, f"llvm.rint.v{lanes}f32", floats, [floats])
            across = declare(builder, f"llvm.vector.reduce.add.v{lanes}i32", LANE, [integers])
            factor = everywhere(builder, inverse, floats)

            def step(index: Any, held: Any) -> Any:
                at = builder.add(x, builder.mul(index, word(4 * lanes)))
                rounded = builder.call(rint, [builder.fmul(load(builder, at, floats), factor)])
                numbers = builder.fptosi(rounded, integers)
                store(builder, builder.add(codes, builder.mul(index, word(lanes))), builder.trunc(numbers, bytes_), 1)
                return builder.add(held, numbers)

            total = _over_vectors(builder, vectors, ir.Constant(integers, None), step)
            return builder.sext(builder.call(across, [total]), WORD)

        return types.intp(types.intp, types.intp, types.float32, types.intp), generate

    return round_all


def _over_vectors(builder: ir.IRBuilder, count: Any, first: Any, step: Callable[[Any, Any], Any]) -> Any:
    """A loop: `step(index, held)` for each index below `count`, which may be 0. Returns what the last step held."""
    before = builder.block
    test, body, after = (builder.append_basic_block(name) for name in ("test", "vector", "vectors"))
    builder.branch(test)
    builder.position_at_end(test)
    index, held = builder.phi(WORD), builder.phi(first.type)
    index.add_incoming(word(0), before)
    held.add_incoming(first, before)
    builder.cbranch(builder.icmp_signed("<", index, count), body, after)
    builder.position_at_end(body)
    new = step(index, held)
    index.add_incoming(builder.add(index, word(1)), builder.block)
    held.add_incoming(new, builder.block)
    builder.branch(test)
    builder.position_at_end(after)
    return held


def round_spans(lanes: int) -> Callable[..., None]:
    """A function for Numba: rounds a row in spans of 32 inputs, with the sums that products with blocks of codes want.

        round_row(x, spans, zero, group, codes, scales, starts, sums)

    All but spans, zero and group are addresses: of float32 [spans * 32], then of int8 codes, float32 scales [spans],
    int32 [spans * 32 / group] sums of the codes of a group times -zero, and float32 [spans] sums of a span times its
    scale. A span is rounded as a block of `PackedCodes` is. `group` is 16 or 32.
    """
    floats, integers, bytes_ = (ir.VectorType(kind, lanes) for kind in (FLOAT, LANE, BYTE))
    vectors = 32 // lanes

    @intrinsic
    def round_row(
        context: Any,
        x: Any,
        spans: Any,
        zero: Any,
        group: Any,
        codes: Any,
        scales: Any,
        starts: Any,
        sums: Any,
    ):
        del context, x, spans, zero, group, codes, scales, starts, sums

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del signature
            x, spans, zero, group, codes, scales, starts, sums = args
            larger = declare(builder, f"llvm.smax.v{lanes}i32", integers, [integers] * 2)
            largest = declare(builder, f"llvm.vector.reduce.smax.v{lanes}i32", LANE, [integers])
            added = declare(builder, f"llvm.vector.reduce.add.v{lanes}i32", LANE, [integers])
            rint = declare(builder, f"llvm.rint.v{lanes}f32", floats, [floats])
            size, nothing = ir.Constant(integers, [_SIZE] * lanes), ir.Constant(floats, None)
            zero = builder.trunc(builder.neg(zero), LANE)
            halved = builder.icmp_signed("==", group, word(16))

            def one_span(span: Any, held: Any) -> Any:
                at = builder.add(x, builder.mul(span, word(4 * 32)))
                numbers = [load(builder, builder.add(at, word(4 * lanes * n)), floats) for n in range(vectors)]
                sizes = [builder.and_(builder.bitcast(value, integers), size) for value in numbers]
                while len(sizes) > 1:
                    sizes = [builder.call(larger, [sizes[0], sizes[1]]), *sizes[2:]]
                bits = builder.call(largest, sizes)
                top = builder.bitcast(bits, FLOAT)
                is_zero = builder.icmp_signed("<", bits, ir.Constant(LANE, _LEAST))
                rounds = builder.and_(
                    builder.not_(is_zero), builder.icmp_signed("<", bits, ir.Constant(LANE, _INFINITY))
                )
                none = builder.select(is_zero, ir.Constant(FLOAT, 0.0), ir.Constant(FLOAT, float("nan")))
                most = ir.Constant(FLOAT, 127.0)
                scale = builder.select(rounds, builder.fdiv(top, most), none)
                factor = everywhere(builder, builder.fdiv(most, top), floats)
                totals = []
                for number, value in enumerate(numbers):
                    product = builder.select(rounds, builder.fmul(value, factor), nothing)
                    rounded = builder.fptosi(builder.call(rint, [product]), integers)
                    place = builder.add(codes, builder.add(builder.mul(span, word(32)), word(lanes * number)))
                    store(builder, place, builder.trunc(rounded, bytes_), 1)
                    totals.append(rounded)
                halves = []
                for part in (totals[: vectors // 2], totals[vectors // 2 :]):
                    while len(part) > 1:
                        part = [builder.add(part[0], part[1]), *part[2:]]
                    halves.append(builder.call(added, part))
                whole = builder.add(*halves)
                index = builder.mul(span, word(4))
                store(builder, builder.add(scales, index), scale)
                store(builder, builder.add(sums, index), builder.fmul(builder.sitofp(whole, FLOAT), scale))
                first = builder.select(halved, halves[0], whole)
                of_groups = builder.select(halved, builder.mul(index, word(2)), index)
                start = builder.add(starts, of_groups)
                # Of one group the second goes to the same place, and before the first.
                second = builder.add(start, builder.select(halved, word(4), word(0)))
                store(builder, second, builder.mul(halves[1], zero))
                store(builder, start, builder.mul(first, zero))
                return held

            _over_vectors(builder, spans, ir.Constant(LANE, 0), one_span)
            return context.get_dummy_value()

        return types.void(*[types.intp] * 8), generate

    return round_row
