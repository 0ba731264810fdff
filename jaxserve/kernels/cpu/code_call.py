"""A call that multiplies rows with codes: its words, the rounding of its rows, and its work items.

Rows are rounded to eight bits, once in a call, or multiplied as they are. A work item is one panel of codes, as in
`matmul`. Shapes, layouts and the arithmetic are those of `PackedCodes`; `code_runs` multiplies one run. `matmul_codes`
and `grouped_codes` have the functions that XLA calls.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from jaxserve.kernels.cpu.call import (
    floats,
    integers,
    operand,
    result,
    size_of,
)
from jaxserve.kernels.cpu.code_runs import line_inputs, run_product
from jaxserve.kernels.cpu.gating import begin_gating, gate_panel, room_of
from jaxserve.kernels.cpu.rounding import largest_size, round_vectors
from jaxserve.kernels.cpu.scratch import BLOCK, FIRST_WORD
from jaxserve.kernels.cpu.simd import bytes_of, fetch_add, pointer
from jaxserve.kernels.cpu.target import find_target

_F, _I = np.float32, np.int32
_TARGET = find_target()
WIDTH, _LANES, _HEIGHT = _TARGET.width, _TARGET.lanes, _TARGET.row_steps[0]
_largest_size, _round_vectors = largest_size(_LANES), round_vectors(_LANES)
_SIZE, _INFINITY, _LEAST = 0x7FFFFFFF, 0x7F800000, 0x04000000  # bits of |x|, infinity and 2^-119
_LARGEST, _ZERO, _NAN = _F(127), _F(0), _F(np.nan)
_PART = 8192  # numbers of the rows that a worker rounds at a time

# Kinds of rows, zeros and codes: a call has a tuple of three, of which the types count. No zeros are None.
ROUNDED_ROWS, FLOAT_ROWS = np.int8(0), np.float32(0)
INT16_ZEROS, BYTES, HALVES, FLOAT8 = np.int16(0), np.uint32(0), np.uint16(0), np.int32(0)

# Words of a call: addresses, then sizes. Rows begin at `ROWS_AT`, `ROW_BYTES` apart: rounded ones where they are.
_X, PANELS, SCALES, ZEROS, OUT, ROWS_AT, X_SCALES, SUMS = range(FIRST_WORD, FIRST_WORD + 8)
ROWS, _DEPTH, COLUMNS, STEPS, INPUTS, GROUPS, _RUN, RUNS, _RUNS_OF_SCALE, ROW_BYTES = range(
    FIRST_WORD + 8, FIRST_WORD + 18
)
_PARTS, _BEGUN_PARTS, _ENDED_PARTS, ROOMS = range(FIRST_WORD + 18, FIRST_WORD + 22)


@njit
def begin_call(frame: Any, shared: Any, kinds: Any) -> int:
    """Writes the words of a call. Returns the number of its work items."""
    x_kind, zeros_kind, codes_kind = kinds
    rounded, zeros = bytes_of(x_kind) == 1, 0 if zeros_kind is None else 1
    shared[_X], shared[PANELS], shared[SCALES] = operand(frame, 0), operand(frame, 1), operand(frame, 2)
    shared[ZEROS], shared[OUT] = operand(frame, 2 + zeros), result(frame, 0)
    rows, depth, panels, steps = size_of(frame, 0, 0), size_of(frame, 0, 1), size_of(frame, 1, 0), size_of(frame, 1, 1)
    given = integers(operand(frame, 3 + zeros), 5)
    run = np.int64(given[0])
    shared[ROWS], shared[_DEPTH], shared[COLUMNS], shared[STEPS] = rows, depth, panels * WIDTH, steps
    shared[INPUTS] = steps * line_inputs(codes_kind)
    shared[GROUPS], shared[_RUN], shared[_RUNS_OF_SCALE] = size_of(frame, 2, 1), run, given[1]
    shared[ROOMS] = begin_gating(frame, shared, 4 + zeros)
    shared[RUNS] = (shared[INPUTS] + run - 1) // run
    if rounded:
        scratch = result(frame, 1)
        shared[ROWS_AT], shared[ROW_BYTES] = scratch, given[2]
        shared[X_SCALES], shared[SUMS] = scratch + given[3], scratch + given[4]
        shared[_PARTS] = max(1, min(rows, rows * depth // _PART))
    else:
        shared[ROWS_AT], shared[ROW_BYTES] = shared[_X], depth * 4
    return (panels + 1) // 2 if rows == 1 else panels


@njit
def _codes(address: int, count: int) -> Any:
    return carray(pointer(address), (count,), np.int8)


@njit(error_model="numpy")
def _round_row(shared: Any, row: int) -> None:
    """Codes of one row, with the scales of its blocks and the sums of its runs."""
    depth, padded, run, runs = shared[_DEPTH], shared[INPUTS], shared[_RUN], shared[RUNS]
    blocks = (padded + BLOCK - 1) // BLOCK
    x, codes_at = shared[_X] + row * depth * 4, shared[ROWS_AT] + row * shared[ROW_BYTES]
    numbers, bits, codes = floats(x, depth), integers(x, depth), _codes(codes_at, padded)
    scales = floats(shared[X_SCALES] + row * blocks * 4, blocks)
    sums = integers(shared[SUMS] + row * runs * 4, runs)
    for block in range(blocks):
        begin, end = block * BLOCK, min(block * BLOCK + BLOCK, depth)
        vectors = (end - begin) // _LANES
        largest = _largest_size(x + begin * 4, vectors)
        for index in range(begin + vectors * _LANES, end):
            largest = max(largest, np.int64(bits[index] & _SIZE))
        rounds = _LEAST <= largest < _INFINITY
        scales[block], inverse = _ZERO if largest < _LEAST else _NAN, _ZERO
        if rounds:
            top = _I(largest).view(np.float32)
            scales[block], inverse = top / _LARGEST, _LARGEST / top
        for first in range(begin, min(begin + BLOCK, padded), run):
            last, total = min(first + run, end), 0
            rest = first
            if rounds:
                vectors = (last - first) // _LANES
                total = _round_vectors(x + first * 4, vectors, inverse, codes_at + first)
                rest = first + vectors * _LANES
                for index in range(rest, last):
                    codes[index] = np.int8(np.rint(numbers[index] * inverse))
                    total += codes[index]
                rest = last
            for index in range(rest, min(first + run, padded)):
                codes[index] = np.int8(0)
            sums[first // run] = total


@njit
def round_rows(state: int, shared: Any) -> None:
    """Rounds all rows, with the other workers of the call. A part that a worker has begun it ends, whatever the others
    do, so that waiting for it is safe."""
    parts, rows = shared[_PARTS], shared[ROWS]
    part = fetch_add(state + 8 * _BEGUN_PARTS, 1)
    while part < parts:
        for row in range(part * rows // parts, (part + 1) * rows // parts):
            _round_row(shared, row)
        fetch_add(state + 8 * _ENDED_PARTS, 1)
        part = fetch_add(state + 8 * _BEGUN_PARTS, 1)
    while fetch_add(state + 8 * _ENDED_PARTS, 0) < parts:
        pass


def _rows_product(row_steps: tuple[int, ...], panels: int) -> Callable[..., Any]:
    """A function for Numba: some panels for the rows from `row` on, in blocks of `row_steps`, largest first, last 1.
    `out` is the address of the first row's result, and the bytes from one row to the next."""
    if not row_steps:

        @njit
        def no_rows(*arguments: Any) -> None:
            pass

        return no_rows
    size, one_run = row_steps[0], run_product(row_steps[0], panels, _TARGET)

    @njit
    def block(shared: Any, panel: int, row: int, out: Any, ahead: int, ahead_step: int, kinds: Any) -> None:
        x_kind, zeros_kind, codes_kind = kinds
        all_steps, groups, runs = shared[STEPS], shared[GROUPS], shared[RUNS]
        row_bytes, blocks = shared[ROW_BYTES], (shared[INPUTS] + BLOCK - 1) // BLOCK
        inputs = line_inputs(codes_kind)
        run_steps = shared[_RUN] // inputs
        strides = (all_steps * 4 * WIDTH, groups * WIDTH * 4, groups * WIDTH * 2)
        x, codes = shared[ROWS_AT] + row * row_bytes, shared[PANELS] + panel * strides[0]
        scales, zeros = shared[SCALES] + panel * strides[1], shared[ZEROS] + panel * strides[2]
        x_scales, sums = shared[X_SCALES] + row * blocks * 4, shared[SUMS] + row * runs * 4
        for number in range(runs):
            begin = number * run_steps
            group = number // shared[_RUNS_OF_SCALE]
            one_run(
                x + begin * inputs * bytes_of(x_kind),
                row_bytes,
                codes + begin * 4 * WIDTH,
                min(run_steps, all_steps - begin),
                sums + number * 4,
                runs * 4,
                zeros + group * WIDTH * 2,
                x_scales + begin * inputs // BLOCK * 4,
                blocks * 4,
                scales + group * WIDTH * 4,
                out[0] + row * out[1],
                out[1],
                number > 0,
                strides,
                ahead + begin * ahead_step,
                ahead_step,
                x_kind,
                zeros_kind,
                codes_kind,
            )

    smaller = _rows_product(row_steps[1:], panels)

    @njit
    def product_in_blocks(shared: Any, panel: int, row: int, out: Any, ahead: int, ahead_step: int, kinds: Any) -> None:
        while row + size <= shared[ROWS]:
            block(shared, panel, row, out, ahead, ahead_step, kinds)
            row += size
            ahead += shared[STEPS] * ahead_step
        if row < shared[ROWS]:
            smaller(shared, panel, row, out, ahead, ahead_step, kinds)

    return product_in_blocks


