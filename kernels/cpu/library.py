"""The compiled kernels for this processor: those that a wheel carries, else compiled once per machine (`build.py`).

They compute in float32. Where there are none, or with `MOESERVE_CPU_KERNELS=torch`, torch computes instead.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu.build import KernelBuildError, build_library
from kernels.cpu.targets import OTHER, Target, suitable_targets

_P, _N, _R = c_void_p, c_int64, c_double
_SIGNATURES: dict[str, tuple[type, ...]] = {
    "linear": (_P, _N, _P, _N, _N, _P, _N),
    "pack_panels": (_P, _N, _N, _N, _P, _N, _P),
    "pack_quantised": (_N, _P, _N, _N, _P),
    "quantise": (_P, _N, _N, _N, _N, _N, _P),
    "experts": (_P, _P, _N, _N, _P, _P, _N, _P, _N),
    "combine": (_P, _N, _N, _N, _P, _P, _N),
    "choose_experts": (_P, _P, _N, _N, _P, _P),
    "largest": (_P, _N, _N, _N, _P, _P),
    "softmax": (_P, _N, _N, _N, _N, _P),
    "foresee": (_P, _P, _P, _N, _P, _R, _N, _R, _P),
    "rms_norm": (_P, _N, _N, _N, _P, _R, _P, _N),
    "norm_of_sum": (_P, _P, _N, _N, _R, _R, _P, _R, _P),
    "softcap": (_P, _N, _R),
    "attention_block": (_P, _P, _P, _P, _N, _P),
    "layers": (_P, _P, _P, _P, _P, _N, _P, _N, _P, _P, _P),
    "rotate_and_store": (_P, _N, _N, _N, _N, _N, _P, _P, _P, _R, _P, _P, _N, _N, _P, _P, _P, _N, _N),
    "attention": (_P, _N, _N, _N, _N, _N, _P, _P, _N, _N, _N, _N, _P, _P, _P, _P, _R, _N, _P, _P),
    "indexed_attention": (_P, _N, _N, _N, _N, _N, _P, _P, _N, _N, _N, _N, _P, _P, _P, _P, _R, _P, _N, _P),
    "choose_positions": (_P, _P, _N, _N, _P, _N, _N, _N, _P, _P, _P, _P, _N, _P),
    "short_conv": (_P, _N, _P, _P, _N, _N, _N, _P, _N, _P, _P, _N, _P),
    "gated_delta_rule": (_P, _N, _P, _N, _N, _P, _P, _P, _N, _P, _P, _N, _N, _N, _N, _N, _P),
    "mamba1_scan": (_P, _N, _P, _N, _P, _N, _P, _P, _P, _N, _P, _P, _N, _N, _N, _P),
    "mamba2_scan": (_P, _N, _P, _N, _P, _P, _P, _R, _R, _P, _N, _P, _P, _N, _N, _N, _N, _N, _P),
    "gated_norm": (_P, _P, _N, _N, _N, _N, _P, _R, _P),
    "norm_of_gated": (_P, _P, _N, _N, _N, _N, _P, _R, _P),
    "crc32": (_P, _N, _N),
    "exchange": (_P, _N, _N, _N, _N, _P, _N, _N, _N, _P, _N),
    "multiply_tiles": (_N, _N),
    "compute_alone": (),
    "count_threads_with": (_P,),
}


# Those that return a number, and those that take microseconds: they keep the interpreter lock, since another thread may
# hold it for longer than they compute.
_COUNTING = ("experts", "layers", "foresee", "crc32", "exchange")
_SHORT = ("foresee",)


class NativeKernels:
    """The functions of the compiled library, described in its sources. Most release the interpreter lock.

    has_tiles: the machine has tiles (AMX). sums_as_tiles: products of pairs of bfloat16 are summed as by tiles, which
    all targets but one do (`pair_sums.h`). multiplies_bits: the machine has carry-less products, or an instruction
    for CRC-32, without which `crc32` is slow.
    """

    linear: Callable[..., None]
    pack_panels: Callable[..., None]
    pack_quantised: Callable[..., None]
    quantise: Callable[..., None]
    experts: Callable[..., int]
    combine: Callable[..., None]
    choose_experts: Callable[..., None]
    largest: Callable[..., None]
    softmax: Callable[..., None]
    foresee: Callable[..., int]
    norm_of_sum: Callable[..., None]
    softcap: Callable[..., None]
    attention_block: Callable[..., None]
    layers: Callable[..., int]
    rms_norm: Callable[..., None]
    rotate_and_store: Callable[..., None]
    attention: Callable[..., None]
    indexed_attention: Callable[..., None]
    choose_positions: Callable[..., None]
    short_conv: Callable[..., None]
    gated_delta_rule: Callable[..., None]
    mamba1_scan: Callable[..., None]
    mamba2_scan: Callable[..., None]
    gated_norm: Callable[..., None]
    norm_of_gated: Callable[..., None]
    crc32: Callable[[int, int, int], int]
    exchange: Callable[..., int]
    multiply_tiles: Callable[[int, int], None]
    compute_alone: Callable[[], None]
    count_threads_with: Callable[[int], None]

    def __init__(self, path: Path) -> None:
        library, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._progress = c_int64.in_dll(library, "moeserve_progress")
        self.has_tiles = bool(c_int64.in_dll(library, "moeserve_has_tiles"))
        self.sums_as_tiles = bool(c_int64.in_dll(library, "moeserve_sums_as_tiles"))
        self.multiplies_bits = bool(c_int64.in_dll(library, "moeserve_multiplies_bits"))
        for name, arguments in _SIGNATURES.items():
            function = getattr(held if name in _SHORT else library, f"moeserve_{name}")
            function.argtypes = arguments
            function.restype = _N if name in _COUNTING else None
            setattr(self, name, function)
        if (counter := _thread_counter()) is not None:
            self.count_threads_with(counter)

    @property
    def progress(self) -> int:
        """The number of parts of work that calls of this process have done; it moves during a long call."""
        return self._progress.value


# The variable that names a library, and its value for the best one whose bits are those of every machine.
CPU_KERNELS, REPRODUCIBLE = "MOESERVE_CPU_KERNELS", "reproducible"
# Of a wheel: a library for each target of its machine.
CARRIED = Path(__file__).parent / "compiled"


@dataclass(frozen=True)
class Found:
    """A library for a target; carried: a wheel brought it."""

    path: Path
    target: Target
    carried: bool


@functools.cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled kernels, built on first use, or None; `native_kernels_absence` then says why."""
    return None if native_kernels_absence() else NativeKernels(find_library().path)


