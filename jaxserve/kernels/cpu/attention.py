"""Paged attention over one layer's cache: the machine code behind `cpu.implementation`.

A work item is one tile of queries of one row that share a key head. It reads the pages of its row in place, one after
the other, with an online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867). The layout of the cache is that of
`xla_attention`.

Nothing depends on neighbours, to the last bit: a number of a product is one chain over its depth, whatever else is
in the block, and sums over tokens are the same loop over one page.
"""

import math
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
from jaxserve.kernels.cpu.scratch import BYTES, FIRST_WORD, WORDS
from jaxserve.kernels.cpu.simd import bytes_of, c_function, largest, rows_product
from jaxserve.kernels.cpu.target import find_target

_F = np.float32
_HIDDEN, _LOWEST = _F(-1e30), _F(-0.5e30)  # exp(_HIDDEN - _LOWEST) is 0: a page in which nothing is seen adds nothing
# Sums may be taken by lanes and products fused; infinities and NaN stay what they are.
_FAST = {"reassoc", "contract", "arcp", "nsz"}

_LANES = find_target().lanes
_VECTORS = 4
_WIDTH = _VECTORS * _LANES
_wide, _thin = (rows_product((4, 2, 1), vectors, _LANES) for vectors in (_VECTORS, 1))
_row_largest = largest(_LANES)

# Words of a call: addresses, then sizes.
(_Q, _KEYS, _VALUES, _STARTS, _LENS, _TABLES, _INTEGERS, _NUMBERS, _OUT, _TILES, _ROOM, _ROOM_BYTES) = range(
    FIRST_WORD, FIRST_WORD + 12
)
(_HEADS, _HEAD_DIM, _KV_HEADS, _PAGE, _COLUMNS, _TILE_TOKENS, _ROOMS) = range(FIRST_WORD + 12, FIRST_WORD + 19)


@njit(inline="always")
def exp(x: Any) -> Any:
    """e to the power x, float32, within two units in the last place (Cephes' polynomial); 0 below -87; x at most 87."""
    power = np.floor(x * _F(1.44269504) + _F(0.5))
    rest = x - power * _F(0.693359375) + power * _F(2.12194440e-4)
    value = _F(1.9875691500e-4)
    value = value * rest + _F(1.3981999507e-3)
    value = value * rest + _F(8.3334519073e-3)
    value = value * rest + _F(4.1665795894e-2)
    value = value * rest + _F(1.6666665459e-1)
    value = value * rest + _F(5.0000001201e-1)
    value = value * rest * rest + rest + _F(1.0)
    exponent = np.int32(max(power, _F(-127.0))) + np.int32(127)
    return _F(0.0) if x < _F(-87.0) else value * np.int32(exponent << np.int32(23)).view(np.float32)


@njit
def _product(
    a: int,
    a_stride: int,
    b: int,
    b_stride: int,
    depth: int,
    c: int,
    c_stride: int,
    rows: int,
    columns: int,
    add: bool,
    kind: Any,
) -> None:
    """c [rows, columns] (+)= a [rows, depth] b [depth, columns]; columns are a multiple of the lanes."""
    column = 0
    while column + _WIDTH <= columns:
        _wide(a, a_stride, b + column * bytes_of(kind), b_stride, depth, c + column * 4, c_stride, rows, add, kind)
        column += _WIDTH
    while column < columns:
        _thin(a, a_stride, b + column * bytes_of(kind), b_stride, depth, c + column * 4, c_stride, rows, add, kind)
        column += _LANES


