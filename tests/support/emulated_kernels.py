"""The kernels of another processor, run by an emulator beside the process that tests them.

`python -m tests.support.emulated_kernels TARGET MODULE ARGUMENTS` runs a module, as pytest, with them.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from ctypes import c_double, memmove
from pathlib import Path

from kernels.cpu import library
from kernels.cpu.build import build_library
from kernels.cpu.targets import TARGETS

COMPILER, EMULATOR, SYSTEM = "aarch64-linux-gnu-g++", "qemu-aarch64", "/usr/aarch64-linux-gnu"
_SOURCE = Path(__file__).with_name("emulated.cpp")
_PAGE, _INTEGERS, _REALS = 4096, 20, 4
_NUMBER = -(2**63)  # In place of arguments: the name is that of a number.


class EmulatedKernels(library.NativeKernels):
    """The functions of a library for another processor, each call of which an emulator computes on this memory."""

    def __init__(self, path: Path) -> None:
        runner = Path(tempfile.mkdtemp()) / "runner"
        subprocess.run([COMPILER, "-O1", "-std=gnu++17", str(_SOURCE), "-o", str(runner), "-ldl"], check=True)
        self._emulator = subprocess.Popen(
            [EMULATOR, "-L", SYSTEM, str(runner), str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self._memory = os.open("/proc/self/mem", os.O_RDONLY)
        self.has_tiles = bool(self._call("moeserve_has_tiles", [_NUMBER], []))
        self.sums_as_tiles = bool(self._call("moeserve_sums_as_tiles", [_NUMBER], []))
        self.multiplies_bits = bool(self._call("moeserve_multiplies_bits", [_NUMBER], []))
        for name, types in library._SIGNATURES.items():
            setattr(self, name, self._function(name, types))

    @property
    def progress(self) -> int:
        return self._call("moeserve_progress", [_NUMBER], [])

    def _function(self, name: str, types: tuple[type, ...]) -> Callable[..., int]:
        def call(*arguments: int | float | None) -> int:
            pairs = list(zip(arguments, types, strict=True))
            integers = [int(value or 0) for value, kind in pairs if kind is not c_double]
            return self._call(f"moeserve_{name}", integers, [float(v or 0) for v, kind in pairs if kind is c_double])

        return call

    def _call(self, name: str, integers: list[int], reals: list[float]) -> int:
        given, got = self._emulator.stdin, self._emulator.stdout
        assert given is not None
        assert got is not None
        integers = integers + [0] * (_INTEGERS - len(integers))
        given.write(name.encode().ljust(64, b"\0"))
        given.write(b"".join((value & (2**64 - 1)).to_bytes(8, "little") for value in integers))
        given.write(bytes((c_double * _REALS)(*reals)))
        given.flush()
        while (kind := got.read(1)) != b"R":
            if not kind:
                raise RuntimeError(f"the emulator ended with {self._emulator.wait()} within {name}")
            address = int.from_bytes(got.read(8), "little")
            if kind == b"W":
                size = int.from_bytes(got.read(8), "little")
                memmove(address, got.read(size), size)
                continue
            try:
                given.write(b"\1" + os.pread(self._memory, _PAGE, address))
            except OSError:
                given.write(b"\0")
            given.flush()
        return int.from_bytes(got.read(8), "little", signed=True)


def install(name: str) -> None:
    """Let all that is imported from now on compute with the kernels of a target."""
    target = next(target for target in TARGETS if target.name == name)
    os.environ["CXX"] = COMPILER
    found = library.Found(build_library(target), target, carried=False)
    library.NativeKernels = EmulatedKernels  # type: ignore[misc]
    library.find_library = lambda *_: found


if __name__ == "__main__":
    _, target_name, module, *rest = sys.argv
    install(target_name)
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
