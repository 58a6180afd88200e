"""The compiled kernels: built once per machine with g++ from the sources beside this file, then loaded.

They compute in float32. Without a compiler, or with `MOESERVE_CPU_KERNELS=torch`, torch computes instead.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path

# The sources that take the compiler longest come first.
_SOURCES = (
    "quantised.cpp",
    "experts.cpp",
    "attention.cpp",
    "repack.cpp",
    "linear.cpp",
    "recurrent.cpp",
    "rounding.cpp",
    "gate.cpp",
    "elementwise.cpp",
    "sampling.cpp",
    "block.cpp",
    "layers.cpp",
    "checksum.cpp",
    "team.cpp",
)
_HEADERS = (
    "simd.h",
    "panels.h",
    "quantised.h",
    "matrix.h",
    "dot.h",
    "kv_rows.h",
    "attention_tile.h",
    "integer_tile.h",
    "pair_tile.h",
    "team.h",
)
_FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-fno-math-errno", "-fopenmp", "-fPIC")
_BUILD_SECONDS = 300  # a source of 7 s on an idle core may take that long on a machine that is busy with other work

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
    "foresee": (_P, _P, _P, _N, _P, _R, _N, _R, _P),
    "rms_norm": (_P, _N, _N, _N, _P, _R, _P, _N),
    "norm_of_sum": (_P, _P, _N, _N, _R, _P, _R, _P),
    "attention_block": (_P, _P, _P, _P, _N, _P),
    "layers": (_P, _P, _P, _P, _P, _N, _P, _N, _P, _P, _P),
    "rotate_and_store": (_P, _N, _N, _N, _N, _N, _P, _P, _R, _P, _P, _N, _N, _P, _P, _P, _N, _N),
    "attention": (_P, _N, _N, _N, _N, _N, _P, _P, _N, _N, _N, _N, _P, _P, _P, _P, _R, _N, _P, _P),
    "short_conv": (_P, _N, _P, _P, _N, _N, _N, _P, _N, _P, _P, _N, _P),
    "gated_delta_rule": (_P, _N, _P, _N, _N, _P, _P, _P, _N, _P, _P, _N, _N, _N, _N, _N, _P),
    "mamba1_scan": (_P, _N, _P, _N, _P, _N, _P, _P, _P, _N, _P, _P, _N, _N, _N, _P),
    "mamba2_scan": (_P, _N, _P, _N, _P, _P, _P, _R, _R, _P, _N, _P, _P, _N, _N, _N, _N, _N, _P),
    "gated_norm": (_P, _P, _N, _N, _N, _N, _P, _R, _P),
    "crc32": (_P, _N, _N),
    "compute_alone": (),
}


# Those that return a number, and those that take microseconds: they keep the interpreter lock, since another thread may
# hold it for longer than they compute.
_COUNTING = ("experts", "layers", "foresee", "crc32")
_SHORT = ("foresee",)


class NativeKernels:
    """The functions of the compiled library, described in its sources. Most release the interpreter lock.

    multiplies_bfloat16: the machine has dot products of bfloat16. multiplies_bits: it has carry-less products, or an
    instruction for CRC-32, without which `crc32` is slow.
    """

    linear: Callable[..., None]
    pack_panels: Callable[..., None]
    pack_quantised: Callable[..., None]
    quantise: Callable[..., None]
    experts: Callable[..., int]
    combine: Callable[..., None]
    choose_experts: Callable[..., None]
    largest: Callable[..., None]
    foresee: Callable[..., int]
    norm_of_sum: Callable[..., None]
    attention_block: Callable[..., None]
    layers: Callable[..., int]
    rms_norm: Callable[..., None]
    rotate_and_store: Callable[..., None]
    attention: Callable[..., None]
    short_conv: Callable[..., None]
    gated_delta_rule: Callable[..., None]
    mamba1_scan: Callable[..., None]
    mamba2_scan: Callable[..., None]
    gated_norm: Callable[..., None]
    crc32: Callable[[int, int, int], int]
    compute_alone: Callable[[], None]

    def __init__(self, path: Path) -> None:
        library, held = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        self._progress = c_int64.in_dll(library, "moeserve_progress")
        self.multiplies_bfloat16 = bool(c_int64.in_dll(library, "moeserve_multiplies_pairs"))
        self.multiplies_bits = bool(c_int64.in_dll(library, "moeserve_multiplies_bits"))
        for name, arguments in _SIGNATURES.items():
            function = getattr(held if name in _SHORT else library, f"moeserve_{name}")
            function.argtypes = arguments
            function.restype = _N if name in _COUNTING else None
            setattr(self, name, function)

    @property
    def progress(self) -> int:
        """The number of parts of work that calls of this process have done; it moves during a long call."""
        return self._progress.value


class KernelBuildError(Exception):
    """The sources could not be compiled; the message is one sentence."""


@functools.cache
def native_kernels() -> NativeKernels | None:
    """Return the compiled kernels, built on first use, or None; `native_kernels_absence` then says why."""
    return None if native_kernels_absence() else NativeKernels(build_library())


@functools.cache
def native_kernels_absence() -> str | None:
    """Return why torch computes instead, in one sentence, or None. Builds the kernels if need be."""
    if os.environ.get("MOESERVE_CPU_KERNELS", "auto") == "torch":
        return "MOESERVE_CPU_KERNELS is torch."
    try:
        NativeKernels(build_library())
    except KernelBuildError as error:
        return str(error)
    except (OSError, AttributeError) as error:  # For example a folder from which nothing may be run.
        return f"The compiled kernels cannot be loaded: {error}."
    return None


def build_library(cache_dir: Path | None = None) -> Path:
    """Return the path of the library for this machine and these sources; compile it unless `cache_dir` has it.

    A library's name ends in the hash of its content. A library with another hash, which a power failure or a full disk
    can leave, is removed and never loaded. Raises KernelBuildError. Processes that build at the same time do not
    disturb each other.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise KernelBuildError("There is no C++ compiler (g++).")
    here = Path(__file__).parent
    cache_dir = cache_dir or _cache_dir()
    name = f"moeserve-cpu-{_fingerprint(compiler, here)}"
    try:
        if (found := _find_intact(cache_dir, name)) is not None:
            return found
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            built = _compile_and_link(compiler, here, Path(folder))
            target = cache_dir / f"{name}-{_digest(built)}.so"
            # The content must be on the disk before the name that promises it.
            _sync(built)
            built.replace(target)
            _sync(cache_dir)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"The kernels could not be compiled: {error}") from None
    return target


