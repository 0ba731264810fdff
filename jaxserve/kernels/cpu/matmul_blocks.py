"""Rows times codes in blocks: the functions behind `kernels.packed_blocks`, one for each code of the table.

Rows are rounded once in a call, by all of its workers. A work item is one panel, as in `matmul`, or two of a single
row: the sums of one would wait for each other, and not for the memory.
"""

from collections.abc import Callable
from typing import Any

from numba import njit

from jaxserve.kernels.block_codes import BLOCK_CODES, SPAN
from jaxserve.kernels.cpu.block_runs import panel_product
from jaxserve.kernels.cpu.call import (
    enter,
    frame_of,
    integers,
    join,
    launch,
    leave,
    operand,
    result,
    size_of,
    take,
    words,
)
from jaxserve.kernels.cpu.gating import begin_gating, gate_panel, room_of
from jaxserve.kernels.cpu.rounding import round_spans
from jaxserve.kernels.cpu.scratch import FIRST_WORD, WORDS
from jaxserve.kernels.cpu.simd import c_function, call_function, fetch_add
from jaxserve.kernels.cpu.target import find_target

_TARGET = find_target()
_WIDTH = _TARGET.width
_round_row = round_spans(_TARGET.lanes)
_PART = 8192  # numbers of the rows that a worker rounds at a time

# Words of a call: addresses, then sizes.
_X, _PANELS, _OUT, _ROUNDED = range(FIRST_WORD, FIRST_WORD + 4)
_ROWS, _SPANS, _NUM_PANELS, _PANEL_BYTES, _ZERO = range(FIRST_WORD + 4, FIRST_WORD + 9)
_SCALES, _STARTS, _SUMS, _ROW_BYTES = range(FIRST_WORD + 9, FIRST_WORD + 13)
_PARTS, _BEGUN_PARTS, _ENDED_PARTS, _ROOMS = range(FIRST_WORD + 13, FIRST_WORD + 17)


