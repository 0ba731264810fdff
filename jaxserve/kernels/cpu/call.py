"""XLA's foreign function interface, from Numba: how XLA calls a kernel, and how one call is spread over all cores.

The C structures that are read are those of jaxlib's `xla/ffi/api/c_api.h`, versions 0.3 and 0.4. A call is split into
work items that threads of XLA's own pool take one by one; a kernel says what an item is.

A call returns a future and never waits: the pool may have one thread, or all of its threads may be in calls like this
one; a call that waited for others of the pool could wait for ever. So a call starts workers, works itself, and returns;
the worker that completes the last item reports that the result is there. A worker that the system wakes too late for
any item delays nothing. It finds the state of its call, which lies in memory of its own until the last worker has
ended; operands, results and scratch arrays are XLA's again as soon as the result is reported, and such a worker does
not touch them.
"""

from typing import Any

import numpy as np
from numba import njit
from numba.np.numpy_support import carray

from jaxserve.kernels.cpu.scratch import FIRST_WORD, MAX_WORKERS, SHARES, TAKEN, TURNS, WORDS
from jaxserve.kernels.cpu.simd import address_of, allocate, call_function, fetch_add, pointer, release

# Words of the state that this module uses.
_ENDED, _WORKERS, _ITEMS, _FUTURE, _SET_AVAILABLE, _TICKETS, _COMPLETED, _ERROR = range(8)
_BEGIN_CALL, _SET_ERROR, _END_CALL = 8, 14, 16  # arguments of calls back into XLA, and one more function of it
assert _END_CALL + 4 <= FIRST_WORD

# Offsets in words of eight bytes, from the C header; its structures only grow at their ends.
_FRAME_EXTENSION, _FRAME_API, _FRAME_CONTEXT, _FRAME_OPERANDS, _FRAME_RESULTS, _FRAME_FUTURE = 1, 2, 3, 9, 14, 21
_EXTENSION_METADATA, _METADATA_VERSION = 3, 3
_API_VERSION, _API_SCHEDULE, _API_NUM_THREADS, _API_FUTURE, _API_SET_AVAILABLE, _API_SET_ERROR = 4, 17, 18, 19, 20, 21
_BUFFER_DATA, _BUFFER_SIZES = 3, 5


@njit
def words(address: int, count: int) -> Any:
    """The 64-bit integers at an address."""
    return carray(pointer(address), (count,), np.int64)


@njit
def integers(address: int, count: int) -> Any:
    """The 32-bit integers at an address."""
    return carray(pointer(address), (count,), np.int32)


@njit
def floats(address: int, count: int) -> Any:
    """The float32 numbers at an address."""
    return carray(pointer(address), (count,), np.float32)


@njit
def frame_of(frame_pointer: Any) -> Any:
    """The words of a call's frame."""
    return words(address_of(frame_pointer), _FRAME_FUTURE + 1)


@njit
def operand(frame: Any, index: int) -> int:
    """Address of an operand's numbers."""
    return words(words(frame[_FRAME_OPERANDS], index + 1)[index], 6)[_BUFFER_DATA]


@njit
def size_of(frame: Any, index: int, axis: int) -> int:
    """Size of an operand's axis."""
    return words(words(words(frame[_FRAME_OPERANDS], index + 1)[index], 6)[_BUFFER_SIZES], axis + 1)[axis]


@njit
def result(frame: Any, index: int) -> int:
    """Address of a result's numbers."""
    return words(words(frame[_FRAME_RESULTS], index + 1)[index], 6)[_BUFFER_DATA]


@njit
def enter(frame_pointer: Any) -> int:
    """Begins every call. Returns the address of its state, zeros, or 0 if nothing is to be run."""
    frame = frame_of(frame_pointer)
    if frame[_FRAME_EXTENSION] != 0:  # XLA asks for the version of the interface: it is the caller's
        metadata = words(words(frame[_FRAME_EXTENSION], 4)[_EXTENSION_METADATA], 4)
        metadata[_METADATA_VERSION] = words(frame[_FRAME_API], _API_VERSION + 1)[_API_VERSION]
        return 0
    return allocate(8 * WORDS)


