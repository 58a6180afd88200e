"""What a compiled kernel's machine code does: its instructions, its loops and how wide they read. No GPU is needed.

The disassembler comes with Triton. Counts are of instructions as they stand, for one warp; a loop runs them each time.
"""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import triton

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.MULTILINE)
_LANES = 32
# Warp instructions per KiB read. While memory brings one at 4.3 TB/s (nine tenths of an H200's data sheet), 132 x 4
# schedulers at 1.7 GHz issue 214: beyond 7 of 10 of that a kernel has little left to hide latencies behind.
MOST_PER_KIB = 150


@dataclass(frozen=True)
class Instruction:
    address: int
    opcode: str
    operands: str

    @property
    def jumps_to(self) -> int | None:
        target = re.search(r"0x([0-9a-f]+)", self.operands) if self.opcode.startswith("BRA") else None
        return int(target[1], 16) if target else None


@dataclass(frozen=True)
class Code:
    """Instructions of a kernel, or of one of its loops, in order."""

    instructions: tuple[Instruction, ...]

    @cached_property
    def opcodes(self) -> Counter[str]:
        return Counter(each.opcode for each in self.instructions)

    def count(self, pattern: str) -> int:
        """How many opcodes begin with a match of `pattern`."""
        return sum(number for opcode, number in self.opcodes.items() if re.match(pattern, opcode))

    @property
    def loops(self) -> list["Code"]:
        """Innermost loops in order of address: what a jump backwards encloses, and no other jump backwards does."""
        # The code ends with a jump to itself, which is no loop.
        jumps = [each for each in self.instructions if each.jumps_to is not None and each.jumps_to < each.address]
        spans = [(each.jumps_to, each.address) for each in jumps]
        return [
            Code(tuple(each for each in self.instructions if first <= each.address <= last))
            for first, last in spans
            if not any((a, b) != (first, last) and first <= a and b <= last for a, b in spans)
        ]

    @property
    def hot(self) -> "Code":
        """The loop that computes most, of equals the shortest (the one without masks); all where nothing loops."""
        return max(
            self.loops or [self],
            key=lambda loop: (loop.count("HMMA|HGMMA"), loop.bytes_loaded, -len(loop.instructions)),
        )

    @property
    def bytes_loaded(self) -> int:
        """Of global memory by a warp, in loads of at least 8 bytes per lane: narrower ones read tables and scalars."""
        return _LANES * (16 * self.count(r"LDG(STS)?\..*128") + 8 * self.count(r"LDG(STS)?\..*64"))

    @property
    def tensor_cycles(self) -> int:
        """What a warpgroup's products take at least: 64 x N x 16 at 2048 multiply-adds per cycle of a multiprocessor.

        Compare with `instructions`: each of four schedulers issues one of them per cycle, for one warp of the group.
        """
        shapes = [re.match(r"HGMMA\.64x(\d+)x16", each.opcode) for each in self.instructions]
        return sum(int(shape[1]) // 2 for shape in shapes if shape)

    @property
    def divisions(self) -> int:
        """Of integers by what is not known when compiled: each begins with an estimate of a reciprocal."""
        return self.count(r"I2F\..*RP|I2F\.RP")

    def summary(self) -> dict[str, int]:
        """Of the whole: words that left the registers. Of the hot loop: how long it is, what it loads and waits for."""
        loop = self.hot
        return {
            "local": self.count("LDL|STL"),
            "loop": len(loop.instructions),
            "loop_bytes": loop.bytes_loaded,
            "loop_async": loop.count(r"LDGSTS\..*128|UTMALDG"),
            "loop_narrow": loop.count(r"LDGSTS(?!.*128)"),
            "loop_byte_reads": loop.count(r"LDS\.[US]8"),
            "loop_divisions": loop.divisions,
            "loop_barriers": loop.count(r"BAR\."),
            "loop_shuffles": loop.count("SHFL|REDUX"),
            "loop_tensor_cycles": loop.tensor_cycles,
        }


def code_of(cubin: bytes) -> Code:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(tool), "-sass", file.name], capture_output=True, text=True, check=True).stdout
    return Code(
        tuple(Instruction(int(address, 16), opcode, operands) for address, opcode, operands in _LINE.findall(text))
    )