def _compile_and_link(compiler: str, sources: Path, folder: Path) -> Path:
    """Compile each source by a process of its own, as many at once as there are cores, and link them."""

    def compile_one(source: str) -> str:
        compiled = str(folder / f"{source}.o")
        _run(compiler, "-c", str(sources / source), "-o", compiled)
        return compiled

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = list(pool.map(compile_one, _SOURCES))
    library = folder / "kernels.so"
    _run(compiler, "-shared", *compiled, "-o", str(library))
    return library


def _run(compiler: str, *arguments: str) -> None:
    command = [compiler, *_FLAGS, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no message"]
        raise KernelBuildError(f"{compiler} failed: {lines[0]}")


def _find_intact(cache_dir: Path, name: str) -> Path | None:
    """Return a library of that name whose content has the hash in its name; remove damaged ones."""
    for path in sorted(cache_dir.glob(f"{name}-*.so")):
        if path.is_file() and path.stem.removeprefix(f"{name}-") == _digest(path):
            return path
        path.unlink(missing_ok=True)
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(compiler: str, sources: Path) -> str:
    digest = hashlib.sha256(repr((_FLAGS, _compiler_version(compiler), _processor())).encode())
    for name in _SOURCES + _HEADERS:
        digest.update((sources / name).read_bytes())
    return digest.hexdigest()[:16]


def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{compiler} does not run: {error}") from None


def _processor() -> str:
    """Return the features that `-march=native` compiles for, since different machines may share a cache."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _cache_dir() -> Path:
    """Return a folder beside built models, in $MOESERVE_CACHE, $XDG_CACHE_HOME/moeserve or ~/.cache/moeserve."""
    own = os.environ.get("MOESERVE_CACHE")
    if own:
        return Path(own) / "kernels"
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError:
        raise KernelBuildError("There is no home to keep compiled kernels in (set MOESERVE_CACHE).") from None
    return Path(base) / "moeserve" / "kernels"
