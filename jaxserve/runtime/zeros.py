"""Zeros on a CPU that take no memory before they are used.

One function for XLA, called through its foreign function interface, leaves its result as the system gives it.
`jnp.zeros` writes every byte, and with it a KV cache of gigabytes is resident, and seconds are spent, before the first
request; Linux gives zeroed pages for free, each when it is first touched. Donation keeps the array where it is, so
pages that no sequence has used stay free memory. (An array from outside, such as `np.zeros` by `jax.device_put`, is
copied by the first executable that it is donated to.)
"""

import ctypes
import functools
import math
import mmap
import sys
from typing import Any

import jax
import numpy as np

from jaxserve.kernels.cpu import machine_code

_TARGET = "jaxserve_fresh_zeros"
_DONTNEED = 4  # Linux: the pages are given back, and are zeros when they are touched again

# Words of eight bytes in the structures of jaxlib's `xla/ffi/api/c_api.h`, as in `kernels.cpu.call`.
_FRAME_EXTENSION, _FRAME_API, _FRAME_OPERANDS, _FRAME_RESULTS = 1, 2, 9, 14
_EXTENSION_METADATA, _METADATA_VERSION, _API_VERSION, _BUFFER_DATA = 3, 3, 4, 3


def can_be_fresh() -> bool:
    """Whether this system and this jaxlib support `fresh_zeros`."""
    return sys.platform == "linux" and machine_code.knows_interface()


def fresh_zeros(shape: tuple[int, ...], dtype: np.dtype) -> jax.Array:
    """Zeros, for use in a function that is compiled for one CPU device. Needs `register` in each process."""
    num_bytes = math.prod(shape) * dtype.itemsize
    # Two calls for equal shapes would be one whose result is copied, were they not said to have an effect.
    call = jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(shape, dtype), has_side_effect=True)
    return call(np.array([num_bytes & 0xFFFFFFFF, num_bytes >> 32], np.uint32))


@functools.cache  # XLA keeps only the address: the registered function must live as long as the process
def register() -> Any:
    """Makes the function known to XLA, before an executable that calls it is compiled, or read, and run."""
    handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_handle)
    address = ctypes.cast(handler, ctypes.c_void_p)
    jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(address), platform="cpu")
    return handler


def _handle(frame: int) -> None:
    """Handles one call of XLA's. None means success."""
    extension = _word(frame, _FRAME_EXTENSION)
    if extension:  # asked which version of the interface this is: that of the caller
        metadata = _word(extension, _EXTENSION_METADATA)
        version = _word(_word(frame, _FRAME_API), _API_VERSION)
        ctypes.c_int64.from_address(metadata + 8 * _METADATA_VERSION).value = version
        return
    size, result = (_word(_word(_word(frame, buffers)), _BUFFER_DATA) for buffers in (_FRAME_OPERANDS, _FRAME_RESULTS))
    make_zero(result, _word(size))


def make_zero(address: int, num_bytes: int) -> None:
    """Zeros memory of this process, whole pages of it without touching them."""
    begin = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + num_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if begin >= end or madvise(begin, end - begin, _DONTNEED) != 0:  # locked, or of huge pages: it must be written
        ctypes.memset(address, 0, num_bytes)
        return
    ctypes.memset(address, 0, begin - address)
    ctypes.memset(end, 0, address + num_bytes - end)


def _word(address: int, index: int = 0) -> int:
    return ctypes.c_int64.from_address(address + 8 * index).value
