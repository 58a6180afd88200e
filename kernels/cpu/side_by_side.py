"""Work of one thread per item, done on as many threads as torch computes with."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

from kernels.cpu.library import native_kernels

ResultT = TypeVar("ResultT")


def results_in_order(tasks: Iterable[Callable[[], ResultT]]) -> Iterator[ResultT]:
    """Yield the results of `tasks`, several of which are computed at once, on one thread each.

    The caller's thread takes the next tasks out of the iterable meanwhile, at most two ahead for each thread.
    """
    num_threads, kernels = torch.get_num_threads(), native_kernels()
    if kernels is None or num_threads == 1:
        yield from (task() for task in tasks)
        return
    inference = torch.is_inference_mode_enabled()

    def compute(task: Callable[[], ResultT]) -> ResultT:
        with torch.inference_mode(inference):
            return task()

    begun: deque[Future[ResultT]] = deque()
    with ThreadPoolExecutor(num_threads, initializer=kernels.compute_alone) as pool:
        for task in tasks:
            begun.append(pool.submit(compute, task))
            if len(begun) > 2 * num_threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
