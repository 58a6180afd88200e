"""Launches of Triton kernels that end up in a function instead of on a GPU, for a GPU that is not there."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.support.recorded_gpus import HOPPER


class AbsentGpu(CudaDriver):  # type: ignore[misc]  # triton has no types
    """The calls that Triton makes to a driver before it compiles. capability: as Triton writes it, 90 for 9.0."""

    def __init__(self, capability: int) -> None:
        """Loads no CUDA library, unlike the driver of a GPU that is there."""
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def launches_go_to(take: Callable[..., None], capability: int = HOPPER) -> Iterator[None]:
    """`take(run, kernel, *args, grid, warmup, **options)` gets every launch; `run` is how Triton would launch it."""
    plain = JITFunction.run

    def run(self: Any, *args: Any, **options: Any) -> None:
        take(plain, self, *args, **options)

    driver.set_active(AbsentGpu(capability))
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = plain
