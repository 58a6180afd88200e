"""Launches of Triton kernels that end up in a function instead of on a GPU, for a GPU that is not there."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class AbsentGpu(CudaDriver):  # type: ignore[misc]  # triton has no types
    """The calls that Triton makes to a driver before it compiles."""

    def __init__(self) -> None:
        """Loads no CUDA library, unlike the driver of a GPU that is there."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def launches_go_to(take: Callable[..., None]) -> Iterator[None]:
    """`take(run, kernel, *args, grid, warmup, **options)` gets every launch; `run` is how Triton would launch it."""
    plain = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> None:
        take(plain, self, *args, **options)

    driver.set_active(AbsentGpu())
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = plain
