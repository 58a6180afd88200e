"""Which library computes on a processor, and the cache of compiled ones, with a compiler that is a script."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kernels.cpu import library
from kernels.cpu.build import KernelBuildError, build_library
from kernels.cpu.library import find_library, native_kernels_absence
from kernels.cpu.targets import IN_SOFTWARE, OTHER, TARGETS, Target, suitable_targets, targets_of


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
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "home"))
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.delenv("MOESERVE_CPU_KERNELS", raising=False)
    return path


def calls(compiler: Path) -> int:
    """Return how often the compiler has linked a library."""
    return len((compiler.parent / "calls").read_text().splitlines())


def test_a_missing_compiler_is_said_with_the_package_that_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    with pytest.raises(KernelBuildError, match="There is no C\\+\\+ compiler: install g"):
        build_library(OTHER)


def test_a_sound_library_is_not_built_again(compiler: Path, tmp_path: Path) -> None:
    first = build_library(OTHER, tmp_path / "cache")
    assert build_library(OTHER, tmp_path / "cache") == first
    assert calls(compiler) == 1


@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[:7], lambda data: data + b"x"])
def test_a_damaged_library_is_built_anew_and_never_returned(
    damage: Callable[[bytes], bytes], compiler: Path, tmp_path: Path
) -> None:
    path = build_library(OTHER, tmp_path / "cache")
    content = path.read_bytes()
    path.write_bytes(damage(content))
    assert build_library(OTHER, tmp_path / "cache").read_bytes() == content
    assert calls(compiler) == 2
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_library_under_the_name_of_earlier_versions_is_not_loaded(compiler: Path, tmp_path: Path) -> None:
    path = build_library(OTHER, tmp_path / "cache")
    old = path.with_name(path.stem.rpartition("-")[0] + ".so")
    path.rename(old)
    assert build_library(OTHER, tmp_path / "cache") == path
    assert calls(compiler) == 2


def test_a_build_removes_folders_of_killed_builds_and_libraries_that_nobody_has_used_for_long(tmp_path: Path) -> None:
    cache, now = tmp_path / "cache", time.time()
    used = build_library(OTHER, cache)
    ages = {"tmpkilled": 5 * 3600, "tmpbuilding": 4 * 3600, "old-1-1.so": 91 * 86400, "older-version-2.so": 89 * 86400}
    for name in ages:
        (cache / name).touch() if name.endswith(".so") else (cache / name).mkdir()
    (cache / "tmpkilled" / "gate.cpp.o").touch()
    for name, age in (ages | {used.name: 91 * 86400}).items():
        os.utime(cache / name, (now - age, now - age))
    assert build_library(OTHER, cache) == used
    new = build_library(TARGETS[0], cache)
    assert {path.name for path in cache.iterdir()} == {used.name, new.name, "tmpbuilding", "older-version-2.so"}


def test_what_cannot_be_loaded_leaves_the_work_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    with pytest.raises(OSError, match=r"too short|invalid ELF"):
        ctypes.CDLL(str(find_library().path))
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


def on_a_processor(monkeypatch: pytest.MonkeyPatch, machine: str, features: frozenset[str]) -> None:
    monkeypatch.setattr("kernels.cpu.targets.platform.machine", lambda: machine)
    monkeypatch.setattr("kernels.cpu.targets.processor_features", lambda: features)
    monkeypatch.setattr("kernels.cpu.targets.permit_tiles", lambda: True)


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_a_processor_computes_with_the_first_target_whose_instructions_it_has(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_processor(monkeypatch, str(target.machine), target.features)
    same = [one for one in TARGETS if (one.machine, one.features) == (target.machine, target.features)]
    assert suitable_targets()[0] == same[0]
    assert target in suitable_targets()
    for missing in target.features:
        on_a_processor(monkeypatch, str(target.machine), target.features - {missing})
        assert target not in suitable_targets()


# Of /proc/cpuinfo.
NEOVERSE_N1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs"
NEOVERSE_V1 = (
    f"{NEOVERSE_N1} jscvt fcma sha3 sm3 sm4 sha512 sve asimdfhm dit uscat ilrcpc flagm svei8mm svebf16 i8mm bf16"
)


@pytest.mark.parametrize(("flags", "name"), [(NEOVERSE_N1, "aarch64-dotprod"), (NEOVERSE_V1, "aarch64-bf16")])
def test_a_server_of_arm_computes_with_the_instructions_that_linux_says_it_has(
    flags: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"processor\t: 0\nBogoMIPS\t: 2100.00\nFeatures\t: {flags}\nCPU implementer\t: 0x41\n\nprocessor\t: 1\n"
    monkeypatch.setattr(Path, "read_text", lambda _: lines)
    monkeypatch.setattr("kernels.cpu.targets.platform.machine", lambda: "aarch64")
    assert suitable_targets()[0].name == name


def test_a_process_that_linux_grants_no_tiles_computes_with_the_next_target(monkeypatch: pytest.MonkeyPatch) -> None:
    best, of_amd, _, third = targets_of("x86_64")[:4]
    on_a_processor(monkeypatch, "x86_64", best.features)
    assert suitable_targets()[0] == best
    monkeypatch.setattr("kernels.cpu.targets.permit_tiles", lambda: False)
    assert suitable_targets()[0] == third  # Dot products of bfloat16 are slow there.
    on_a_processor(monkeypatch, "x86_64", best.features | {"AuthenticAMD"})
    monkeypatch.setattr("kernels.cpu.targets.permit_tiles", lambda: False)
    assert suitable_targets()[0] == of_amd


def test_a_process_computes_in_tiles_where_it_takes_the_target_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    best, second = targets_of("x86_64")[:2]
    on_a_processor(monkeypatch, "x86_64", best.features)
    assert library.computes_in_tiles()
    monkeypatch.setenv("MOESERVE_CPU_KERNELS", second.name)
    assert not library.computes_in_tiles()
    monkeypatch.delenv("MOESERVE_CPU_KERNELS")
    on_a_processor(monkeypatch, "x86_64", second.features)
    assert not library.computes_in_tiles()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_reproducible_kernels_are_those_of_the_best_target_with_the_order_of_sums_of_all(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_processor(monkeypatch, str(target.machine), target.features)
    monkeypatch.setenv("MOESERVE_CPU_KERNELS", "reproducible")
    wanted = target if target.sums_as_tiles else next(one for one in TARGETS if one.name == f"{target.name}-tiles")
    assert find_library(tmp_path).target == wanted
    assert library.computes_in_tiles() == (target.name == "amx")


def test_tiles_in_software_are_only_for_those_who_ask_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_processor(monkeypatch, "x86_64", targets_of("x86_64")[0].features)
    assert suitable_targets()[-1] == IN_SOFTWARE
    assert IN_SOFTWARE not in targets_of("x86_64")


def test_an_older_or_unknown_processor_computes_with_what_is_compiled_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for machine in ("x86_64", "riscv64"):
        on_a_processor(monkeypatch, machine, frozenset({"sse4_2"}))
        assert suitable_targets() == (OTHER,)


def test_a_library_of_the_wheel_is_taken_and_no_compiler_asked(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    best, plain = targets_of("x86_64")[0], targets_of("x86_64")[-1]
    on_a_processor(monkeypatch, "x86_64", best.features)
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / f"{plain.name}.so").write_text("plain")
    assert find_library(tmp_path).target == plain
    (tmp_path / f"{best.name}.so").write_text("best")
    found = find_library(tmp_path)
    assert (found.path, found.target, found.carried) == (tmp_path / f"{best.name}.so", best, True)
    monkeypatch.setenv("MOESERVE_CPU_KERNELS", plain.name)
    assert find_library(tmp_path).target == plain


def test_a_compiler_that_does_not_know_the_targets_instructions_compiles_for_its_own_machine(
    compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = TARGETS[0]
    on_a_processor(monkeypatch, str(target.machine), target.features)
    script = compiler.read_text().replace(
        "for argument;", f'case "$*" in *{target.flags[-1]}*) exit 1; esac\nfor argument;'
    )
    compiler.write_text(script)
    found = find_library(tmp_path)
    assert (found.target, found.carried) == (OTHER, False)


def test_a_target_that_the_processor_cannot_run_is_refused_with_those_that_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_a_processor(monkeypatch, "x86_64", targets_of("x86_64")[-1].features)
    for name in (TARGETS[0].name, "no-such-target"):
        monkeypatch.setenv("MOESERVE_CPU_KERNELS", name)
        with pytest.raises(KernelBuildError, match=f"is {name}: on this processor torch, x86-64-v3, native"):
            find_library(tmp_path)
