"""Compiles Triton kernels for a GPU that is not there, in a process without the interpreter.

The compiler and the assembler come with Triton; only running a kernel needs a device. Host functions are called with
tensors on the meta device, which have shapes but no memory, and every launch becomes a compilation.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

HOPPER = 90


@dataclass(frozen=True)
class Compiled:
    """Resources per program: shared memory in bytes, registers and bytes of spilled stack per thread."""

    name: str
    shared: int
    registers: int
    stack: int
    ptx: str


class _AbsentGpu:
    """What Triton asks of a driver up to the launch."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int = HOPPER) -> Iterator[list[Compiled]]:
    """Within, launches of Triton kernels compile and append to the list that this yields."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        compiled.append(_resources(self.fn.__name__, kernel))
        return kernel

    JITFunction.run = compile_only
    driver.set_active(_AbsentGpu(capability))
    try:
        yield compiled
    finally:
        JITFunction.run = run


def _resources(name: str, kernel: Any) -> Compiled:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    fields = dict(re.findall(r"([A-Z]+):(\d+)", usage.stdout))
    return Compiled(name, kernel.metadata.shared, int(fields["REG"]), int(fields["STACK"]), kernel.asm["ptx"])