@njit
def _begin(frame: Any, shared: Any) -> int:
    """Writes the words of a call. Returns the number of its work items."""
    shared[_X], shared[_PANELS], shared[_OUT] = operand(frame, 0), operand(frame, 1), result(frame, 0)
    rows, depth, panels = size_of(frame, 0, 0), size_of(frame, 0, 1), size_of(frame, 1, 0)
    given = integers(operand(frame, 2), 5)
    shared[_ROWS], shared[_SPANS], shared[_NUM_PANELS] = rows, depth // SPAN, panels
    shared[_PANEL_BYTES] = size_of(frame, 1, 1) * size_of(frame, 1, 2)
    rounded = result(frame, 1)
    shared[_ROUNDED], shared[_ROW_BYTES], shared[_ZERO] = rounded, given[0], given[4]
    shared[_SCALES], shared[_STARTS], shared[_SUMS] = rounded + given[1], rounded + given[2], rounded + given[3]
    shared[_PARTS] = max(1, min(rows, rows * depth // _PART))
    shared[_ROOMS] = begin_gating(frame, shared, 3)
    return (panels + 1) // 2 if rows == 1 else panels


@njit
def _round_rows(state: int, shared: Any, group: int) -> None:
    """Rounds all rows, with the other workers of the call. A part that a worker has begun it ends, whatever the others
    do, so that waiting for it is safe."""
    parts, rows, spans = shared[_PARTS], shared[_ROWS], shared[_SPANS]
    part = fetch_add(state + 8 * _BEGUN_PARTS, 1)
    while part < parts:
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            at = row * shared[_ROW_BYTES]
            _round_row(
                shared[_X] + row * spans * SPAN * 4,
                spans,
                shared[_ZERO],
                group,
                shared[_ROUNDED] + at,
                shared[_SCALES] + at,
                shared[_STARTS] + at,
                shared[_SUMS] + at,
            )
        fetch_add(state + 8 * _ENDED_PARTS, 1)
        part = fetch_add(state + 8 * _BEGUN_PARTS, 1)
    while fetch_add(state + 8 * _ENDED_PARTS, 0) < parts:
        pass


def _form(name: str) -> Callable[[], int]:
    """What gives the address of the workers of a code of the table."""
    code = BLOCK_CODES[name]
    product = panel_product(_TARGET.row_steps, 1, code, _TARGET)
    pair_product = panel_product((1,), 2, code, _TARGET)
    group = code.group

    def work(state: int) -> None:
        shared, worker = words(state, WORDS), join(state)
        _round_rows(state, shared, group)
        rows, panels, panel_bytes = shared[_ROWS], shared[_NUM_PANELS], shared[_PANEL_BYTES]
        of_item, room = 2 if rows == 1 else 1, room_of(shared, worker)
        x, stride, spans = shared[_ROUNDED], shared[_ROW_BYTES], shared[_SPANS]
        scales, starts, sums = shared[_SCALES], shared[_STARTS], shared[_SUMS]
        item = take(state, worker)
        while item >= 0:
            index = item * of_item
            panel = shared[_PANELS] + index * panel_bytes
            out, out_stride, ahead = room, _WIDTH * 4, panel + of_item * panel_bytes
            if room == 0:
                out, out_stride = shared[_OUT] + index * _WIDTH * 4, panels * _WIDTH * 4
            if rows == 1 and index + 1 < panels:
                pair_product(x, scales, starts, sums, stride, panel, panel_bytes, spans, out, out_stride, ahead, rows)
            else:
                product(x, scales, starts, sums, stride, panel, panel_bytes, spans, out, out_stride, ahead, rows)
            if room != 0:
                for own in range(index, min(index + of_item, panels)):
                    gate_panel(shared, room + (own - index) * _WIDTH * 4, own)
            item = take(state, worker)
        leave(state)

    work.__qualname__ = f"work_{name.lower()}"  # Numba keeps machine code by the names of functions
    return c_function(njit(work))


@njit
def _call(frame: Any, worker: int) -> int:
    state, error = enter(frame), 0
    if state != 0:
        shared = words(state, WORDS)
        num_items = _begin(frame_of(frame), shared)
        error = launch(frame, state, num_items, shared[_ROOMS], worker)
        call_function(worker, state)  # not by its name: the machine code is there once
    return error


_q4_0 = _form("Q4_0")
_q4_1 = _form("Q4_1")
_q5_0 = _form("Q5_0")
_q5_1 = _form("Q5_1")
_q8_0 = _form("Q8_0")
_q4_k = _form("Q4_K")
_q5_k = _form("Q5_K")
_q6_k = _form("Q6_K")


def matmul_blocks_q4_0(frame: Any) -> int:
    """(x [T, in], panels [out / W, blocks, bytes], sizes, numbers []) -> (out [T, out], scratch). Sizes: those of
    `RoundedSpans`, row_bytes first, and the unsigned code of zero. Numbers: as of `matmul.matmul_float32`, with which
    out is [T, out / 2]."""
    return _call(frame, _q4_0())


def matmul_blocks_q4_1(frame: Any) -> int:
    """As of Q4_0."""
    return _call(frame, _q4_1())


def matmul_blocks_q5_0(frame: Any) -> int:
    """As of Q4_0."""
    return _call(frame, _q5_0())


def matmul_blocks_q5_1(frame: Any) -> int:
    """As of Q4_0."""
    return _call(frame, _q5_1())


def matmul_blocks_q8_0(frame: Any) -> int:
    """As of Q4_0."""
    return _call(frame, _q8_0())


def matmul_blocks_q4_k(frame: Any) -> int:
    """As of Q4_0."""
    return _call(frame, _q4_k())


def matmul_blocks_q5_k(frame: Any) -> int:
    """As of Q4_0."""
    return _call(frame, _q5_k())


def matmul_blocks_q6_k(frame: Any) -> int:
    """As of Q4_0."""
    return _call(frame, _q6_k())
