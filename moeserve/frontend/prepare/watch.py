"""The bounds of a process that works on text: processor time and memory for each stage of a job.

Templates, grammars and the libraries that read them can spin or swell where nothing of Python runs, so a stage that
exceeds its time ends the process by a signal, and one that exceeds its memory fails an allocation. Which stage it was
stands in a page that the process shares with the event loop.

By itself the C library's allocator keeps the memory that big bodies took, in one pool for each core.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import signal
from enum import IntEnum
from pathlib import Path

from moeserve.frontend.errors import ApiError, internal_error, invalid
from moeserve.frontend.limits import GRAMMAR_CPU_SECONDS, RENDER_CPU_SECONDS

PAGE_BYTES = 4096
_STATM = Path("/proc/self/statm")
_MOST_FIELD_BYTES = 256

# Options of glibc's `mallopt`: M_MMAP_THRESHOLD, M_TRIM_THRESHOLD (bytes) and M_ARENA_MAX.
_SETTINGS = ((-3, 256 * 1024), (-1, 2 * 2**20), (-8, 2))


class Stage(IntEnum):
    """The parts of a job. LOCATE looks for the place of an error in a schema."""

    READ = 0
    RENDER = 1
    ENCODE = 2
    GRAMMAR = 3
    LOCATE = 4
    IDLE = 5


# Seconds of processor time: for each stage, and for each character of its input.
_CPU_SECONDS = {
    Stage.READ: (1.0, 2e-6),
    Stage.RENDER: (RENDER_CPU_SECONDS, 0.0),
    Stage.ENCODE: (1.0, 5e-6),
    Stage.GRAMMAR: (GRAMMAR_CPU_SECONDS, 0.0),
    Stage.LOCATE: (1.0, 0.0),
}
_RENDER_BYTES = 512 * 2**20  # bytes that rendering may map beyond the process's own
_OTHER_BYTES = 4 * 2**30  # bytes that any other stage may map beyond the process's own at its start


class Watch:
    """The bounds of this process, or none: the event loop does work of few characters by the same code."""

    def __init__(self, page: mmap.mmap | None = None) -> None:
        """page: where the stage is noted; None where nothing is bounded."""
        self._page = page
        self._most_bytes = 0 if page is None else address_space() + _OTHER_BYTES

    def enter(self, stage: Stage, num_chars: int = 0, field: str = "") -> None:
        """Begin a stage that goes through a number of characters. field: of the request, for the refusal."""
        if self._page is None:
            return
        name = field.encode("utf-8", "replace")[:_MOST_FIELD_BYTES]
        self._page[: 3 + len(name)] = bytes((stage, len(name) > 0)) + name + b"\0"
        limit_memory(address_space() + _RENDER_BYTES if stage is Stage.RENDER else self._most_bytes)
        base, each = _CPU_SECONDS[stage]
        limit_cpu(base + each * num_chars)

    def leave(self) -> None:
        """End the stages of a job."""
        if self._page is not None:
            limit_cpu(0)
            self._page[0] = Stage.IDLE

    def refusal(self) -> ApiError:
        """Return the error of a job whose latest stage took too much memory."""
        return internal_error() if self._page is None else refusal(self._page[:])


def refusal(page: bytes) -> ApiError:
    """Return the error of a job that took too much, by the page of its process."""
    field = page[2:].partition(b"\0")[0].decode("utf-8", "replace") if page[1] else None
    match page[0]:
        case Stage.RENDER:
            return invalid("The chat template takes too long for these messages, or too much memory", "messages")
        case Stage.GRAMMAR | Stage.LOCATE:
            return invalid(f"Invalid value for `{field}`: it takes too long to compile", field)
        case _:
            return invalid("The request takes too long to read, or too much memory", code="too_many_values")


def least_seconds(page: bytes) -> float:
    """Return the seconds that the latest stage may take at least, by the page of its process."""
    return _CPU_SECONDS[Stage(page[0])][0]


def limit_cpu(seconds: float) -> None:
    """End this process by SIGPROF after this number of further seconds of processor time; 0 removes the limit."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def address_space() -> int:
    """Return the bytes that this process has mapped."""
    return int(_STATM.read_text().split()[0]) * resource.getpagesize()


def limit_memory(num_bytes: int) -> None:
    """Let this process map at most this number of bytes, until the next call."""
    resource.setrlimit(resource.RLIMIT_AS, (num_bytes, resource.RLIM_INFINITY))


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
