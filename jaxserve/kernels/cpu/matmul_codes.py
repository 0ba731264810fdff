"""Rows times codes with scales: the functions behind `kernels.packed_codes`. `code_call` has what they do."""

from typing import Any

from numba import njit

from jaxserve.kernels.cpu.call import enter, frame_of, join, launch, leave, take, words
from jaxserve.kernels.cpu.code_call import (
    BYTES,
    FLOAT8,
    FLOAT_ROWS,
    HALVES,
    INT16_ZEROS,
    ROOMS,
    ROUNDED_ROWS,
    begin_call,
    multiply_item,
    round_rows,
)
from jaxserve.kernels.cpu.scratch import WORDS
from jaxserve.kernels.cpu.simd import c_function


@njit
def _work(state: int, kinds: Any) -> None:
    shared, worker = words(state, WORDS), join(state)
    round_rows(state, shared)
    index = take(state, worker)
    while index >= 0:
        multiply_item(shared, index, worker, kinds)
        index = take(state, worker)
    leave(state)


@njit
def _call(frame: Any, kinds: Any, worker: int) -> int:
    state, error = enter(frame), 0
    if state != 0:
        shared = words(state, WORDS)
        num_items = begin_call(frame_of(frame), shared, kinds)
        error = launch(frame, state, num_items, shared[ROOMS], worker)
        _work(state, kinds)
    return error


# One function for each form, since Numba keeps machine code by the names of functions.


@njit
def _work_int8_by_int8(state: int) -> None:
    _work(state, (ROUNDED_ROWS, None, BYTES))


@njit
def _work_int8_by_int8_zeros(state: int) -> None:
    _work(state, (ROUNDED_ROWS, INT16_ZEROS, BYTES))


@njit
def _work_int8_by_float32(state: int) -> None:
    _work(state, (FLOAT_ROWS, None, BYTES))


@njit
def _work_int8_by_float32_zeros(state: int) -> None:
    _work(state, (FLOAT_ROWS, INT16_ZEROS, BYTES))


@njit
def _work_int4_by_int8(state: int) -> None:
    _work(state, (ROUNDED_ROWS, None, HALVES))


@njit
def _work_int4_by_int8_zeros(state: int) -> None:
    _work(state, (ROUNDED_ROWS, INT16_ZEROS, HALVES))


@njit
def _work_int4_by_float32(state: int) -> None:
    _work(state, (FLOAT_ROWS, None, HALVES))


@njit
def _work_int4_by_float32_zeros(state: int) -> None:
    _work(state, (FLOAT_ROWS, INT16_ZEROS, HALVES))


@njit
def _work_float8_e4m3fn_by_float32(state: int) -> None:
    _work(state, (FLOAT_ROWS, None, FLOAT8))


_int8_by_int8_worker = c_function(_work_int8_by_int8)
_int8_by_int8_zeros_worker = c_function(_work_int8_by_int8_zeros)
_int8_by_float32_worker = c_function(_work_int8_by_float32)
_int8_by_float32_zeros_worker = c_function(_work_int8_by_float32_zeros)
_int4_by_int8_worker = c_function(_work_int4_by_int8)
_int4_by_int8_zeros_worker = c_function(_work_int4_by_int8_zeros)
_int4_by_float32_worker = c_function(_work_int4_by_float32)
_int4_by_float32_zeros_worker = c_function(_work_int4_by_float32_zeros)
_float8_e4m3fn_by_float32_worker = c_function(_work_float8_e4m3fn_by_float32)


def matmul_codes_int8_by_int8(frame: Any) -> int:
    """(x [T, in], codes [out / W, in / 4, W, 4], scales [out / W, G, W], sizes, numbers) -> (out [T, out], scratch);
    rows are rounded. Sizes: inputs of a run, runs that share a scale, then three fields of `RoundedRows`. Numbers: as
    of `matmul.matmul_float32`, with which out is [T, out / 2]."""
    return _call(frame, (ROUNDED_ROWS, None, BYTES), _int8_by_int8_worker())


def matmul_codes_int8_by_int8_zeros(frame: Any) -> int:
    """`matmul_codes_int8_by_int8` with zeros int16 [out / W, G, W] after the scales."""
    return _call(frame, (ROUNDED_ROWS, INT16_ZEROS, BYTES), _int8_by_int8_zeros_worker())


def matmul_codes_int8_by_float32(frame: Any) -> int:
    """`matmul_codes_int8_by_int8` with rows as they are, padded to whole steps of codes; two sizes, and
    scratch for rooms alone."""
    return _call(frame, (FLOAT_ROWS, None, BYTES), _int8_by_float32_worker())


def matmul_codes_int8_by_float32_zeros(frame: Any) -> int:
    """`matmul_codes_int8_by_float32` with zeros int16 [out / W, G, W] after the scales."""
    return _call(frame, (FLOAT_ROWS, INT16_ZEROS, BYTES), _int8_by_float32_zeros_worker())


def matmul_codes_int4_by_int8(frame: Any) -> int:
    """`matmul_codes_int8_by_int8` with two codes in a byte, [out / W, in / 8, W, 4]."""
    return _call(frame, (ROUNDED_ROWS, None, HALVES), _int4_by_int8_worker())


def matmul_codes_int4_by_int8_zeros(frame: Any) -> int:
    """`matmul_codes_int4_by_int8` with zeros int16 [out / W, G, W] after the scales."""
    return _call(frame, (ROUNDED_ROWS, INT16_ZEROS, HALVES), _int4_by_int8_zeros_worker())


def matmul_codes_int4_by_float32(frame: Any) -> int:
    """`matmul_codes_int8_by_float32` with two codes in a byte, [out / W, in / 8, W, 4]."""
    return _call(frame, (FLOAT_ROWS, None, HALVES), _int4_by_float32_worker())


def matmul_codes_int4_by_float32_zeros(frame: Any) -> int:
    """`matmul_codes_int4_by_float32` with zeros int16 [out / W, G, W] after the scales."""
    return _call(frame, (FLOAT_ROWS, INT16_ZEROS, HALVES), _int4_by_float32_zeros_worker())


def matmul_codes_float8_e4m3fn_by_float32(frame: Any) -> int:
    """`matmul_codes_int8_by_float32` of float8_e4m3fn; scales are 256 times those of the weight."""
    return _call(frame, (FLOAT_ROWS, None, FLOAT8), _float8_e4m3fn_by_float32_worker())
