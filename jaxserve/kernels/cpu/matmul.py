"""Rows times packed weights: the machine code behind `kernels.packed_weight`.

A work item is one panel of weights, which streams through once, from memory, while the rows stay in the processor's
cache. Shapes and layouts are those of `PackedWeight`; those of adapters, in the functions that have them, are of
`PackedLowRank`. Engines without adapters run, and compile, the other functions.
"""

from typing import Any

import numpy as np
from numba import njit

from jaxserve.kernels.cpu.call import enter, frame_of, join, launch, leave, operand, result, size_of, take, words
from jaxserve.kernels.cpu.gating import begin_gating, gate_panel, room_of
from jaxserve.kernels.cpu.low_rank import add_up, begin_low_rank, multiply_down
from jaxserve.kernels.cpu.scratch import FIRST_WORD, WORDS
from jaxserve.kernels.cpu.simd import bytes_of, c_function, panel_product
from jaxserve.kernels.cpu.target import find_target

_TARGET = find_target()
_WIDTH = _TARGET.width
_product = panel_product(_TARGET)
_X, _PANELS, _OUT, _NUM_ROWS, _DEPTH, _NUM_COLUMNS, _ROOMS = range(FIRST_WORD, FIRST_WORD + 7)


@njit
def _begin(frame: Any, shared: Any) -> int:
    shared[_X], shared[_PANELS], shared[_OUT] = operand(frame, 0), operand(frame, 1), result(frame, 0)
    shared[_NUM_ROWS], shared[_DEPTH] = size_of(frame, 0, 0), size_of(frame, 1, 1)
    panels = size_of(frame, 1, 0)
    shared[_NUM_COLUMNS], shared[_ROOMS] = panels * _WIDTH, begin_gating(frame, shared, 2)
    return panels


@njit
def _item(shared: Any, index: int, worker: int, kind: Any, up_kind: Any) -> None:
    """Panel `index`, of elements like `kind`, and what adapters add to it, of numbers like `up_kind`; None: nothing."""
    x, rows, depth, columns = shared[_X], shared[_NUM_ROWS], shared[_DEPTH], shared[_NUM_COLUMNS]
    panel = shared[_PANELS] + index * depth * _WIDTH * bytes_of(kind)
    room = room_of(shared, worker)
    if room != 0:
        _product(x, depth, panel, depth, room, _WIDTH, rows, kind)
        if up_kind is not None:
            add_up(shared, index, room, _WIDTH, up_kind)
        gate_panel(shared, room, index)
    else:
        out = shared[_OUT] + index * _WIDTH * 4
        _product(x, depth, panel, depth, out, columns, rows, kind)
        if up_kind is not None:
            add_up(shared, index, out, columns, up_kind)


@njit
def _work(state: int, kind: Any, up_kind: Any) -> None:
    shared, worker = words(state, WORDS), join(state)
    if up_kind is not None:
        multiply_down(state, shared, kind)
    index = take(state, worker)
    while index >= 0:
        _item(shared, index, worker, kind, up_kind)
        index = take(state, worker)
    leave(state)


@njit
def _call(frame: Any, kind: Any, up_kind: Any, worker: int) -> int:
    state, error = enter(frame), 0
    if state != 0:
        shared = words(state, WORDS)
        num_items = _begin(frame_of(frame), shared)
        if up_kind is not None:
            begin_low_rank(frame_of(frame), shared, 3)
        error = launch(frame, state, num_items, shared[_ROOMS], worker)
        _work(state, kind, up_kind)
    return error


@njit
def _work_float32(state: int) -> None:
    _work(state, np.float32(0), None)


@njit
def _work_bfloat16(state: int) -> None:
    _work(state, np.uint32(0), None)


@njit
def _work_adapted_float32(state: int) -> None:
    _work(state, np.float32(0), np.float32(0))


@njit
def _work_adapted_bfloat16(state: int) -> None:
    _work(state, np.uint32(0), np.uint16(0))


_float32_worker, _bfloat16_worker = c_function(_work_float32), c_function(_work_bfloat16)
_adapted_float32_worker = c_function(_work_adapted_float32)
_adapted_bfloat16_worker = c_function(_work_adapted_bfloat16)


def matmul_float32(frame: Any) -> int:
    """(x [T, in], panels [out / W, in, W], numbers []) -> out [T, out].

    With `gating_numbers`, panels have gate and up side by side, and results are (out [T, out / 2], scratch).
    """
    return _call(frame, np.float32(0), None, _float32_worker())


def matmul_bfloat16(frame: Any) -> int:
    """`matmul_float32` of x and panels [out / W, in / 2, W, 2] in bfloat16."""
    return _call(frame, np.uint32(0), None, _bfloat16_worker())


def matmul_adapted_float32(frame: Any) -> int:
    """`matmul_float32` with the operands of `PackedLowRank.operands` behind the others, and the scratch of
    `LowRankScratch` before that of rooms."""
    return _call(frame, np.float32(0), np.float32(0), _adapted_float32_worker())


def matmul_adapted_bfloat16(frame: Any) -> int:
    """`matmul_adapted_float32` of bfloat16: x and panels as of `matmul_bfloat16`."""
    return _call(frame, np.uint32(0), np.uint16(0), _adapted_bfloat16_worker())
