"""Float32 numbers to eight bits, in vector registers: the largest of a block, then the codes of a run and their sum."""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import types

from jaxserve.kernels.cpu.emit import BYTE, FLOAT, LANE, WORD, declare, everywhere, load, store, word
from jaxserve.kernels.cpu.simd import intrinsic

_SIZE = 0x7FFFFFFF  # all bits of a float but its sign: as integers, they are in the order of sizes, NaN last


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
