"""Products of small blocks of matrices, held in vector registers: the inside of every kernel here.

Instructions that Numba cannot express are written as LLVM here: vectors, fused multiply-adds, atomic counters,
addresses. Loops over matrices are in the kernels, in Python.

Numba's own vectorising is not enough: a compiler keeps sums in memory between two steps of a loop; with all of them in
registers the same product is twice as fast and reaches what the processor can do (109 GFLOP/s a core).
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic as _intrinsic

intrinsic: Any = _intrinsic  # its own types describe its arguments, not its result

_WORD, _HALF, _BYTE, _FLOAT = ir.IntType(64), ir.IntType(16), ir.IntType(8), ir.FloatType()
_LANE = ir.IntType(32)

# Bytes of a number by the type of `kind`. Numba knows no short floats, so other types stand for them: uint16 for
# bfloat16, uint8 for float8_e4m3fn, int16 for float8_e5m2.
_BYTES = {types.float32: 4, types.uint16: 2, types.int8: 1, types.uint8: 1, types.int16: 1}
# Of these float8: bits of the mantissa, bias of the exponent, and the first magnitude that is no finite number.
_FLOAT8 = {types.uint8: (3, 7, 0x7F), types.int16: (2, 15, 0x7C)}


def block_product(rows: int, vectors: int, lanes: int) -> Callable[..., Any]:
    """A function for Numba: c[rows, W] = a[rows, depth] b[depth, W], or += where `add`; W is vectors * lanes.

        product(a, a_stride, b, b_stride, depth, c, c_stride, add, kind)

    Matrices are addresses with strides between rows in elements. They hold float32, and `b` what the type of `kind`
    stands for (`_BYTES`), widened to float32 in registers, which is exact. `depth` is at least 1. Each number of c is
    one chain of fused multiply-adds over the depth: its bits depend on nothing else.
    """
    vector = ir.VectorType(_FLOAT, lanes)

    @intrinsic
    def product(
        context: Any,
        a: Any,
        a_stride: Any,
        b: Any,
        b_stride: Any,
        depth: Any,
        c: Any,
        c_stride: Any,
        add: Any,
        kind: Any,
    ):
        del context, a, a_stride, b, b_stride, depth, c, c_stride, add
        signature = types.void(*[types.intp] * 7, types.boolean, kind)
        size = _bytes_of(kind)

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del signature
            a, a_stride, b, b_stride, depth, c, c_stride, add, _ = args
            fma = _function(builder, f"llvm.fma.v{lanes}f32", vector, [vector] * 3)
            a_rows = [_element(builder, a, builder.mul(_word(row), a_stride), 4) for row in range(rows)]
            c_rows = [_element(builder, c, builder.mul(_word(row), c_stride), 4) for row in range(rows)]
            places = [
                _element(builder, start, _word(column * lanes), 4) for start in c_rows for column in range(vectors)
            ]

            before = builder.block
            loop, after = builder.append_basic_block("depth"), builder.append_basic_block("sums")
            builder.branch(loop)
            builder.position_at_end(loop)
            step = builder.phi(_WORD)
            sums = [builder.phi(vector) for _ in places]
            step.add_incoming(_word(0), before)
            for held in sums:
                held.add_incoming(ir.Constant(vector, None), before)
            line = _element(builder, b, builder.mul(step, b_stride), size)
            columns = [
                _load_floats(builder, _element(builder, line, _word(column * lanes), size), vector, kind)
                for column in range(vectors)
            ]
            scalars = [_load(builder, _element(builder, start, step, 4), _FLOAT) for start in a_rows]
            new = [
                builder.call(
                    fma, [_everywhere(builder, scalars[row], vector), columns[column], sums[row * vectors + column]]
                )
                for row in range(rows)
                for column in range(vectors)
            ]
            following = builder.add(step, _word(1))
            step.add_incoming(following, builder.block)
            for held, value in zip(sums, new, strict=True):
                held.add_incoming(value, builder.block)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)

            builder.position_at_end(after)
            with builder.if_else(add) as (adding, setting):
                with adding:
                    for place, value in zip(places, new, strict=True):
                        _store(builder, place, builder.fadd(_load(builder, place, vector), value))
                with setting:
                    for place, value in zip(places, new, strict=True):
                        _store(builder, place, value)
            return context.get_dummy_value()

        return signature, generate

    return product


def rows_product(row_steps: Sequence[int], vectors: int, lanes: int) -> Callable[..., Any]:
    """A function for Numba: `block_product` for any number of rows, in blocks of `row_steps`, largest first, last 1.

    product(a, a_stride, b, b_stride, depth, c, c_stride, rows, add, kind)
    """
    size, block = row_steps[0], block_product(row_steps[0], vectors, lanes)
    if size == 1:

        @njit
        def product(
            a: int,
            a_stride: int,
            b: int,
            b_stride: int,
            depth: int,
            c: int,
            c_stride: int,
            rows: int,
            add: bool,
            kind: Any,
        ) -> None:
            for row in range(rows):
                block(a + row * a_stride * 4, a_stride, b, b_stride, depth, c + row * c_stride * 4, c_stride, add, kind)

        return product
    smaller = rows_product(row_steps[1:], vectors, lanes)

    @njit
    def product_in_blocks(
        a: int, a_stride: int, b: int, b_stride: int, depth: int, c: int, c_stride: int, rows: int, add: bool, kind: Any
    ) -> None:
        row = 0
        while row + size <= rows:
            block(a + row * a_stride * 4, a_stride, b, b_stride, depth, c + row * c_stride * 4, c_stride, add, kind)
            row += size
        if row < rows:
            left_a, left_c = a + row * a_stride * 4, c + row * c_stride * 4
            smaller(left_a, a_stride, b, b_stride, depth, left_c, c_stride, rows - row, add, kind)

    return product_in_blocks


def largest(lanes: int) -> Callable[..., Any]:
    """A function for Numba: the largest of `count` float32 numbers at an address; `count` is a multiple of `lanes`.
    NaN counts as the least."""
    vector = ir.VectorType(_FLOAT, lanes)

    @intrinsic
    def maximum(context: Any, address: Any, count: Any):
        del context, address, count

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del context, signature
            start, count = args
            larger = _function(builder, f"llvm.maxnum.v{lanes}f32", vector, [vector] * 2)
            across = _function(builder, f"llvm.vector.reduce.fmax.v{lanes}f32", _FLOAT, [vector])
            first = _load(builder, start, vector)
            before = builder.block
            loop, after = builder.append_basic_block("numbers"), builder.append_basic_block("largest")
            builder.branch(loop)
            builder.position_at_end(loop)
            index, held = builder.phi(_WORD), builder.phi(vector)
            index.add_incoming(_word(0), before)
            held.add_incoming(first, before)
            new = builder.call(larger, [held, _load(builder, _element(builder, start, index, 4), vector)])
            following = builder.add(index, _word(lanes))
            index.add_incoming(following, builder.block)
            held.add_incoming(new, builder.block)
            builder.cbranch(builder.icmp_signed("<", following, count), loop, after)
            builder.position_at_end(after)
            return builder.call(across, [new])

        return types.float32(types.intp, types.intp), generate

    return maximum


@intrinsic
def bytes_of(context: Any, kind: Any):
    """Bytes of one number of the type of `kind`, as `block_product` reads them."""
    del context

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, builder, args
        return _word(_bytes_of(signature.args[0]))

    return types.intp(kind), generate


@intrinsic
def fetch_add(context: Any, address: Any, amount: Any):
    """Adds to the 64-bit integer at an address, atomically. Returns the old value."""
    del context, address, amount

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, signature
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "acq_rel")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def pointer(context: Any, address: Any):
    """An address as the pointer that `numba.carray` takes."""
    del context, address

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, signature
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.intp), generate


@intrinsic
def address_of(context: Any, place: Any):
    """The address that a C pointer holds."""
    del context, place

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, signature
        return builder.ptrtoint(args[0], _WORD)

    return types.intp(types.voidptr), generate


@intrinsic
def call_function(context: Any, function: Any, argument: Any):
    """Calls the C function `void *function(void *argument)` at an address. Returns its result, as an address."""
    del context, function, argument

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, signature
        kind = ir.FunctionType(_WORD, [_WORD])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return types.intp(types.intp, types.intp), generate


def c_function(work: Any) -> Callable[[], int]:
    """A function for Numba that gives the address of `void work(void *)`, compiled into the same machine code.

    `work` is a function of one address, decorated with `njit`, that raises nothing.
    """

    @intrinsic
    def address(context: Any):
        del context

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del signature, args
            kind = ir.FunctionType(ir.VoidType(), [_WORD])
            function = ir.Function(builder.module, kind, builder.module.get_unique_name("work"))
            function.linkage = "internal"
            inside = ir.IRBuilder(function.append_basic_block())
            called = types.void(types.intp)
            compiled = context.compile_subroutine(inside, work.py_func, called)
            context.call_internal_no_propagate(inside, compiled.fndesc, called, function.args)
            inside.ret_void()
            return builder.ptrtoint(function, _WORD)

        return types.intp(), generate

    return address


def _bytes_of(kind: Any) -> int:
    return _BYTES[kind]


def _word(value: int) -> ir.Constant:
    return ir.Constant(_WORD, value)


def _function(builder: ir.IRBuilder, name: str, returned: Any, arguments: list[Any]) -> Any:
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(returned, arguments), name)


def _element(builder: ir.IRBuilder, start: Any, index: Any, size: int) -> Any:
    return builder.add(start, builder.mul(index, _word(size)))


def _load(builder: ir.IRBuilder, address: Any, kind: Any) -> Any:
    value: Any = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = 4  # of elements: rows may begin anywhere
    return value


def _store(builder: ir.IRBuilder, address: Any, value: Any) -> None:
    stored: Any = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    stored.align = 4


def _load_floats(builder: ir.IRBuilder, address: Any, vector: ir.VectorType, kind: Any) -> Any:
    """Numbers of `kind` at an address as a vector of float32."""
    if kind == types.float32:
        return _load(builder, address, vector)
    wide = ir.VectorType(_LANE, vector.count)
    narrow = ir.VectorType(_HALF if _BYTES[kind] == 2 else _BYTE, vector.count)
    codes: Any = builder.load(builder.inttoptr(address, narrow.as_pointer()))
    codes.align = _BYTES[kind]
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


def _everywhere(builder: ir.IRBuilder, scalar: Any, vector: ir.VectorType) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_LANE, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(_LANE, vector.count), None))
