"""Rows times the matrix of their own expert: the machine code behind `kernels.packed_experts`.

A work item is one panel of one expert that has rows. It streams through once, from memory, while the expert's rows stay
in the processor's cache. Adjacent items are adjacent in memory. Shapes and layouts are those of `PackedExperts`.
"""

from typing import Any

import numpy as np
from numba import njit

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
    size_of,
    take,
    words,
)
from jaxserve.kernels.cpu.scratch import FIRST_WORD, MAX_WORKERS, WORDS
from jaxserve.kernels.cpu.simd import bytes_of, c_function, panel_product
from jaxserve.kernels.cpu.target import find_target

_TARGET = find_target()
_WIDTH = _TARGET.width
_product = panel_product(_TARGET)
_X, _EXPERTS, _OUT, _RUNS, _DEPTH, _PANELS = range(FIRST_WORD, FIRST_WORD + 6)


@njit
def _begin(frame: Any, shared: Any) -> int:
    """Lists the experts that have rows, and clears the output of the rows that have no expert."""
    shared[_X], shared[_EXPERTS], shared[_OUT] = operand(frame, 0), operand(frame, 1), result(frame, 0)
    shared[_RUNS] = result(frame, 1)
    rows, experts, panels = size_of(frame, 0, 0), size_of(frame, 1, 0), size_of(frame, 1, 1)
    shared[_DEPTH], shared[_PANELS] = size_of(frame, 1, 2), panels
    sizes, runs = integers(operand(frame, 2), experts), words(shared[_RUNS], 3 * experts)
    count, row = 0, 0
    for expert in range(experts):
        size = np.int64(sizes[expert])
        if size > 0:
            runs[3 * count], runs[3 * count + 1], runs[3 * count + 2] = expert, row, size
            count += 1
            row += size
    out = floats(shared[_OUT], rows * panels * _WIDTH)
    for index in range(row * panels * _WIDTH, rows * panels * _WIDTH):
        out[index] = np.float32(0)
    return count * panels


@njit
def _item(shared: Any, index: int, kind: Any) -> None:
    """Panel `index % panels` of the expert of run `index // panels`, of elements like `kind`."""
    depth, panels = shared[_DEPTH], shared[_PANELS]
    number, panel = index // panels, index % panels
    run = words(shared[_RUNS] + number * 24, 3)
    expert, row, rows = run[0], run[1], run[2]
    weights = shared[_EXPERTS] + (expert * panels + panel) * depth * _WIDTH * bytes_of(kind)
    columns = panels * _WIDTH
    x, out = shared[_X] + row * depth * 4, shared[_OUT] + (row * columns + panel * _WIDTH) * 4
    _product(x, depth, weights, depth, out, columns, rows, kind)


@njit
def _work(state: int, kind: Any) -> None:
    shared, worker = words(state, WORDS), join(state)
    index = take(state, worker)
    while index >= 0:
        _item(shared, index, kind)
        index = take(state, worker)
    leave(state)


@njit
def _call(frame: Any, kind: Any, worker: int) -> int:
    state, error = enter(frame), 0
    if state != 0:
        error = launch(frame, state, _begin(frame_of(frame), words(state, WORDS)), MAX_WORKERS, worker)
        _work(state, kind)
    return error


@njit
def _work_float32(state: int) -> None:
    _work(state, np.float32(0))


@njit
def _work_bfloat16(state: int) -> None:
    _work(state, np.uint32(0))


_float32_worker, _bfloat16_worker = c_function(_work_float32), c_function(_work_bfloat16)


def grouped_matmul_float32(frame: Any) -> int:
    """(x [M, in], panels [E, out / W, in, W], group sizes [E]) -> (out [M, out], scratch)."""
    return _call(frame, np.float32(0), _float32_worker())


def grouped_matmul_bfloat16(frame: Any) -> int:
    """`grouped_matmul_float32` of bfloat16: x, and panels [E, out / W, in / 2, W, 2]."""
    return _call(frame, np.uint32(0), _bfloat16_worker())