_product, _pair_product = _rows_product(_TARGET.row_steps, 1), _rows_product((1,), 2)


@njit
def multiply_item(shared: Any, index: int, worker: int, kinds: Any) -> None:
    """Panel `index`. Each block of rows fetches its share of the next one, from memory, while it computes.

    Of one row it is two panels: the sums of one would wait for each other, and not for the memory.
    """
    rows, panels, panel_bytes = shared[ROWS], shared[COLUMNS] // WIDTH, shared[STEPS] * 4 * WIDTH
    of_item = 2 if rows == 1 else 1
    index *= of_item
    room = room_of(shared, worker)
    out = (room, WIDTH * 4)
    if room == 0:
        out = (shared[OUT] + index * WIDTH * 4, shared[COLUMNS] * 4)
    ahead = shared[PANELS] + (index + of_item) * panel_bytes
    if rows == 1 and index + 1 < panels:
        _pair_product(shared, index, 0, out, ahead, 4 * WIDTH, kinds)
    else:
        blocks = (rows + _HEIGHT - 1) // _HEIGHT
        _product(shared, index, 0, out, ahead, 4 * WIDTH // blocks, kinds)
    if room != 0:
        for panel in range(index, min(index + of_item, panels)):
            gate_panel(shared, room + (panel - index) * WIDTH * 4, panel)
