"""B (A x) of the tokens that have an adapter, inside the product to which it is added: for `kernels.packed_low_rank`.

The workers of a call first make A x of all these tokens together, then each adds B times that to the panels that it
multiplies, while they are in the processor's cache. Tokens of one slot make blocks, which read its weights once; slots
that no token has are not read. Where no token has an adapter there are no blocks, and nothing is done.
"""

from typing import Any

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from jaxserve.kernels.cpu.call import floats, integers, operand, result, size_of
from jaxserve.kernels.cpu.scratch import LOW_RANK
from jaxserve.kernels.cpu.simd import bytes_of, fetch_add, gathered_product, pointer
from jaxserve.kernels.cpu.target import find_target

_TARGET = find_target()
_WIDTH, _HALF, BLOCK_TOKENS = _TARGET.width, _TARGET.width // 2, _TARGET.row_steps[0]
_whole, _half = (gathered_product(_TARGET, vectors) for vectors in (_TARGET.vectors, _TARGET.vectors // 2))
_NEAR = 1024  # bytes between what is read of A and what is fetched

# Words of a call that belong to this module, behind those of its kernel and of `gating`.
(_X, _DEPTH, _DOWN, _UP, _PARTS, _INNER, _TOKENS, _BLOCKS, _NUM_BLOCKS) = range(LOW_RANK, LOW_RANK + 9)
(_STRIPS, _RANK, _PANELS, _BEGUN, _ENDED) = range(LOW_RANK + 9, LOW_RANK + 14)


@njit
def begin_low_rank(frame: Any, shared: Any, index: int) -> None:
    """Reads operand `index` and those behind it, as `PackedLowRank.operands` gives them, and lists the blocks of
    tokens, in the second result."""
    shared[_X], shared[_DOWN], shared[_UP] = operand(frame, 0), operand(frame, index + 1), operand(frame, index + 2)
    shared[_PARTS] = operand(frame, index + 3)
    slots, strips, depth = size_of(frame, index + 1, 0), size_of(frame, index + 1, 1), size_of(frame, index + 1, 2)
    shared[_STRIPS], shared[_DEPTH] = strips, depth
    shared[_PANELS], shared[_RANK] = size_of(frame, index + 2, 1), size_of(frame, index + 2, 2)
    begins, scratch = integers(operand(frame, index + 4), 2), result(frame, 1)
    shared[_INNER], shared[_TOKENS], shared[_BLOCKS] = scratch, scratch + begins[0], scratch + begins[1]
    tokens = size_of(frame, index, 0)
    of_token, order = integers(operand(frame, index), tokens), integers(shared[_TOKENS], tokens)
    left = 0
    for token in range(tokens):
        left += 1 if of_token[token] != 0 else 0
    blocks = integers(shared[_BLOCKS], 3 * (tokens // BLOCK_TOKENS + min(tokens, slots)))
    count, placed = 0, 0
    for slot in range(1, slots):
        if placed == left:
            break
        first = placed
        for token in range(tokens):
            if of_token[token] == slot:
                order[placed] = token
                placed += 1
        for begin in range(first, placed, BLOCK_TOKENS):
            blocks[3 * count], blocks[3 * count + 1] = slot, begin
            blocks[3 * count + 2] = min(placed - begin, BLOCK_TOKENS)
            count += 1
    shared[_NUM_BLOCKS] = count


@njit
def multiply_down(state: int, shared: Any, kind: Any) -> None:
    """A x of all blocks, with the other workers of the call. A part that a worker has begun it ends, whatever the
    others do, so that waiting for it is safe. A part is a block of tokens and a strip of A, of numbers like `kind`."""
    strips, depth = shared[_STRIPS], shared[_DEPTH]
    parts = shared[_NUM_BLOCKS] * strips
    if parts == 0:
        return
    line = _HALF * bytes_of(kind)
    part = fetch_add(state + 8 * _BEGUN, 1)
    while part < parts:
        block, strip = integers(shared[_BLOCKS] + part // strips * 12, 3), part % strips
        slot, first, rows = np.int64(block[0]), np.int64(block[1]), np.int64(block[2])
        down = shared[_DOWN] + (slot * strips + strip) * depth * line
        inner, order = shared[_INNER] + strip * _HALF * 4, shared[_TOKENS] + first * 4
        ahead = down + _NEAR
        _half(shared[_X], depth, down, _HALF, depth, inner, strips * _HALF, order, rows, False, ahead, line, kind)
        fetch_add(state + 8 * _ENDED, 1)
        part = fetch_add(state + 8 * _BEGUN, 1)
    while fetch_add(state + 8 * _ENDED, 0) < parts:
        pass


@njit
def add_up(shared: Any, panel: int, out: int, stride: int, kind: Any) -> None:
    """Adds B (A x) to the products with a panel, float32 at `out`, `stride` numbers from token to token. B has numbers
    like `kind`. The next panel of B is fetched meanwhile: it is too short for the processor to expect it."""
    rank, columns, line = shared[_RANK], shared[_STRIPS] * _HALF, _WIDTH * bytes_of(kind)
    parts = integers(shared[_PARTS] + panel * 8, 2)
    left, right = np.int64(parts[0]), np.int64(parts[1])
    for number in range(shared[_NUM_BLOCKS]):
        block = integers(shared[_BLOCKS] + number * 12, 3)
        slot, rows, order = np.int64(block[0]), np.int64(block[2]), shared[_TOKENS] + np.int64(block[1]) * 4
        up = shared[_UP] + (slot * shared[_PANELS] + panel) * rank * line
        ahead = up + rank * line
        if left == right and left >= 0:
            inner = shared[_INNER] + left * rank * 4
            _whole(inner, columns, up, _WIDTH, rank, out, stride, order, rows, True, ahead, line, kind)
            continue
        for half in range(2):
            part, shift = right if half == 1 else left, half * _HALF
            own, place = up + shift * bytes_of(kind), out + shift * 4
            if part >= 0:
                inner, further = shared[_INNER] + part * rank * 4, ahead + shift * bytes_of(kind)
                _half(inner, columns, own, _WIDTH, rank, place, stride, order, rows, True, further, line, kind)
            else:
                _add_mixed(shared, panel * _WIDTH + shift, own, place, stride, order, rows, kind)


@njit
def _add_mixed(shared: Any, column: int, up: int, out: int, stride: int, order: int, rows: Any, kind: Any) -> None:
    """Of half a panel whose columns belong to several parts, as of heads that are shorter than it; the first is
    `column` of all."""
    rank, columns = shared[_RANK], shared[_STRIPS] * _HALF
    parts = integers(shared[_PARTS] + (2 * shared[_PANELS] + column) * 4, _HALF)
    tokens = integers(order, rows)
    for row in range(rows):
        token: Any = np.int64(tokens[row])
        inner, sums = floats(shared[_INNER] + token * columns * 4, columns), floats(out + token * stride * 4, _HALF)
        for index in range(_HALF):
            first, total = np.int64(parts[index]) * rank, np.float32(0)
            for depth in range(rank):
                total += inner[first + depth] * _number(up, depth * _WIDTH + index, kind)
            sums[index] += total


@njit
def _number(address: int, index: int, kind: Any) -> Any:
    """A number like `kind`, as float32: a bfloat16 is the upper half of one."""
    if bytes_of(kind) == 4:
        return floats(address, index + 1)[index]
    short = carray(pointer(address), (index + 1,), np.uint16)[index]
    return np.uint32(np.uint32(short) << np.uint32(16)).view(np.float32)
