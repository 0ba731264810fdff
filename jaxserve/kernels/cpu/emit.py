"""Words that the kernels' LLVM is made of: addresses, loads and stores of vectors, one number in all lanes.

Addresses are 64-bit integers. What `simd` and `code_runs` write with these words becomes part of a Numba function.
"""

from typing import Any

import llvmlite.ir as ir
from numba.core import cgutils, types

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

# Bytes of a number by the type that stands for it. Numba knows no short floats: uint16 is bfloat16, uint32 a pair of
# such, uint8 float8_e4m3fn, and int16 float8_e5m2.
_BYTES = {types.float32: 4, types.uint32: 4, types.uint16: 2, types.int8: 1, types.uint8: 1, types.int16: 1}
# Of these float8: bits of the mantissa, bias of the exponent, and the first magnitude that is no finite number.
_FLOAT8 = {types.uint8: (3, 7, 0x7F), types.int16: (2, 15, 0x7C)}


def size_of_kind(kind: Any) -> int:
    """Bytes of one number of the type that a Numba type stands for."""
    return _BYTES[kind]


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


def load_floats(builder: ir.IRBuilder, address: Any, vector: ir.VectorType, kind: Any) -> Any:
    """Numbers of the type that `kind` stands for as a vector of float32, which is exact; pairs as they are."""
    if kind in (types.float32, types.uint32):
        return load(builder, address, vector)
    wide = ir.VectorType(LANE, vector.count)
    size = size_of_kind(kind)
    codes = load(builder, address, ir.VectorType(_HALF if size == 2 else BYTE, vector.count), size)
    if kind == types.int8:
        return builder.sitofp(codes, vector)
    bits = builder.zext(codes, wide)
    if kind == types.uint16:  # a bfloat16 is the upper half of a float32
        return builder.bitcast(builder.shl(bits, _splat(wide, 16)), vector)
    return _float8_to_float32(builder, bits, vector, *_FLOAT8[kind])


def _float8_to_float32(
    builder: ir.IRBuilder, bits: Any, vector: ir.VectorType, mantissa: int, bias: int, special: int
) -> Any:
    """Codes in the low bytes of int32 lanes as their values: NaN and infinity too, and numbers below the smallest
    normal one, which no float32 arithmetic here ever sees as such: threads of XLA take those for 0."""
    wide = bits.type

    def constant(value: int) -> ir.Constant:
        return _splat(wide, value)

    magnitude = builder.and_(bits, constant(0x7F))
    fraction = builder.shl(magnitude, constant(23 - mantissa))
    normal = builder.add(fraction, constant((127 - bias) << 23))
    # With one more in the exponent a code of exponent 0 is the smallest normal number and its own value beside it.
    lifted = builder.bitcast(builder.add(fraction, constant((128 - bias) << 23)), vector)
    small = builder.bitcast(builder.fsub(lifted, _splat(vector, 2.0 ** (1 - bias))), wide)
    is_small = builder.icmp_unsigned("<", magnitude, constant(1 << mantissa))
    is_special = builder.icmp_unsigned(">=", magnitude, constant(special))
    finite = builder.select(is_small, small, normal)
    value = builder.select(is_special, builder.or_(fraction, constant(0x7F800000)), finite)
    sign = builder.shl(builder.and_(bits, constant(0x80)), constant(24))
    return builder.bitcast(builder.or_(value, sign), vector)


def _splat(vector: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(vector, [value] * vector.count)


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