@functools.cache
def native_kernels_absence() -> str | None:
    """Return why torch computes instead, in one sentence, or None. Builds the kernels if need be."""
    if _wanted() == "torch":
        return "MOESERVE_CPU_KERNELS is torch."
    try:
        NativeKernels(find_library().path)
    except KernelBuildError as error:
        return str(error)
    except (OSError, AttributeError) as error:  # For example a folder from which nothing may be run.
        return f"The compiled kernels cannot be loaded: {error}."
    return None


def kernels_in_use() -> str | None:
    """Return the target of the compiled kernels and where they come from, for people; None where torch computes."""
    if native_kernels() is None:
        return None
    found = find_library()
    return f"{found.target.name}, {'of the wheel' if found.carried else 'compiled here'}"


def computes_in_tiles() -> bool:
    """Return whether this processor's kernels multiply rows in tiles; neither builds nor loads them."""
    wanted = _wanted()
    return (suitable_targets()[0].name if wanted in ("auto", REPRODUCIBLE) else wanted) == "amx"


def find_library(carried: Path = CARRIED) -> Found:
    """Return the library for this processor or for the target in `MOESERVE_CPU_KERNELS`: of `carried`, else compiled.

    Raises KernelBuildError.
    """
    targets = suitable_targets()
    if (wanted := _wanted()) == REPRODUCIBLE:
        targets = tuple(target for target in targets if target.sums_as_tiles)
    elif wanted != "auto":
        names = [target.name for target in targets]
        if wanted not in names:
            raise KernelBuildError(f"MOESERVE_CPU_KERNELS is {wanted}: on this processor torch, {', '.join(names)}.")
        targets = targets[names.index(wanted) :][:1]
    for target in targets:
        if (path := carried / f"{target.name}.so").is_file():
            return Found(path, target, carried=True)
    try:
        return Found(build_library(targets[0]), targets[0], carried=False)
    except KernelBuildError:
        # An old compiler may not know the target's instructions; it knows the machine that it runs on.
        if wanted != "auto" or targets[0] == OTHER:
            raise
        return Found(build_library(OTHER), OTHER, carried=False)


def _wanted() -> str:
    return os.environ.get(CPU_KERNELS) or "auto"


def _thread_counter() -> int | None:
    """Return the address of `omp_get_max_threads` of the OpenMP that torch computes with, else of the system's.

    So the kernels take as many threads as torch is told to, and need no OpenMP where torch is imported later.
    """
    torch = importlib.util.find_spec("torch")
    folder = Path(torch.origin).parent if torch is not None and torch.origin else None
    of_torch = [] if folder is None else [*folder.glob("lib/lib?omp*"), *folder.parent.glob("torch.libs/lib?omp*")]
    for path in (*map(str, of_torch), "libgomp.so.1"):
        try:
            return ctypes.cast(ctypes.CDLL(path).omp_get_max_threads, c_void_p).value
        except OSError:
            continue
    return None
