"""Keeps freed memory in the process, because every training step frees and allocates the same megabytes."""

from __future__ import annotations

import ctypes
import functools

# glibc's names and numbers, from its malloc.h
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
MAX_BLOCK_BYTES = 32 * 2**20  # the limit of glibc; larger blocks always come from the system


@functools.cache
def keep_freed_memory() -> bool:
    """Lets the C library keep freed memory, and returns whether it allows that.

    Otherwise every tensor of about a megabyte is fetched from the system page by page and returned at once, which takes
    a third of the time of a step.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # the C library is not glibc
    parameters = ((MMAP_THRESHOLD, MAX_BLOCK_BYTES), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2 * MAX_BLOCK_BYTES))
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) == 1 for name, value in parameters)
