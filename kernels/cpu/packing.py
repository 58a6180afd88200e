"""Room for packed weights, and the threads that pack them."""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

_HUGE_PAGE = 2**21
# Bytes of addresses that small weights share. Pages are taken when they are first written, so the unused end of a chunk
# costs nothing but the rest of a huge page: of chunks of 64 MiB the ends were 2.5 % of the experts of a model.
_CHUNK_BYTES = 2**30
_LARGE_BYTES = 2**24  # A weight of more bytes has a mapping of its own.
_ALIGNMENT = 64
# Without this flag Linux refuses to fork a process whose neighbouring mappings together exceed the machine's memory,
# touched or not. Python names it from 3.13 on.
_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


class WeightMemory:
    """Keeps weights in huge pages, from which a processor reads up to 1.7 times as fast as from small ones.

    The memory of a weight is freed with the last weight of its chunk.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, size: int) -> Tensor:
        """Return room for packed bytes, uint8 [size]."""
        if size > _LARGE_BYTES:
            return _huge_pages(size)
        if self._used + size > self._chunk.numel():
            self._chunk, self._used = _huge_pages(_CHUNK_BYTES), 0
        taken = self._chunk[self._used : self._used + size]
        self._used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return taken


def _huge_pages(num_bytes: int) -> Tensor:
    """Return uint8 [num_bytes] from the start of a huge page on. Pages are taken when they are first written."""
    # Private: an expert that is replaced in a forked copy of the process stays what it was in the others.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    memory = mmap.mmap(-1, num_bytes + _HUGE_PAGE, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    start = -whole.data_ptr() % _HUGE_PAGE
    return whole[start : start + num_bytes]


ResultT = TypeVar("ResultT")


def results_in_order(
    tasks: Iterable[Callable[[], ResultT]], num_threads: int, begin: Callable[[], None] | None = None
) -> Iterator[ResultT]:
    """Yield the results of `tasks` in order. Several are computed at once, each on one thread that runs `begin` first.

    The caller's thread takes the next tasks out of the iterable meanwhile, at most two ahead for each thread. The
    threads have ended when the iterator has, so that the process may be forked then.
    """
    if num_threads == 1:
        yield from (task() for task in tasks)
        return
    inference, device = torch.is_inference_mode_enabled(), torch.get_default_device()
    there = nullcontext() if device.type == "cpu" else device

    def compute(task: Callable[[], ResultT]) -> ResultT:
        with torch.inference_mode(inference), there:
            return task()

    begun: deque[Future[ResultT]] = deque()
    with ThreadPoolExecutor(num_threads, initializer=begin) as pool:
        for task in tasks:
            begun.append(pool.submit(compute, task))
            if len(begun) > 2 * num_threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
