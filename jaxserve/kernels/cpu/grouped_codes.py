"""Rows times the codes of their own expert: the functions behind `kernels.packed_coded_experts`.

A call is that of `matmul_codes` with the panels of all experts one behind the other. An item is one panel, or two, of
an expert that has rows: the worker makes itself a copy of the call's words in which they are all there is, and
multiplies as `matmul_codes` does. So the bits of a row are those of the dense product with its expert.
"""

from typing import Any

import numpy as np
from numba import njit

from jaxserve.kernels.cpu import code_call as dense
from jaxserve.kernels.cpu.call import (
    enter,
    floats,
    frame_of,
    integers,
    join,
    launch,
    leave,
    operand,
    result,
    take,
    words,
)
from jaxserve.kernels.cpu.scratch import BLOCK, CALL_WORDS, EXPERT_RUN_WORDS, MAX_WORKERS, WORDS
from jaxserve.kernels.cpu.simd import bytes_of, c_function

_SIZES = 5  # of a dense call, before the numbers of experts and of panels of each
_RUNS_AT, _HIT, _EXPERTS, _PANELS = range(dense.ROOMS + 1, dense.ROOMS + 5)
assert _PANELS < CALL_WORDS


@njit
def _begin(frame: Any, shared: Any, kinds: Any) -> int:
    """Lists the experts that have rows, and clears the output of the rows that have no expert."""
    dense.begin_call(frame, shared, kinds)
    x_kind, zeros_kind, _ = kinds
    rounded, zeros = bytes_of(x_kind) == 1, 0 if zeros_kind is None else 1
    given = integers(operand(frame, 3 + zeros), _SIZES + 2)
    experts: Any = np.int64(given[_SIZES])
    panels: Any = np.int64(given[_SIZES + 1])
    shared[dense.COLUMNS], shared[_PANELS] = panels * dense.WIDTH, panels
    shared[_EXPERTS], shared[_RUNS_AT] = experts, result(frame, 2 if rounded else 1)
    sizes, runs = integers(operand(frame, 5 + zeros), experts), words(shared[_RUNS_AT], EXPERT_RUN_WORDS * experts)
    count, row, items = 0, 0, 0
    for expert in range(experts):
        size = np.int64(sizes[expert])
        if size > 0:
            at = EXPERT_RUN_WORDS * count
            runs[at], runs[at + 1], runs[at + 2], runs[at + 3] = expert, row, size, items
            items += (panels + 1) // 2 if size == 1 else panels  # as `dense.multiply_item` takes them
            count += 1
            row += size
    shared[_HIT] = count
    columns = panels * dense.WIDTH
    out = floats(shared[dense.OUT], shared[dense.ROWS] * columns)
    for index in range(row * columns, shared[dense.ROWS] * columns):
        out[index] = np.float32(0)
    return items


@njit
def _item(shared: Any, own: Any, index: int, worker: int, kinds: Any) -> None:
    """Item `index`, by way of the worker's own words."""
    runs, run = words(shared[_RUNS_AT], EXPERT_RUN_WORDS * shared[_HIT]), 0
    while run + 1 < shared[_HIT] and runs[EXPERT_RUN_WORDS * (run + 1) + 3] <= index:
        run += 1
    at = EXPERT_RUN_WORDS * run
    expert, row, rows, first = runs[at], runs[at + 1], runs[at + 2], runs[at + 3]
    for word in range(CALL_WORDS):
        own[word] = shared[word]
    panel, groups, runs_of_row = expert * shared[_PANELS], shared[dense.GROUPS], shared[dense.RUNS]
    blocks = (shared[dense.INPUTS] + BLOCK - 1) // BLOCK
    own[dense.PANELS] += panel * shared[dense.STEPS] * 4 * dense.WIDTH
    own[dense.SCALES] += panel * groups * dense.WIDTH * 4
    own[dense.ZEROS] += panel * groups * dense.WIDTH * 2
    own[dense.ROWS_AT] += row * shared[dense.ROW_BYTES]
    own[dense.X_SCALES] += row * blocks * 4
    own[dense.SUMS] += row * runs_of_row * 4
    own[dense.OUT] += row * shared[dense.COLUMNS] * 4
    own[dense.ROWS] = rows
    dense.multiply_item(own, index - first, worker, kinds)


@njit
def _work(state: int, kinds: Any) -> None:
    shared, worker = words(state, WORDS), join(state)
    dense.round_rows(state, shared)
    index = take(state, worker)
    while index >= 0:
        # Behind the runs of experts; a worker without an item must not look there.
        at = shared[_RUNS_AT] + 8 * (EXPERT_RUN_WORDS * shared[_EXPERTS] + worker * CALL_WORDS)
        _item(shared, words(at, CALL_WORDS), index, worker, kinds)
        index = take(state, worker)
    leave(state)


@njit
def _call(frame: Any, kinds: Any, worker: int) -> int:
    state, error = enter(frame), 0
    if state != 0:
        num_items = _begin(frame_of(frame), words(state, WORDS), kinds)
        error = launch(frame, state, num_items, MAX_WORKERS, worker)
        _work(state, kinds)
    return error


# One function for each form, since Numba keeps machine code by the names of functions.


@njit
def _work_int8_by_int8(state: int) -> None:
    _work(state, (dense.ROUNDED_ROWS, None, dense.BYTES))


