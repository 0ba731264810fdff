"""Gate and up to activation(gate) * up, in vector registers, where their product ends.

A panel of a weight [2, F, *in] has W / 2 columns of gate and the same columns of up beside them, so that one work item
has both halves. Its products go to a room of the worker, small enough to stay in the processor's cache, and from there
to the result, in the type of activations. XLA would write both halves to memory, read them again in a loop of its own,
and round in another one.

The activation is x * sigmoid(a x + b x^3), which silu is with a = 1 and b = 0, and the gelu of tanh with
a = 2 sqrt(2 / pi) and b = 0.044715 a, since 1 + tanh(u) = 2 sigmoid(2 u).
"""

from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
import numpy as np
from numba import njit
from numba.core import types

from jaxserve.kernels.cpu.call import floats, integers, operand, result, size_of
from jaxserve.kernels.cpu.emit import FLOAT, LANE, declare, everywhere, load, store, word
from jaxserve.kernels.cpu.scratch import GATING, MAX_WORKERS
from jaxserve.kernels.cpu.simd import bytes_of, intrinsic
from jaxserve.kernels.cpu.target import Target, find_target

# Words of a call that belong to this module, behind those of its kernel.
_FACTORS, _ROOMS, _ROOM_BYTES, _OUT, _COLUMNS, _ROWS, _SHORT = range(GATING, GATING + 7)
_SHORT_INTEGERS = ir.IntType(16)

# e to the power x, as Cephes has it: log2(e), the two parts of ln(2), and the polynomial of the rest.
_LOG2_E, _LN2_HIGH, _LN2_LOW = 1.44269504, 0.693359375, -2.12194440e-4
_POLYNOMIAL = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LEAST, _MOST = -87.3, 88.3  # of x: the power of two stays that of a normal number


def gated_row(target: Target) -> Callable[..., Any]:
    """A function for Numba: out[W / 2] = x * sigmoid(a x + b x^3) * up, where `both` has x [W / 2], then up [W / 2].

        row(both, out, a, b, kind)

    `both` and `out` are addresses, a and b float32. `out` has the type of `kind`: float32, or uint16 for bfloat16,
    rounded to the nearest, half to even. Each number is a chain of operations that are rounded once each, so that it
    has the same bits on every processor.
    """
    lanes, half = target.lanes, target.vectors // 2
    vector, wide = ir.VectorType(FLOAT, lanes), ir.VectorType(LANE, lanes)

    @intrinsic
    def row(context: Any, both: Any, out: Any, a: Any, b: Any, kind: Any):
        del context, both, out, a, b
        is_short = kind == types.uint16

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del signature
            both, out, a, b, _ = args
            fma = declare(builder, f"llvm.fma.v{lanes}f32", vector, [vector] * 3)
            floor, least, most = (
                declare(builder, f"llvm.{name}.v{lanes}f32", vector, [vector] * count)
                for name, count in (("floor", 1), ("minnum", 2), ("maxnum", 2))
            )

            def constant(value: float) -> ir.Constant:
                return ir.Constant(vector, [value] * lanes)

            def whole(value: int) -> ir.Constant:
                return ir.Constant(wide, [value] * lanes)

            def exp(x: Any) -> Any:
                x = builder.call(most, [builder.call(least, [x, constant(_MOST)]), constant(_LEAST)])
                power = builder.call(floor, [builder.call(fma, [x, constant(_LOG2_E), constant(0.5)])])
                rest = builder.call(fma, [power, constant(-_LN2_HIGH), x])
                rest = builder.call(fma, [power, constant(-_LN2_LOW), rest])
                value = constant(_POLYNOMIAL[0])
                for factor in _POLYNOMIAL[1:]:
                    value = builder.call(fma, [value, rest, constant(factor)])
                square = builder.fmul(rest, rest)
                value = builder.fadd(builder.call(fma, [value, square, rest]), constant(1.0))
                exponent = builder.shl(builder.add(builder.fptosi(power, wide), whole(127)), whole(23))
                return builder.fmul(value, builder.bitcast(exponent, vector))

            linear, cubic = everywhere(builder, a, vector), everywhere(builder, b, vector)
            for index in range(half):
                x = load(builder, builder.add(both, word(4 * lanes * index)), vector)
                up = load(builder, builder.add(both, word(4 * lanes * (half + index))), vector)
                slope = builder.call(fma, [builder.fmul(cubic, x), x, linear])
                shrink = exp(builder.fneg(builder.fmul(slope, x)))
                value = builder.fmul(builder.fdiv(x, builder.fadd(shrink, constant(1.0))), up)
                if not is_short:
                    store(builder, builder.add(out, word(4 * lanes * index)), value)
                    continue
                bits = builder.bitcast(value, wide)
                last = builder.and_(builder.lshr(bits, whole(16)), whole(1))
                rounded = builder.lshr(builder.add(bits, builder.add(last, whole(0x7FFF))), whole(16))
                is_nan = builder.fcmp_unordered("uno", value, value)
                rounded = builder.select(is_nan, whole(0x7FC0), rounded)
                kept = builder.trunc(rounded, ir.VectorType(_SHORT_INTEGERS, lanes))
                store(builder, builder.add(out, word(2 * lanes * index)), kept, 2)
            return context.get_dummy_value()

        return types.void(types.intp, types.intp, types.float32, types.float32, kind), generate

    return row


_WIDTH = find_target().width
_row = gated_row(find_target())


@njit
def begin_gating(frame: Any, shared: Any, index: int) -> int:
    """Reads operand `index`: nothing, of a plain product, or `gating_numbers`, of one whose halves are multiplied; the
    rooms are then in the second result. Returns for how many workers there is room."""
    if size_of(frame, index, 0) == 0:
        return MAX_WORKERS
    shared[_FACTORS] = operand(frame, index)
    given = integers(shared[_FACTORS], 5)
    rows = size_of(frame, 0, 0)
    shared[_ROWS], shared[_ROOM_BYTES], shared[_SHORT] = rows, max(rows, 2) * _WIDTH * 4, given[2]
    shared[_ROOMS], shared[_OUT] = result(frame, 1) + given[3], result(frame, 0)
    shared[_COLUMNS] = size_of(frame, 1, 0) * _WIDTH // 2
    return np.int64(given[4])


@njit
def room_of(shared: Any, worker: int) -> int:
    """The address of a worker's room, of a panel's products [rows, W], or of two panels of a single row; 0 in a plain
    product."""
    return shared[_ROOMS] + worker * shared[_ROOM_BYTES] if shared[_FACTORS] != 0 else 0


@njit
def gate_panel(shared: Any, room: int, panel: int) -> None:
    """The products in a room to their part of the result."""
    factors, columns = floats(shared[_FACTORS], 2), shared[_COLUMNS]
    for row in range(shared[_ROWS]):
        both, column = room + row * _WIDTH * 4, row * columns + panel * (_WIDTH // 2)
        if shared[_SHORT] != 0:
            kind = np.uint16(0)
            _row(both, shared[_OUT] + column * bytes_of(kind), factors[0], factors[1], kind)
        else:
            _row(both, shared[_OUT] + column * 4, factors[0], factors[1], np.float32(0))