@njit
def _begin(frame: Any, shared: Any) -> int:
    """Lists the tiles, and clears the output of padding tokens."""
    shared[_Q], shared[_KEYS], shared[_VALUES] = operand(frame, 0), operand(frame, 1), operand(frame, 2)
    shared[_STARTS], shared[_LENS], shared[_TABLES] = operand(frame, 3), operand(frame, 4), operand(frame, 5)
    shared[_INTEGERS], shared[_NUMBERS], shared[_OUT] = operand(frame, 6), operand(frame, 7), result(frame, 0)
    tokens, heads, head_dim = size_of(frame, 0, 0), size_of(frame, 0, 1), size_of(frame, 0, 2)
    kv_heads, page, rows = size_of(frame, 1, 1), size_of(frame, 1, 3), size_of(frame, 4, 0)
    given = integers(shared[_INTEGERS], 8)
    tile = np.int64(given[4])
    shared[_HEADS], shared[_HEAD_DIM], shared[_KV_HEADS], shared[_PAGE] = heads, head_dim, kv_heads, page
    shared[_COLUMNS], shared[_TILE_TOKENS] = size_of(frame, 5, 1), tile
    shared[_TILES] = result(frame, 1) + BYTES
    shared[_ROOM], shared[_ROOM_BYTES], shared[_ROOMS] = result(frame, 1) + given[5], given[6], given[7]
    starts, tiles = integers(shared[_STARTS], rows + 1), integers(shared[_TILES], (given[5] - BYTES) // 4)
    count = 0
    for row in range(rows):
        for offset in range(0, starts[row + 1] - starts[row], tile):
            tiles[2 * count], tiles[2 * count + 1] = row, offset
            count += 1
    out = floats(shared[_OUT], tokens * heads * head_dim)
    for index in range(starts[rows] * heads * head_dim, tokens * heads * head_dim):
        out[index] = _F(0)
    return count * kv_heads


@njit(fastmath=_FAST, error_model="numpy")
def _weigh(
    scores_at: int, row: int, page: int, mix_at: int, head_dim: int, low: int, high: int, top: Any, total: Any
) -> None:
    """Turns one query's scores of a page into weights; only slots low .. high - 1 are seen."""
    scores = floats(scores_at, page)
    for slot in range(low):
        scores[slot] = _HIDDEN
    for slot in range(high, page):
        scores[slot] = _HIDDEN
    new = max(_row_largest(scores_at, page), top[row])
    shrink = exp(top[row] - new)
    top[row] = new
    added = _F(0)
    for slot in range(page):
        weight = exp(scores[slot] - new)
        scores[slot] = weight
        added += weight
    total[row] = total[row] * shrink + added
    if shrink != _F(1):
        mix = floats(mix_at, head_dim)
        for index in range(head_dim):
            mix[index] *= shrink


@njit(error_model="numpy")
def _item(shared: Any, index: int, worker: int, kind: Any) -> None:
    heads, head_dim, kv_heads, page = shared[_HEADS], shared[_HEAD_DIM], shared[_KV_HEADS], shared[_PAGE]
    group = heads // kv_heads
    tile, kv_head = index // kv_heads, index % kv_heads
    place = integers(shared[_TILES] + 8 * tile, 2)
    row, offset = np.int64(place[0]), np.int64(place[1])
    starts, context = integers(shared[_STARTS] + 4 * row, 2), np.int64(integers(shared[_LENS] + 4 * row, 1)[0])
    row_tokens = np.int64(starts[1] - starts[0])
    token, first = np.int64(starts[0]) + offset, context - row_tokens + offset  # `first` is a position
    tokens = min(shared[_TILE_TOKENS], row_tokens - offset)
    end, queries = first + tokens, tokens * group

    most = shared[_TILE_TOKENS] * group
    q_at = shared[_ROOM] + worker * shared[_ROOM_BYTES]
    scores_at = q_at + most * head_dim * 4
    mix_at = scores_at + most * page * 4
    top, total = floats(mix_at + most * head_dim * 4, most), floats(mix_at + most * (head_dim + 1) * 4, most)
    numbers, flags = floats(shared[_NUMBERS], 2 + 2 * (heads + kv_heads)), integers(shared[_INTEGERS], 4)
    window, has_cap, has_sinks, has_slopes = np.int64(flags[0]), flags[1] != 0, flags[2] != 0, flags[3] != 0
    scale, cap = numbers[0] * numbers[2 + 2 * heads + kv_head], numbers[1]  # scores are linear in keys
    value_scale = numbers[2 + 2 * heads + kv_heads + kv_head]

    vectors, mix = floats(q_at, queries * head_dim), floats(mix_at, queries * head_dim)
    for t in range(tokens):
        given = floats(shared[_Q] + ((token + t) * heads + kv_head * group) * head_dim * 4, group * head_dim)
        for n in range(group * head_dim):
            vectors[t * group * head_dim + n] = given[n] * scale
    for n in range(queries * head_dim):
        mix[n] = _F(0)
    for m in range(queries):
        total[m] = _F(0)
        top[m] = numbers[2 + kv_head * group + m % group] if has_sinks else _LOWEST  # a score without a value

    lowest = max(first - window + 1, 0) if window > 0 else 0
    table = integers(shared[_TABLES] + 4 * row * shared[_COLUMNS], shared[_COLUMNS])
    for column in range(lowest // page, (end + page - 1) // page):
        page_head = (np.int64(table[column]) * kv_heads + kv_head) * page * head_dim * bytes_of(kind)
        begin = column * page
        keys, values = shared[_KEYS] + page_head, shared[_VALUES] + page_head
        _product(q_at, head_dim, keys, page, head_dim, scores_at, page, queries, page, False, kind)
        for m in range(queries):
            position = first + m // group
            high = min(max(position - begin + 1, 0), page)
            low = min(max(position - window + 1 - begin, 0), high) if window > 0 else 0
            scores = floats(scores_at + m * page * 4, page)
            if has_cap:
                for slot in range(low, high):
                    scores[slot] = cap * _F(math.tanh(scores[slot] / cap))
            if has_slopes:
                slope = numbers[2 + heads + kv_head * group + m % group]
                for slot in range(low, high):
                    scores[slot] += slope * _F(begin + slot - position)
            _weigh(scores_at + m * page * 4, m, page, mix_at + m * head_dim * 4, head_dim, low, high, top, total)
        # Slots past the end hold old numbers, NaN included: they are not read.
        held = min(page, end - begin)
        _product(scores_at, page, values, head_dim, held, mix_at, head_dim, queries, head_dim, True, kind)

    for m in range(queries):
        whole = total[m]
        if has_sinks:
            whole += exp(numbers[2 + kv_head * group + m % group] - top[m])
        share = _F(0) if whole == _F(0) else value_scale / whole
        n = (token + m // group) * heads + kv_head * group + m % group
        out = floats(shared[_OUT] + n * head_dim * 4, head_dim)
        for h in range(head_dim):
            out[h] = mix[m * head_dim + h] * share


@njit
def _work(state: int, kind: Any) -> None:
    shared, worker = words(state, WORDS), join(state)
    index = take(state, worker)
    while index >= 0:
        _item(shared, index, worker, kind)
        index = take(state, worker)
    leave(state)


@njit
def _call(frame: Any, kind: Any, worker: int) -> int:
    state, error = enter(frame), 0
    if state != 0:
        shared = words(state, WORDS)
        num_items = _begin(frame_of(frame), shared)
        error = launch(frame, state, num_items, shared[_ROOMS], worker)
        _work(state, kind)
    return error


@njit
def _work_float32(state: int) -> None:
    _work(state, np.float32(0))


@njit
def _work_bfloat16(state: int) -> None:
    _work(state, np.uint16(0))


@njit
def _work_int8(state: int) -> None:
    _work(state, np.int8(0))


@njit
def _work_float8_e4m3fn(state: int) -> None:
    _work(state, np.uint8(0))


@njit
def _work_float8_e5m2(state: int) -> None:
    _work(state, np.int16(0))


_float32_worker, _bfloat16_worker = c_function(_work_float32), c_function(_work_bfloat16)
_int8_worker = c_function(_work_int8)
_float8_e4m3fn_worker, _float8_e5m2_worker = c_function(_work_float8_e4m3fn), c_function(_work_float8_e5m2)


def attention_float32(frame: Any) -> int:
    """(q [T, N, H], keys, values, q_starts [R + 1], context_lens [R], block_tables [R, P], integers, numbers) ->
    (out [T, N, H], scratch), of a cache in float32.

    Integers: window or 0, whether there are a cap, sinks, slopes, then the fields of `AttentionScratch`. Numbers:
    scale, cap, sinks [N], slopes [N], and the scales of keys [K] and of values [K], which are 1 in a cache without.
    """
    return _call(frame, np.float32(0), _float32_worker())


def attention_bfloat16(frame: Any) -> int:
    """`attention_float32` of a cache in bfloat16."""
    return _call(frame, np.uint16(0), _bfloat16_worker())


def attention_int8(frame: Any) -> int:
    """`attention_float32` of a cache in int8."""
    return _call(frame, np.int8(0), _int8_worker())


def attention_float8_e4m3fn(frame: Any) -> int:
    """`attention_float32` of a cache in float8_e4m3fn."""
    return _call(frame, np.uint8(0), _float8_e4m3fn_worker())


def attention_float8_e5m2(frame: Any) -> int:
    """`attention_float32` of a cache in float8_e5m2."""
    return _call(frame, np.int16(0), _float8_e5m2_worker())