@njit
def _work_int8_by_int8_zeros(state: int) -> None:
    _work(state, (dense.ROUNDED_ROWS, dense.INT16_ZEROS, dense.BYTES))


@njit
def _work_int8_by_float32(state: int) -> None:
    _work(state, (dense.FLOAT_ROWS, None, dense.BYTES))


@njit
def _work_int8_by_float32_zeros(state: int) -> None:
    _work(state, (dense.FLOAT_ROWS, dense.INT16_ZEROS, dense.BYTES))


@njit
def _work_int4_by_int8(state: int) -> None:
    _work(state, (dense.ROUNDED_ROWS, None, dense.HALVES))


@njit
def _work_int4_by_int8_zeros(state: int) -> None:
    _work(state, (dense.ROUNDED_ROWS, dense.INT16_ZEROS, dense.HALVES))


@njit
def _work_int4_by_float32(state: int) -> None:
    _work(state, (dense.FLOAT_ROWS, None, dense.HALVES))


@njit
def _work_int4_by_float32_zeros(state: int) -> None:
    _work(state, (dense.FLOAT_ROWS, dense.INT16_ZEROS, dense.HALVES))


@njit
def _work_float8_e4m3fn_by_float32(state: int) -> None:
    _work(state, (dense.FLOAT_ROWS, None, dense.FLOAT8))


_int8_by_int8_worker = c_function(_work_int8_by_int8)
_int8_by_int8_zeros_worker = c_function(_work_int8_by_int8_zeros)
_int8_by_float32_worker = c_function(_work_int8_by_float32)
_int8_by_float32_zeros_worker = c_function(_work_int8_by_float32_zeros)
_int4_by_int8_worker = c_function(_work_int4_by_int8)
_int4_by_int8_zeros_worker = c_function(_work_int4_by_int8_zeros)
_int4_by_float32_worker = c_function(_work_int4_by_float32)
_int4_by_float32_zeros_worker = c_function(_work_int4_by_float32_zeros)
_float8_e4m3fn_by_float32_worker = c_function(_work_float8_e4m3fn_by_float32)


def grouped_codes_int8_by_int8(frame: Any) -> int:
    """(x [M, in], codes [E * P, in / 4, W, 4], scales [E * P, G, W], sizes, no numbers, group sizes [E]) ->
    (out [M, P * W], scratch arrays: two of rounded rows, one of rows as they are).

    Sizes: the five of `matmul_codes_int8_by_int8`, or two and zeros, then E and P.
    """
    return _call(frame, (dense.ROUNDED_ROWS, None, dense.BYTES), _int8_by_int8_worker())


def grouped_codes_int8_by_int8_zeros(frame: Any) -> int:
    """See `grouped_codes_int8_by_int8`; rows, zeros and codes are those of `matmul_codes_int8_by_int8_zeros`."""
    return _call(frame, (dense.ROUNDED_ROWS, dense.INT16_ZEROS, dense.BYTES), _int8_by_int8_zeros_worker())


def grouped_codes_int8_by_float32(frame: Any) -> int:
    """See `grouped_codes_int8_by_int8`; rows, zeros and codes are those of `matmul_codes_int8_by_float32`."""
    return _call(frame, (dense.FLOAT_ROWS, None, dense.BYTES), _int8_by_float32_worker())


def grouped_codes_int8_by_float32_zeros(frame: Any) -> int:
    """See `grouped_codes_int8_by_int8`; rows, zeros and codes are those of `matmul_codes_int8_by_float32_zeros`."""
    return _call(frame, (dense.FLOAT_ROWS, dense.INT16_ZEROS, dense.BYTES), _int8_by_float32_zeros_worker())


def grouped_codes_int4_by_int8(frame: Any) -> int:
    """See `grouped_codes_int8_by_int8`; rows, zeros and codes are those of `matmul_codes_int4_by_int8`."""
    return _call(frame, (dense.ROUNDED_ROWS, None, dense.HALVES), _int4_by_int8_worker())


def grouped_codes_int4_by_int8_zeros(frame: Any) -> int:
    """See `grouped_codes_int8_by_int8`; rows, zeros and codes are those of `matmul_codes_int4_by_int8_zeros`."""
    return _call(frame, (dense.ROUNDED_ROWS, dense.INT16_ZEROS, dense.HALVES), _int4_by_int8_zeros_worker())


def grouped_codes_int4_by_float32(frame: Any) -> int:
    """See `grouped_codes_int8_by_int8`; rows, zeros and codes are those of `matmul_codes_int4_by_float32`."""
    return _call(frame, (dense.FLOAT_ROWS, None, dense.HALVES), _int4_by_float32_worker())


def grouped_codes_int4_by_float32_zeros(frame: Any) -> int:
    """See `grouped_codes_int8_by_int8`; rows, zeros and codes are those of `matmul_codes_int4_by_float32_zeros`."""
    return _call(frame, (dense.FLOAT_ROWS, dense.INT16_ZEROS, dense.HALVES), _int4_by_float32_zeros_worker())


def grouped_codes_float8_e4m3fn_by_float32(frame: Any) -> int:
    """See `grouped_codes_int8_by_int8`; rows, zeros and codes are those of `matmul_codes_float8_e4m3fn_by_float32`."""
    return _call(frame, (dense.FLOAT_ROWS, None, dense.FLOAT8), _float8_e4m3fn_by_float32_worker())
