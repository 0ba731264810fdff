"""`give_back_free_memory`: what was freed between blocks that are held leaves the process."""

import ctypes
import os
from pathlib import Path

import pytest

from jaxserve.engine.free_memory import give_back_free_memory

LIBC = ctypes.CDLL(None)
SIZE, COUNT = 100_000, 2000  # smaller than what the allocator takes from the system one by one


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not hasattr(LIBC, "malloc_trim"), reason="needs glibc")
def test_freed_blocks_below_one_that_is_held_are_given_back() -> None:
    LIBC.malloc.restype = LIBC.memset.restype = ctypes.c_void_p
    blocks = [ctypes.c_void_p(LIBC.malloc(ctypes.c_size_t(SIZE))) for _ in range(COUNT)]
    for block in blocks:
        LIBC.memset(block, 1, ctypes.c_size_t(SIZE))
    held = blocks.pop()
    for block in blocks:
        LIBC.free(block)
    before = resident_bytes()
    give_back_free_memory()
    assert before - resident_bytes() > SIZE * COUNT / 2
    LIBC.free(held)
