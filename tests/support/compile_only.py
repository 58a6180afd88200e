"""Compiles Triton kernels for a GPU that is not there, with the assembler that Triton brings, and launches nothing.

`python -m tests.support.compile_only SET... [--capability 90]` compiles the launches of sets of
`tests.support.compile_cases`, named by their functions, for a compute capability, and prints one line per kernel. It
has to run in a process of its own, without TRITON_INTERPRET.
"""

import argparse
import contextlib
import re
import subprocess
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import triton

from kernels.gpu.device import Multiprocessor
from tests.support import compile_cases
from tests.support.caught_launches import launches_go_to
from tests.support.recorded_gpus import HOPPER, SHARED_BYTES

# By name: what the assembly has of a kernel that multiplies by warpgroups, by warps, FP8 by FP8, or copies whole boxes.
INSTRUCTIONS = {
    "wgmma": "wgmma.mma_async",
    "mma": "mma.sync",
    "of_fp8": ".e4m3.e4m3",
    "tensor_copies": "cp.async.bulk.tensor",
}


@contextlib.contextmanager
def compiled_for(capability: int) -> Iterator[list[str]]:
    """Yield a list that fills with a line per kernel "launched" meanwhile; outputs of kernels stay as they are."""
    found: list[str] = []

    def compile_it(run: Any, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.append(description(run(kernel, *args, grid=grid, warmup=True, **options)))

    with launches_go_to(compile_it, capability):
        yield found


def description(kernel: Any) -> str:
    """A kernel's name and, as name=number, its resources, the instructions it has (1) or not (0) and a checksum.

    Registers and stack are as the assembler reports them; a stack means that registers were spilled.
    """
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage is not None, report
    registers, stack = usage.groups()
    metadata, assembly = kernel.metadata, kernel.asm["ptx"]
    numbers = {"registers": registers, "stack": stack, "shared": metadata.shared, "warps": metadata.num_warps}
    numbers |= {name: int(instruction in assembly) for name, instruction in INSTRUCTIONS.items()}
    numbers["checksum"] = zlib.crc32(assembly.encode())
    return f"{metadata.name} " + " ".join(f"{name}={number}" for name, number in numbers.items())


def main(sets: list[str], capability: int) -> None:
    multiprocessor = Multiprocessor.of(divmod(capability, 10), SHARED_BYTES[capability])
    for name in sets:
        for case, launch in getattr(compile_cases, name)(multiprocessor):
            with compiled_for(capability) as found:
                launch()
            for line in found:
                print(f"{case}: {line}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("sets", nargs="+")
    parser.add_argument("--capability", type=int, choices=SHARED_BYTES, default=HOPPER)
    main(**vars(parser.parse_args()))
