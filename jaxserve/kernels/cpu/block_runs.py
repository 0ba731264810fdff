"""Products of rows with a panel of codes in blocks, held in vector registers: the inside of `matmul_blocks`.

Rows are rounded to eight bits in blocks of 32 inputs. A vector has four codes of each output, as in `code_runs`; codes
of fewer bits become such vectors in two to four instructions, which all rows of a call share.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import llvmlite.ir as ir
from numba.core import types

from jaxserve.kernels.block_codes import SPAN, STEPS, BlockCode
from jaxserve.kernels.cpu.code_runs import make_dot
from jaxserve.kernels.cpu.emit import BYTE, FLOAT, LANE, LINE, WORD, declare, everywhere, load, prefetch, store, word
from jaxserve.kernels.cpu.simd import intrinsic
from jaxserve.kernels.cpu.target import Target

_BLOCK_ROWS = 16  # rows of a call that fetch, together, as many lines as a panel has


def panel_product(row_steps: tuple[int, ...], panels: int, code: BlockCode, target: Target) -> Callable[..., Any]:
    """A function for Numba: c[rows, panels * W] = x [rows, spans * 32] times panels of `code`.

        product(x, scales, starts, sums, x_stride, stream, stream_stride, spans, c, c_stride, ahead, rows)

    All are addresses but spans and rows, and strides are bytes. x are int8 codes; of each row `scales` has float32
    [spans], `starts` int32 [spans * 32 / group], the sum of a group's codes times -zero, and `sums`, of codes with
    minima, float32 [spans], the sum of a span's codes times its scale. Rows of all four are `x_stride` apart, panels
    of codes `stream_stride`. Rows go in blocks of `row_steps`, largest first, last 1.

    An output is one chain over the groups, in order, from 0, of float32 fused multiply-adds:
    c = fma(sum of u * x - zero * sum of x, scale * x_scale, c), and then c = fma(sum of a span, -minimum, c).
    The lines of the cache at `ahead` are fetched meanwhile, those that a block of one row reads, or as many as
    `_BLOCK_ROWS` rows fetch together.
    """

    @intrinsic
    def product(
        context: Any,
        x: Any,
        scales: Any,
        starts: Any,
        sums: Any,
        x_stride: Any,
        stream: Any,
        stream_stride: Any,
        spans: Any,
        c: Any,
        c_stride: Any,
        ahead: Any,
        rows: Any,
    ):
        del context, x, scales, starts, sums, x_stride, stream, stream_stride, spans, c, c_stride, ahead, rows

        def generate(context: Any, builder: ir.IRBuilder, signature: Any, args: list[Any]) -> Any:
            del signature
            x, scales, starts, sums, x_stride, stream, stream_stride, spans, c, c_stride, ahead, rows = args
            given = _Given(stream=stream, stream_stride=stream_stride, spans=spans, x_stride=x_stride)
            first: Any = word(0)
            for size in row_steps:
                before = builder.block
                test, body, after = (builder.append_basic_block(f"{name} {size}") for name in ("test", "rows", "after"))
                builder.branch(test)
                builder.position_at_end(test)
                row = builder.phi(WORD)
                row.add_incoming(first, before)
                following = builder.add(row, word(size))
                builder.cbranch(builder.icmp_signed("<=", following, rows), body, after)
                builder.position_at_end(body)
                at = builder.mul(row, x_stride)
                share = builder.sdiv(builder.mul(row, stream_stride), word(_BLOCK_ROWS))
                outs = _block(
                    builder,
                    given,
                    [builder.add(start, at) for start in (x, scales, starts, sums)],
                    builder.add(ahead, share),
                    (size, panels),
                    code,
                    target,
                )
                for number, out in enumerate(outs):
                    own, column = divmod(number, panels * target.vectors)
                    start = builder.add(c, builder.mul(builder.add(row, word(own)), c_stride))
                    store(builder, builder.add(start, word(4 * target.lanes * column)), out)
                row.add_incoming(following, builder.block)
                builder.branch(test)
                builder.position_at_end(after)
                first = row
            return context.get_dummy_value()

        return types.void(*[types.intp] * 12), generate

    return product


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Given:
    """Arguments of `panel_product` that all of its blocks have."""

    stream: Any
    stream_stride: Any
    spans: Any
    x_stride: Any


def _block(
    builder: ir.IRBuilder,
    given: _Given,
    x: list[Any],
    ahead: Any,
    sizes: tuple[int, int],
    code: BlockCode,
    target: Target,
) -> list[Any]:
    """The products of some rows with some panels (`sizes`), as vectors [rows * panels * vectors]. `x`: of the first
    row, the addresses of its codes, scales, starts and sums."""
    rows, panels = sizes
    lanes, width = target.lanes, target.width
    floats, integers = ir.VectorType(FLOAT, lanes), ir.VectorType(LANE, lanes)
    columns = [(panel, vector) for panel in range(panels) for vector in range(target.vectors)]
    span_bytes, groups, spans_of_block = code.span_bytes * width, SPAN // code.group, code.inputs // SPAN
    lines = -(-span_bytes // LINE)
    if rows > 1:
        lines = min(lines, max(1, lines * rows // _BLOCK_ROWS))
    fma = declare(builder, f"llvm.fma.v{lanes}f32", floats, [floats] * 3)

    def rows_from(start: Any, index: Any, size: int) -> list[Any]:
        """The address of number `index` of each row."""
        begin = builder.add(start, builder.mul(index, word(size)))
        return [builder.add(begin, builder.mul(word(row), given.x_stride)) for row in range(rows)]

    before = builder.block
    loop, after = builder.append_basic_block("span"), builder.append_basic_block("sums")
    builder.branch(loop)
    builder.position_at_end(loop)
    span = builder.phi(WORD)
    held = [builder.phi(floats) for _ in range(rows * len(columns))]
    span.add_incoming(word(0), before)
    for value in held:
        value.add_incoming(ir.Constant(floats, None), before)
    block = builder.udiv(span, word(spans_of_block))
    block_at = builder.add(given.stream, builder.mul(block, word(code.block_bytes * width)))
    inside = builder.sub(span, builder.mul(block, word(spans_of_block)))
    at = builder.add(block_at, builder.add(word(code.header * width), builder.mul(inside, word(span_bytes))))
    places = [builder.mul(word(panel), given.stream_stride) for panel in range(panels)]
    headers = [_Vectors(builder, builder.add(block_at, place), target) for place in places]
    bodies = [_Vectors(builder, builder.add(at, place), target) for place in places]
    inputs, begins = rows_from(x[0], span, SPAN), rows_from(x[2], span, 4 * groups)
    row_scales = [everywhere(builder, load(builder, place, FLOAT), floats) for place in rows_from(x[1], span, 4)]
    codes = [_codes_of(bodies[panel], code, vector) for panel, vector in columns]
    outs: list[Any] = list(held)
    for group in range(groups):
        totals: list[Any] = []
        for begin in begins:
            start = everywhere(builder, load(builder, builder.add(begin, word(4 * group)), LANE), integers)
            totals += [start] * len(columns)
        for step in range(group * STEPS // groups, (group + 1) * STEPS // groups):
            dot = make_dot(builder, target, [found(step) for found in codes], bits=code.bits)
            for row, place in enumerate(inputs):
                four = load(builder, builder.add(place, word(4 * step)), LANE, 1)
                own = slice(row * len(columns), (row + 1) * len(columns))
                totals[own] = dot(totals[own], four)
        scales = [_numbers(headers[panel], bodies[panel], code, vector, 0, group) for panel, vector in columns]
        for row, row_scale in enumerate(row_scales):
            for column, scale in enumerate(scales):
                n = row * len(columns) + column
                total = builder.sitofp(totals[n], floats)
                outs[n] = builder.call(fma, [total, builder.fmul(row_scale, scale), outs[n]])
    if code.minima:
        minima = [
            builder.fneg(_numbers(headers[panel], bodies[panel], code, vector, 1, groups)) for panel, vector in columns
        ]
        for row, place in enumerate(rows_from(x[3], span, 4)):
            total = everywhere(builder, load(builder, place, FLOAT), floats)
            for column, minimum in enumerate(minima):
                n = row * len(columns) + column
                outs[n] = builder.call(fma, [total, minimum, outs[n]])
    further = builder.add(ahead, builder.mul(span, word(lines * LINE if rows > 1 else span_bytes)))
    for place in places:
        for line in range(lines):
            prefetch(builder, builder.add(builder.add(further, place), word(line * LINE)))
    following = builder.add(span, word(1))
    span.add_incoming(following, builder.block)
    for value, new in zip(held, outs, strict=True):
        value.add_incoming(new, builder.block)
    builder.cbranch(builder.icmp_signed("<", following, given.spans), loop, after)
    builder.position_at_end(after)
    return outs


class _Vectors:
    """Sections of a stream from an address on: each has the same bytes of every output of a panel."""

    def __init__(self, builder: ir.IRBuilder, start: Any, target: Target) -> None:
        self.builder, self.lanes = builder, target.lanes
        self._start, self._width = start, target.width
        self._found: dict[Any, Any] = {}

    def load(self, offset: int, kind: Any, size: int, vector: int) -> Any:
        """Numbers of `size` bytes, as the section that begins `offset` bytes of each output behind the start has
        them, of one vector of outputs. What is read once is kept."""
        key = (offset, str(kind), vector)
        if key not in self._found:
            at = self.builder.add(self._start, word(offset * self._width + size * self.lanes * vector))
            self._found[key] = load(self.builder, at, ir.VectorType(kind, self.lanes), 1)
        return self._found[key]

    def constant(self, value: int) -> ir.Constant:
        """In all lanes."""
        return ir.Constant(ir.VectorType(LANE, self.lanes), [value] * self.lanes)


def _codes_of(body: _Vectors, code: BlockCode, vector: int) -> Callable[[int], Any]:
    """A function of a step that gives its unsigned codes: a byte each, four of an output in a lane."""
    builder, first = body.builder, code.span_scales

    def shifted(value: Any, right: int) -> Any:
        if right == 0:
            return value
        shift = builder.lshr if right > 0 else builder.shl
        return shift(value, body.constant(abs(right)))

    def high(step: int) -> Any:
        """The bits above the low four, in their place."""
        own = code.bits - 4
        plane, place = divmod(step * own, 8)
        bits = shifted(body.load(first + 16 + 4 * plane, LANE, 4, vector), place - 4)
        return builder.and_(bits, body.constant(0x01010101 * (2**own - 1) << 4))

    def codes(step: int) -> Any:
        if code.bits == 8:
            return body.load(first + 4 * step, LANE, 4, vector)
        pair = body.load(first + step // 2 * 4, LANE, 4, vector)
        low = builder.and_(shifted(pair, step % 2 * 4), body.constant(0x0F0F0F0F))
        return low if code.bits == 4 else builder.or_(low, high(step))

    return codes


def _numbers(header: _Vectors, body: _Vectors, code: BlockCode, vector: int, place: int, integer: int) -> Any:
    """Scales (`place` is 0) or minima (1) as float32: of the header, times integer `integer` of the span where there
    are such."""
    builder, floats = header.builder, ir.VectorType(FLOAT, header.lanes)
    if code.scales == "float16":
        return builder.fpext(header.load(2 * place, ir.HalfType(), 2, vector), floats)
    whole = builder.sitofp(builder.sext(body.load(integer, BYTE, 1, vector), ir.VectorType(LANE, header.lanes)), floats)
    return builder.fmul(header.load(4 * place, FLOAT, 4, vector), whole)
