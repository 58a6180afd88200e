"""The kinds of processors that the kernels are compiled for."""

from __future__ import annotations

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path

_V3 = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2", "-mlzcnt", "-mpopcnt", "-mpclmul")
_V4 = (*_V3, "-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
_HAS_V3 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "abm", "popcnt", "pclmulqdq"})
_HAS_V4 = _HAS_V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_BF16 = (*_V4, "-mavx512vnni", "-mavx512bf16")
_HAS_BF16 = _HAS_V4 | {"avx512_vnni", "avx512_bf16"}
# On Intel's processors dot products of bfloat16 are slower than multiply-adds of float32.
_OF_AMD = _HAS_BF16 | {"AuthenticAMD"}
_ARM = "-march=armv8.2-a+dotprod+crc"
_HAS_DOTPROD = frozenset({"asimd", "asimddp", "crc32"})
_HAS_TILES = frozenset({"amx_tile", "amx_int8", "amx_bf16"})


@dataclass(frozen=True)
class Target:
    """A kind of processor, by the name of its library.

    machine: as `platform.machine()` names it, None for any. flags: the compiler's. features: what the processor must
    have, its maker included, in the words of /proc/cpuinfo, which leaves out what the operating system does not switch
    on. sums_as_tiles: see `NativeKernels`.
    """

    name: str
    machine: str | None
    flags: tuple[str, ...]
    features: frozenset[str]
    sums_as_tiles: bool = True

    def suits(self, machine: str, features: frozenset[str]) -> bool:
        """Return whether a processor can run what is compiled for this target."""
        return self.machine in (None, machine) and self.features <= features


# A processor computes with the first that suits it.
TARGETS = (
    Target("amx", "x86_64", (*_BF16, "-mamx-tile", "-mamx-int8", "-mamx-bf16"), _HAS_BF16 | _HAS_TILES),
    Target("avx512-bf16", "x86_64", _BF16, _OF_AMD, sums_as_tiles=False),
    Target("avx512-bf16-tiles", "x86_64", (*_BF16, "-DMOESERVE_SUMS_AS_TILES"), _OF_AMD),
    Target("avx512-vnni", "x86_64", (*_V4, "-mavx512vnni"), _HAS_V4 | {"avx512_vnni"}),
    Target("avx512", "x86_64", _V4, _HAS_V4),
    Target("avx-vnni", "x86_64", (*_V3, "-mavxvnni"), _HAS_V3 | {"avx_vnni"}),
    Target("x86-64-v3", "x86_64", _V3, _HAS_V3),
    # No processor is known that has one of the two without the other.
    Target("aarch64-bf16", "aarch64", (f"{_ARM}+i8mm+bf16",), _HAS_DOTPROD | {"i8mm", "bf16"}),
    Target("aarch64-dotprod", "aarch64", (_ARM,), _HAS_DOTPROD),
)
# Any other processor, compiled for where it is.
OTHER = Target("native", None, ("-march=native",), frozenset())
# What `amx` computes, by tiles in software: for tests. No processor chooses it by itself. With more optimisation g++ 12
# ends with an internal error in the products of pairs.
IN_SOFTWARE = Target("amx-in-software", "x86_64", (*_V3, "-O1", "-DMOESERVE_TILES_IN_SOFTWARE"), _HAS_V3)


def targets_of(machine: str) -> tuple[Target, ...]:
    """Return the targets whose libraries a wheel for such a machine carries."""
    return tuple(target for target in TARGETS if target.machine == machine)


def suitable_targets() -> tuple[Target, ...]:
    """Return the targets that this processor can run, the fastest first, and behind OTHER what tests alone ask for."""
    machine, features = platform.machine(), processor_features()
    if features >= _HAS_TILES and not permit_tiles():
        features -= _HAS_TILES
    return tuple(target for target in (*TARGETS, OTHER, IN_SOFTWARE) if target.suits(machine, features))


def permit_tiles() -> bool:
    """Ask Linux for tiles, for all threads of this process and its children; return whether it grants them.

    It refuses while a thread has a stack for signals that has no room for tiles. Without a grant their instructions
    end the process.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    return bool(ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data) == 0)


def processor_features() -> frozenset[str]:
    """Return the processor's maker and features, in the words of /proc/cpuinfo; nothing where it cannot be read."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return frozenset()
    return frozenset(
        word for line in first if line.startswith(("vendor_id", "flags", "Features")) for word in line.split()
    )
