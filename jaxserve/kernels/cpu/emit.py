"""Words that the kernels' LLVM is made of: addresses, loads and stores of vectors, one number in all lanes.

Addresses are 64-bit integers. What `simd` and `code_runs` write with these words becomes part of a Numba function.
"""

from typing import Any

import llvmlite.ir as ir
from numba.core import cgutils

WORD, FLOAT, BYTE, LANE = ir.IntType(64), ir.FloatType(), ir.IntType(8), ir.IntType(32)
_HALF = ir.IntType(16)


class _BFloat(ir.Type):
    """LLVM's type of bfloat16 numbers, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()
LINE = 64  # bytes that a cache brings at once


def size_of_kind(kind: Any) -> int:
    """Bytes of one number of a Numba type."""
    return kind.bitwidth // 8


def word(value: int) -> ir.Constant:
    """A 64-bit integer."""
    return ir.Constant(WORD, value)


def declare(builder: ir.IRBuilder, name: str, returned: Any, arguments: list[Any]) -> Any:
    """A function that exists elsewhere: one of LLVM's own, or of the C library."""
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(returned, arguments), name)


def element(builder: ir.IRBuilder, start: Any, index: Any, size: int) -> Any:
    """The address of an element of `size` bytes."""
    return builder.add(start, builder.mul(index, word(size)))


def load(builder: ir.IRBuilder, address: Any, kind: Any, align: int = 4) -> Any:
    """What lies at an address, which is a multiple of `align` bytes alone: rows may begin anywhere."""
    value: Any = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store(builder: ir.IRBuilder, address: Any, value: Any, align: int = 4) -> None:
    """Writes a value to an address, which is a multiple of `align` bytes."""
    stored: Any = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    stored.align = align


def load_floats(builder: ir.IRBuilder, address: Any, vector: ir.VectorType, bfloat16: bool) -> Any:
    """A vector of float32 numbers, widened where memory holds bfloat16."""
    if not bfloat16:
        return load(builder, address, vector)
    halves = load(builder, address, ir.VectorType(_HALF, vector.count), 2)
    wide = ir.VectorType(LANE, vector.count)  # a bfloat16 is the upper half of a float32
    return builder.bitcast(builder.shl(builder.zext(halves, wide), ir.Constant(wide, [16] * vector.count)), vector)


def everywhere(builder: ir.IRBuilder, scalar: Any, vector: ir.VectorType) -> Any:
    """A vector whose lanes are all one number."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(LANE, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(LANE, vector.count), None))


def prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Asks for the line of the cache at an address, which may lie anywhere, for the second level."""
    pointer = BYTE.as_pointer()
    fetch = declare(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, LANE, LANE, LANE])
    read, second_level, data = (ir.Constant(LANE, value) for value in (0, 2, 1))
    builder.call(fetch, [builder.inttoptr(address, pointer), read, second_level, data])
