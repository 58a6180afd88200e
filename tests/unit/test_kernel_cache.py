"""The cache of compiled kernels, with a compiler that is a script."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu import library
from kernels.cpu.library import build_library, native_kernels_absence


@pytest.fixture(autouse=True)
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "compiler"
    path.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = --version ]; then echo 1.0; exit; fi\n'
        f'case "$*" in *-shared*) echo linked >> {tmp_path}/calls; esac\n'
        "for argument; do last=$argument; done\n"
        "echo a library of some length > $last\n"
    )
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))
    return path


def calls(compiler: Path) -> int:
    """Return how often the compiler has linked a library."""
    return len((compiler.parent / "calls").read_text().splitlines())


def test_a_sound_library_is_not_built_again(compiler: Path, tmp_path: Path) -> None:
    first = build_library(tmp_path / "cache")
    assert build_library(tmp_path / "cache") == first
    assert calls(compiler) == 1


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:7], lambda data: data + b"x"])
def test_a_damaged_library_is_built_anew_and_never_returned(
    damage: Callable[[bytes], bytes], compiler: Path, tmp_path: Path
) -> None:
    path = build_library(tmp_path / "cache")
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert build_library(tmp_path / "cache").read_bytes() == content
    assert calls(compiler) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_library_under_the_name_of_earlier_versions_is_not_loaded(compiler: Path, tmp_path: Path) -> None:
    path = build_library(tmp_path / "cache")
    old = path.with_name(path.stem.rpartition("-")[0] + ".so")
    path.rename(old)
    assert build_library(tmp_path / "cache") == path
    assert calls(compiler) == 2


def test_what_cannot_be_loaded_leaves_the_work_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match=r"too short|invalid ELF"):
        ctypes.CDLL(str(build_library()))
    library.native_kernels_absence.cache_clear()
    try:
        assert "The compiled kernels cannot be loaded" in str(native_kernels_absence())
    finally:
        library.native_kernels_absence.cache_clear()


def test_a_machine_without_a_home_computes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "MOESERVE_CACHE", "XDG_CACHE_HOME", "MOESERVE_CPU_KERNELS"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    library.native_kernels_absence.cache_clear()
    try:
        assert "no home to keep compiled kernels in" in str(native_kernels_absence())
    finally:
        library.native_kernels_absence.cache_clear()
