"""Products of small blocks of matrices, held in vector registers: the inside of every kernel here.

Instructions that Numba cannot express are written as LLVM here: vectors, fused multiply-adds, atomic counters,
addresses. Loops over matrices are in the kernels, in Python.

Numba's own vectorising is not enough: a compiler keeps sums in memory between two steps of a loop; with all of them in
registers the same product is twice as fast and reaches what the processor can do (109 GFLOP/s a core).
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.ir as ir
from llvmlite.binding import llvm_version_info
from numba import njit
from numba.core import cgutils, types
from numba.extending import intrinsic as _intrinsic

from jaxserve.kernels.cpu.emit import (
    BFLOAT,
    FLOAT,
    LANE,
    LINE,
    WORD,
    declare,
    element,
    everywhere,
    load,
    load_floats,
    prefetch,
    size_of_kind,
    store,
    word,
)
from jaxserve.kernels.cpu.target import Target

_NEAR = 1024  # bytes between what is read and what is fetched, where reading is all there is to wait for
_BFLOAT_OPERANDS = 16  # version of LLVM since which its dot instruction takes vectors of bfloat16

intrinsic: Any = _intrinsic  # its own types describe its arguments, not its result


def block_product(
    rows: int, vectors: int, lanes: int, *, fetches: bool = False, dot_bfloat16: bool = False, gathers: bool = False
) -> Callable[..., Any]:
    """A function for Numba: c[rows, W] = a[rows, depth] b[depth, W], or += where `add`; W is vectors * lanes.

        product(a, a_stride, b, b_stride, depth, c, c_stride, order, add, ahead, ahead_step, kind)

    Matrices are addresses with strides between rows in elements. They hold float32, and `b` what the type of `kind`
    says: float32, or uint16 for bfloat16. `depth` is at least 1. Each number of c is one chain of fused multiply-adds
    over the depth: its bits depend on nothing else. Where `kind` is uint32, an element of both matrices is a pair
    of bfloat16 numbers, of which the chain takes the second first, as x86's instruction does (`dot_bfloat16`). With
    `fetches`, each step asks for the lines of the cache at `ahead`, as many as a row of `b` has, and the next step
    for those `ahead_step` bytes further. With `gathers`, `order` is the address of int32 [rows]: which rows of a and of
    c these are; without, it means nothing.
    """
    vector = ir.VectorType(FLOAT, lanes)

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
        order: Any,
        add: Any,
        ahead: Any,
        ahead_step: Any,
        kind: Any,
    ):
        del context, a, a_stride, b, b_stride, depth, c, c_stride, order, add, ahead, ahead_step
        signature = types.void(*[types.intp] * 8, types.boolean, types.intp, types.intp, kind)
        pairs = kind == types.uint32
        size = size_of_kind(kind)

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del signature
            a, a_stride, b, b_stride, depth, c, c_stride, order, add, ahead, ahead_step, _ = args
            fma = declare(builder, f"llvm.fma.v{lanes}f32", vector, [vector] * 3)
            numbers: list[Any] = [word(row) for row in range(rows)]
            if gathers:
                given = [load(builder, builder.add(order, word(4 * row)), LANE) for row in range(rows)]
                numbers = [builder.sext(number, WORD) for number in given]
            a_rows = [element(builder, a, builder.mul(number, a_stride), 4) for number in numbers]
            c_rows = [element(builder, c, builder.mul(number, c_stride), 4) for number in numbers]
            places = [element(builder, start, word(column * lanes), 4) for start in c_rows for column in range(vectors)]

            before = builder.block
            loop, after = builder.append_basic_block("depth"), builder.append_basic_block("sums")
            builder.branch(loop)
            builder.position_at_end(loop)
            step = builder.phi(WORD)
            sums = [builder.phi(vector) for _ in places]
            step.add_incoming(word(0), before)
            for held in sums:
                held.add_incoming(ir.Constant(vector, None), before)
            line = element(builder, b, builder.mul(step, b_stride), size)
            held_in = ir.VectorType(LANE, lanes) if pairs else vector
            columns = [
                load_floats(builder, element(builder, line, word(column * lanes), size), held_in, kind)
                for column in range(vectors)
            ]
            add_products = _make_pair_dot(builder, vector, columns, dot_bfloat16) if pairs else None
            scalars = [load(builder, element(builder, start, step, 4), held_in.element) for start in a_rows]
            new: list[Any] = []
            for row, scalar in enumerate(scalars):
                number, own = everywhere(builder, scalar, held_in), sums[row * vectors : (row + 1) * vectors]
                if add_products is not None:
                    new += add_products(own, number)
                else:
                    new += [builder.call(fma, [number, *pair]) for pair in zip(columns, own, strict=True)]
            further = builder.add(ahead, builder.mul(step, ahead_step))
            for begin in range(0, vectors * lanes * size if fetches else 0, LINE):
                prefetch(builder, builder.add(further, word(begin)))
            following = builder.add(step, word(1))
            step.add_incoming(following, builder.block)
            for held, value in zip(sums, new, strict=True):
                held.add_incoming(value, builder.block)
            builder.cbranch(builder.icmp_signed("<", following, depth), loop, after)

            builder.position_at_end(after)
            with builder.if_else(add) as (adding, setting):
                with adding:
                    for place, value in zip(places, new, strict=True):
                        store(builder, place, builder.fadd(load(builder, place, vector), value))
                with setting:
                    for place, value in zip(places, new, strict=True):
                        store(builder, place, value)
            return context.get_dummy_value()

        return signature, generate

    return product


def _make_pair_dot(
    builder: ir.IRBuilder, vector: ir.VectorType, columns: list[Any], dot_bfloat16: bool
) -> Callable[[list[Any], Any], list[Any]]:
    """What adds to sums of each vector of pairs of bfloat16 numbers their products with one pair in all lanes."""
    lanes = vector.count
    if dot_bfloat16:
        kind = ir.VectorType(BFLOAT, 2 * lanes) if llvm_version_info[0] >= _BFLOAT_OPERANDS else columns[0].type
        name = f"llvm.x86.avx512bf16.dpbf16ps.{32 * lanes}"
        instruction = declare(builder, name, vector, [vector, kind, kind])
        operands = [builder.bitcast(column, kind) for column in columns]

        def add_dots(sums: list[Any], pair: Any) -> list[Any]:
            pair = builder.bitcast(pair, kind)
            return [builder.call(instruction, [sum_, pair, own]) for sum_, own in zip(sums, operands, strict=True)]

        return add_dots
    fma = declare(builder, f"llvm.fma.v{lanes}f32", vector, [vector] * 3)
    upper, half = (ir.Constant(columns[0].type, [value] * lanes) for value in (-(2**16), 16))

    def widen(pair: Any) -> list[Any]:
        """The second and the first number: a bfloat16 is the upper half of a float32."""
        return [builder.bitcast(bits, vector) for bits in (builder.and_(pair, upper), builder.shl(pair, half))]

    wide = [widen(column) for column in columns]

    def add_widened(sums: list[Any], pair: Any) -> list[Any]:
        numbers, new = widen(pair), []
        for sum_, column in zip(sums, wide, strict=True):
            for number, own in zip(numbers, column, strict=True):
                sum_ = builder.call(fma, [number, own, sum_])
            new.append(sum_)
        return new

    return add_widened


def rows_product(row_steps: Sequence[int], vectors: int, lanes: int) -> Callable[..., Any]:
    """A function for Numba: `block_product` for any number of rows, in blocks of `row_steps`, largest first, last 1.

    product(a, a_stride, b, b_stride, depth, c, c_stride, rows, add, kind)
    """
    in_blocks = _product_in_blocks(row_steps, vectors, lanes, fetches=False)

    @njit
    def product(
        a: int, a_stride: int, b: int, b_stride: int, depth: int, c: int, c_stride: int, rows: int, add: bool, kind: Any
    ) -> None:
        in_blocks(a, a_stride, b, b_stride, depth, c, c_stride, 0, rows, add, 0, 0, kind)

    return product


def panel_product(target: Target) -> Callable[..., Any]:
    """A function for Numba: c[rows, W] = a[rows, depth] times a panel [depth, W], which lies in one piece.

    Both are float32, or pairs of bfloat16 numbers (`kind` is uint32).

    product(a, a_stride, panel, depth, c, c_stride, rows, kind)

    The next panel is expected behind this one. Many rows compute longer than the memory takes, and each block fetches
    its share of the next panel meanwhile: without, the first block would wait for the memory, and the memory for the
    other blocks. A few rows only read, in one block, which reads the panel once. The processor's own prefetcher then
    keeps more lines on their way than instructions can, which must only help it from one page to the next: asking for a
    whole panel at once cost a quarter of the speed.
    """
    row_steps = sorted({*target.row_steps, 3}, reverse=True)  # half of the largest block and less are all there
    in_blocks = _product_in_blocks(
        row_steps, target.vectors, target.lanes, fetches=True, dot_bfloat16=target.dot_bfloat16
    )
    width, size = target.width, row_steps[0]

    @njit
    def product(a: int, a_stride: int, panel: int, depth: int, c: int, c_stride: int, rows: int, kind: Any) -> None:
        line = width * bytes_of(kind)
        share, ahead = line // max((rows + size - 1) // size, 1), panel + depth * line
        if 2 * rows <= size:
            ahead = panel + _NEAR
        in_blocks(a, a_stride, panel, width, depth, c, c_stride, 0, rows, False, ahead, share, kind)

    return product


def gathered_product(target: Target, vectors: int) -> Callable[..., Any]:
    """A function for Numba: `block_product` that gathers and fetches, of `vectors`, for any number of rows.

    product(a, a_stride, b, b_stride, depth, c, c_stride, order, rows, add, ahead, ahead_step, kind)
    """
    return _product_in_blocks(
        target.row_steps, vectors, target.lanes, fetches=True, gathers=True, dot_bfloat16=target.dot_bfloat16
    )


def _product_in_blocks(row_steps: Sequence[int], vectors: int, lanes: int, **options: bool) -> Callable[..., Any]:
    """Of `rows_product`, with the arguments and options of `block_product` for what is fetched."""
    if not row_steps:

        @njit
        def no_rows(*arguments: Any) -> None:
            pass

        return no_rows
    size, block = row_steps[0], block_product(row_steps[0], vectors, lanes, **options)
    gathers = options.get("gathers", False)
    smaller = _product_in_blocks(row_steps[1:], vectors, lanes, **options)

    @njit
    def product(
        a: int,
        a_stride: int,
        b: int,
        b_stride: int,
        depth: int,
        c: int,
        c_stride: int,
        order: int,
        rows: int,
        add: bool,
        ahead: int,
        ahead_step: int,
        kind: Any,
    ) -> None:
        left = rows
        while left >= size:
            block(a, a_stride, b, b_stride, depth, c, c_stride, order, add, ahead, ahead_step, kind)
            left -= size
            ahead += depth * ahead_step
            if gathers:
                order += 4 * size
            else:
                a += size * a_stride * 4
                c += size * c_stride * 4
        if left > 0:
            smaller(a, a_stride, b, b_stride, depth, c, c_stride, order, left, add, ahead, ahead_step, kind)

    return product


def largest(lanes: int) -> Callable[..., Any]:
    """A function for Numba: the largest of `count` float32 numbers at an address; `count` is a multiple of `lanes`.
    NaN counts as the least."""
    vector = ir.VectorType(FLOAT, lanes)

    @intrinsic
    def maximum(context: Any, address: Any, count: Any):
        del context, address, count

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del context, signature
            start, count = args
            larger = declare(builder, f"llvm.maxnum.v{lanes}f32", vector, [vector] * 2)
            across = declare(builder, f"llvm.vector.reduce.fmax.v{lanes}f32", FLOAT, [vector])
            first = load(builder, start, vector)
            before = builder.block
            loop, after = builder.append_basic_block("numbers"), builder.append_basic_block("largest")
            builder.branch(loop)
            builder.position_at_end(loop)
            index, held = builder.phi(WORD), builder.phi(vector)
            index.add_incoming(word(0), before)
            held.add_incoming(first, before)
            new = builder.call(larger, [held, load(builder, element(builder, start, index, 4), vector)])
            following = builder.add(index, word(lanes))
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
        return word(size_of_kind(signature.args[0]))

    return types.intp(kind), generate


@intrinsic
def fetch_add(context: Any, address: Any, amount: Any):
    """Adds to the 64-bit integer at an address, atomically. Returns the old value."""
    del context, address, amount

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, signature
        return builder.atomic_rmw("add", builder.inttoptr(args[0], WORD.as_pointer()), args[1], "acq_rel")

    return types.intp(types.intp, types.intp), generate


@intrinsic
def allocate(context: Any, size: Any):
    """The address of `size` bytes of zeros, from the C library."""
    del context, size

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, signature
        calloc = declare(builder, "calloc", cgutils.voidptr_t, [WORD, WORD])
        return builder.ptrtoint(builder.call(calloc, [word(1), args[0]]), WORD)

    return types.intp(types.intp), generate


@intrinsic
def release(context: Any, address: Any):
    """Gives back what `allocate` gave."""
    del context, address

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del signature
        free = declare(builder, "free", ir.VoidType(), [cgutils.voidptr_t])
        builder.call(free, [builder.inttoptr(args[0], cgutils.voidptr_t)])
        return context.get_dummy_value()

    return types.void(types.intp), generate


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
        return builder.ptrtoint(args[0], WORD)

    return types.intp(types.voidptr), generate


@intrinsic
def call_function(context: Any, function: Any, argument: Any):
    """Calls the C function `void *function(void *argument)` at an address. Returns its result, as an address."""
    del context, function, argument

    def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
        del context, signature
        kind = ir.FunctionType(WORD, [WORD])
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
            kind = ir.FunctionType(ir.VoidType(), [WORD])
            function = ir.Function(builder.module, kind, builder.module.get_unique_name("work"))
            function.linkage = "internal"
            inside = ir.IRBuilder(function.append_basic_block())
            called = types.void(types.intp)
            compiled = context.compile_subroutine(inside, work.py_func, called)
            context.call_internal_no_propagate(inside, compiled.fndesc, called, function.args)
            inside.ret_void()
            return builder.ptrtoint(function, WORD)

        return types.intp(), generate

    return address
