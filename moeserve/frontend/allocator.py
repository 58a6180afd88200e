"""The C library's allocator, told to give memory back: by itself it keeps what big bodies took, in one pool per core.

Where there is no such library, nothing is done.
"""

from __future__ import annotations

import ctypes

# Of glibc's `mallopt`: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD and M_ARENA_MAX.
_SETTINGS = ((-3, 256 * 1024), (-1, 2 * 2**20), (-8, 2))


def bound_pools() -> None:
    """Have big blocks mapped, each by itself, and two pools for all threads. Call this before threads allocate."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in _SETTINGS:
            mallopt(option, value)


def give_back() -> None:
    """Return free memory to the system, which takes some milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
