"""Compiles Triton kernels for a GPU that is not there, with the assembler that Triton brings, and launches nothing.

`compiled_for_sm90()` catches every launch inside it. A module of cases has `calls()`, which yields (name, function);
`python -m tests.support.compile_only MODULE...` compiles what each function launches and prints one line per kernel.
It has to run in a process of its own, without TRITON_INTERPRET.
"""

import contextlib
import importlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import triton

from tests.support.caught_launches import launches_go_to
from tests.support.machine_code import code_of


@dataclass(frozen=True)
class Compiled:
    name: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    ptx: str
    code: dict[str, int]

    @property
    def instructions(self) -> dict[str, int]:
        """How often each instruction that computes with matrices or copies whole boxes stands in the assembly."""
        names = {"wgmma": "wgmma.mma_async", "mma": "mma.sync", "tensor_copies": "cp.async.bulk.tensor"}
        return {name: self.ptx.count(instruction) for name, instruction in names.items()}


@contextlib.contextmanager
def compiled_for_sm90() -> Iterator[list[Compiled]]:
    """Yields a list that fills with the kernels that are "launched" meanwhile; their outputs stay as they are."""
    found: list[Compiled] = []

    def compile_it(run, kernel, *args, grid, warmup, **options):
        found.append(inspect_kernel(run(kernel, *args, grid=grid, warmup=True, **options)))

    with launches_go_to(compile_it):
        yield found


def inspect_kernel(kernel) -> Compiled:
    """Registers and stack as the assembler reports them; a stack means that registers were spilled."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", report).groups()
    metadata = kernel.metadata
    return Compiled(
        metadata.name,
        int(registers),
        int(stack),
        metadata.shared,
        metadata.num_warps,
        kernel.asm["ptx"],
        code_of(kernel.asm["cubin"]).summary(),
    )


def main(modules: list[str]) -> None:
    for module in modules:
        for case, call in importlib.import_module(module).calls():
            with compiled_for_sm90() as found:
                call()
            for kernel in found:
                print(
                    f"{case}: {kernel.name} registers={kernel.registers} stack={kernel.stack_bytes} "
                    f"shared={kernel.shared_bytes} warps={kernel.num_warps} "
                    + " ".join(f"{name}={count}" for name, count in (kernel.instructions | kernel.code).items())
                )


if __name__ == "__main__":
    main(sys.argv[1:])
