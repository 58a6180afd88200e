"""Compiles the kernels with g++ from the sources beside this file, for one kind of processor.

A wheel carries what was compiled when it was built (`setup.py`). A checkout compiles on first use, once per machine.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from kernels.cpu.targets import OTHER, Target, processor_features

# The sources that take the compiler longest come first.
SOURCES = (
    "tiled.cpp",
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
    "indexer.cpp",
    "block.cpp",
    "layers.cpp",
    "checksum.cpp",
    "team.cpp",
    "board.cpp",
)
HEADERS = (
    "simd.h",
    "halves.h",
    "pair_sums.h",
    "panels.h",
    "quantised.h",
    "softmax.h",
    "groups.h",
    "tiles.h",
    "tiled.h",
    "matrix.h",
    "dot.h",
    "lines.h",
    "kv_rows.h",
    "attention_tile.h",
    "integer_tile.h",
    "pair_tile.h",
    "team.h",
    "waiting.h",
)
# Where a product and a sum are rounded once the sources say so: the compiler would choose for each target anew.
_FLAGS = ("-O3", "-std=gnu++17", "-fno-math-errno", "-ffp-contract=off", "-fPIC", "-pthread")
_BUILD_SECONDS = 900  # A source of 20 s on an idle core took 300 s on a machine that was busy with other work.
_LONGEST_BUILD_SECONDS = _BUILD_SECONDS * (len(SOURCES) + 1)  # one source after another, and the linker
_UNUSED_SECONDS = 90 * 86400.0  # s; a library that no process has asked for in this time is removed


class KernelBuildError(Exception):
    """The sources could not be compiled; the message is one sentence."""


def build_library(target: Target, cache_dir: Path | None = None) -> Path:
    """Return the path of the library for a target and these sources; compile it unless `cache_dir` has it.

    A library's name ends in the hash of its content. A library with another hash, which a power failure or a full disk
    can leave, is removed and never loaded. A build removes the folders of builds that were killed, and libraries that
    nobody has asked for in long. Raises KernelBuildError. Processes that build at the same time do not disturb each
    other.
    """
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if compiler is None:
        raise KernelBuildError("There is no C++ compiler: install g++ (apt install g++).")
    here = Path(__file__).parent
    cache_dir = cache_dir or _cache_dir()
    name = f"{target.name}-{_fingerprint(compiler, target, here)}"
    try:
        if (found := _find_intact(cache_dir, name)) is not None:
            return found
        cache_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
            built = _compile_and_link((compiler, *_FLAGS, *target.flags), here, Path(folder))
            library = cache_dir / f"{name}-{_digest(built)}.so"
            # The content must be on the disk before the name that promises it.
            _sync(built)
            built.replace(library)
            _sync(cache_dir)
        _remove_unused(cache_dir)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"The kernels could not be compiled: {error}") from None
    return library


def _compile_and_link(command: tuple[str, ...], sources: Path, folder: Path) -> Path:
    """Compile each source by a process of its own, as many at once as there are cores, and link them."""

    def compile_one(source: str) -> str:
        compiled = str(folder / f"{source}.o")
        _run(*command, "-c", str(sources / source), "-o", compiled)
        return compiled

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        compiled = list(pool.map(compile_one, SOURCES))
    library = folder / "kernels.so"
    _run(*command, "-shared", *compiled, "-o", str(library))
    return library


def _run(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    if result.returncode:
        lines = [line for line in result.stderr.splitlines() if "error" in line] or ["no message"]
        raise KernelBuildError(f"{command[0]} failed: {lines[0]}")


def _find_intact(cache_dir: Path, name: str) -> Path | None:
    """Return a library of that name whose content has the hash in its name; remove damaged ones."""
    for path in sorted(cache_dir.glob(f"{name}-*.so")):
        with suppress(OSError):  # of a cache that is read-only
            os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
        if path.is_file() and path.stem.removeprefix(f"{name}-") == _digest(path):
            return path
        path.unlink(missing_ok=True)
    return None


def _remove_unused(cache_dir: Path) -> None:
    """Remove the folders of killed builds and unused libraries. A library that is loaded outlives its file."""
    for path in cache_dir.iterdir():
        with suppress(OSError):
            found, now = path.stat(), time.time()
            if path.suffix == ".so" and now - found.st_atime > _UNUSED_SECONDS:
                path.unlink()
            elif path.name.startswith("tmp") and now - found.st_mtime > _LONGEST_BUILD_SECONDS:
                shutil.rmtree(path)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(compiler: str, target: Target, sources: Path) -> str:
    # Machines whose native code differs may share a cache.
    features = sorted(processor_features()) if target == OTHER else []
    facts = (_FLAGS, target.flags, _compiler_version(compiler), platform.machine(), features)
    digest = hashlib.sha256(repr(facts).encode())
    for name in SOURCES + HEADERS:
        digest.update((sources / name).read_bytes())
    return digest.hexdigest()[:16]


def _compiler_version(compiler: str) -> str:
    try:
        return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelBuildError(f"{compiler} does not run: {error}") from None


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
