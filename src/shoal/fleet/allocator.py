"""Freed memory stays with the process: training frees and asks for the same megabytes at every step."""

from __future__ import annotations

import ctypes
import functools

# glibc's names and numbers, from its malloc.h
TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3
MAX_BLOCK_BYTES = 32 * 2**20  # glibc takes no more; larger blocks come from the system each time


@functools.cache
def keep_freed_memory() -> bool:
    """True where the C library allows it. Without it, every tensor of a megabyte or so is fetched from the system
    page by page and given back at once: a third of the time of a step."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False  # not glibc
    asked = ((MMAP_THRESHOLD, MAX_BLOCK_BYTES), (TRIM_THRESHOLD, 2**31 - 1), (TOP_PAD, 2 * MAX_BLOCK_BYTES))
    return all(mallopt(ctypes.c_int(what), ctypes.c_int(value)) == 1 for what, value in asked)