@njit
def leave(state: int) -> None:
    """Ends a worker. The state is not read from then on: the last one gives it back."""
    workers = words(state, WORDS)[_WORKERS]
    if fetch_add(state + 8 * _ENDED, 1) + 1 == workers:
        release(state)


@njit
def launch(frame_pointer: Any, state: int, num_items: int, most_workers: int, worker_address: int) -> int:
    """Starts all workers but the one that the caller is to be; `worker_address` is of a C function of `state`.

    XLA's pool may have more threads than the machine has cores: `most_workers`: for which a scratch array has room.
    Returns what the kernel must return when its own work is done: 0, or the error of XLA's that fails the step under
    XLA's own message. Without a future the caller works alone, since operands are its own only until it returns. Where
    XLA refuses a worker, the others take its items, and the last of them reports the error in place of the result: XLA
    would free what they work on if it knew earlier.
    """
    frame, shared = frame_of(frame_pointer), words(state, WORDS)
    api = words(frame[_FRAME_API], _API_SET_ERROR + 1)
    arguments = state + 8 * _BEGIN_CALL
    call = words(arguments, 6)
    call[0], call[2], call[3], call[5] = 32, frame[_FRAME_CONTEXT], arguments + 40, 1
    error = call_function(api[_API_NUM_THREADS], arguments)
    if error != 0:
        shared[_ITEMS], shared[_WORKERS] = num_items, 1
        return error
    workers = max(min(call[5], num_items, most_workers, MAX_WORKERS), 1)
    shared[_ITEMS], shared[_WORKERS] = num_items, workers
    if workers > 1:
        call[0], call[2] = 24, 0
        error = call_function(api[_API_FUTURE], arguments)
        if error != 0:
            shared[_WORKERS] = 1
            return error
        shared[_FUTURE], shared[_SET_AVAILABLE] = call[2], api[_API_SET_AVAILABLE]
        shared[_SET_ERROR] = api[_API_SET_ERROR]
        frame[_FRAME_FUTURE] = call[2]
        call[0], call[2], call[3], call[4] = 40, frame[_FRAME_CONTEXT], worker_address, state
        for _ in range(workers - 1):
            if shared[_ERROR] == 0:
                shared[_ERROR] = call_function(api[_API_SCHEDULE], arguments)
            if shared[_ERROR] != 0:
                leave(state)  # in its place; the caller has not left, so that this ends nothing
    return 0


@njit
def join(state: int) -> int:
    """A worker's number, from 0."""
    return fetch_add(state + 8 * _TICKETS, 1)


@njit
def take(state: int, worker: int) -> int:
    """Takes a free item, or -1. The worker has completed the items that it took before.

    Its own share comes first: its items are adjacent, for the prefetcher.
    """
    shared = words(state, WORDS)
    count, workers = shared[_ITEMS], shared[_WORKERS]
    while shared[TURNS + worker] < workers:
        owner = (worker + shared[TURNS + worker]) % workers
        index = owner * count // workers + fetch_add(state + 8 * (SHARES + owner), 1)
        if index < (owner + 1) * count // workers:
            shared[TAKEN + worker] += 1
            return index
        shared[TURNS + worker] += 1
    _complete(state, shared[TAKEN + worker])
    return -1


@njit
def _complete(state: int, items: int) -> None:
    """Counts items of a worker that finds no more. With the last ones, XLA is told that the result is there, or of the
    error that `launch` met."""
    shared = words(state, WORDS)
    if items > 0 and fetch_add(state + 8 * _COMPLETED, items) + items == shared[_ITEMS] and shared[_FUTURE] != 0:
        arguments = state + 8 * _END_CALL
        call = words(arguments, 4)
        call[0], call[2], call[3] = 24, shared[_FUTURE], shared[_ERROR]
        if shared[_ERROR] != 0:
            call[0] = 32
            call_function(shared[_SET_ERROR], arguments)
        else:
            call_function(shared[_SET_AVAILABLE], arguments)
