"""Memory that the allocator of C keeps: what was freed, and may be wanted again."""

import ctypes


def give_back_free_memory() -> None:
    """Gives it back to the system, where the C library can (glibc); elsewhere nothing happens. Any thread.

    Takes milliseconds, in which other threads run. Blocks of several megabytes that come and go leave holes in each of
    the allocator's arenas, of which it has eight for each processor, and by itself it gives back only the end of one.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
