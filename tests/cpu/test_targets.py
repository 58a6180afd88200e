"""The kernels compiled for each kind of processor that this one can stand in for."""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kernels.cpu.build import build_library
from kernels.cpu.library import find_library
from kernels.cpu.targets import IN_SOFTWARE, OTHER, Target, suitable_targets, targets_of
from tests.behaviour.freeze import FROZEN
from tests.support.emulated_kernels import COMPILER, EMULATOR

ROOT = Path(__file__).parents[2]
TESTS_OF_KERNELS = (
    "test_attention",
    "test_bfloat16_products",
    "test_checksum",
    "test_fewer_calls",
    "test_indexed_attention",
    "test_kv_dtypes",
    "test_linear_and_experts",
    "test_moe_gate",
    "test_native_kernels",
    "test_quantised_kernels",
    "test_recurrent_kernels",
)
# Cases that an instruction for pairs sums in an order of its own.
OF_PAIRS = ("times bfloat16", "attention torch.bfloat16")
TARGETS = [target for target in suitable_targets() if target != OTHER]
PLAIN = next(target for target in reversed(TARGETS) if target != IN_SOFTWARE)
every_target = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)


def run(target: Target, *arguments: str) -> str:
    """Run Python with the kernels of a target."""
    environment = os.environ | {"MOESERVE_CPU_KERNELS": target.name, "PYTEST_XDIST_WORKER": ""}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.kernel_change
@pytest.mark.timeout(1800)
@every_target
def test_the_kernels_of_every_target_pass_their_tests(target: Target) -> None:
    if target == find_library().target:
        pytest.skip("the suite computes with these")
    files = [f"tests/cpu/{name}.py" for name in TESTS_OF_KERNELS]
    run(target, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-n", "0", *files)


def digests(target: Target, *emulator: str, batches: int = 10) -> dict[str, str]:
    found: dict[str, str] = json.loads(run(target, "-m", *emulator, "tests.support.kernel_bits", str(batches)))
    return found


def recorded() -> dict[str, str]:
    """Return the digests in the record for all machines, by case."""
    cases = json.loads(FROZEN.read_text())["cases"]
    return {name.removeprefix("kernels/"): case["bits"][0] for name, case in cases.items() if name[:8] == "kernels/"}


def differing(target: Target, found: dict[str, str], wanted: dict[str, str]) -> list[str]:
    """Return the cases with other bits, but for those that `--reproducible` leaves to another target."""
    assert found.keys() == wanted.keys()
    names = [name for name in wanted if target.sums_as_tiles or not any(part in name for part in OF_PAIRS)]
    return [name for name in names if found[name] != wanted[name]]


@pytest.mark.kernel_change
@pytest.mark.timeout(1800)
@every_target
def test_every_target_computes_the_recorded_bits(target: Target) -> None:
    assert differing(target, digests(target), recorded()) == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_target_computes_the_same_bits_over_two_hundred_batches() -> None:
    wanted = digests(PLAIN, batches=200)
    for target in TARGETS:
        assert differing(target, digests(target, batches=200), wanted) == [], target.name


def disassembly(library: Path, objdump: str = "objdump") -> str:
    return subprocess.run([objdump, "-d", library], capture_output=True, text=True, check=True).stdout


@pytest.mark.kernel_change
@pytest.mark.timeout(1800)
@pytest.mark.skipif(platform.machine() != "x86_64", reason="Tiles are of x86-64.")
def test_the_library_for_amx_is_compiled_with_its_instructions_on_any_machine() -> None:
    library = build_library(targets_of("x86_64")[0])
    assert ctypes.c_int64.in_dll(ctypes.CDLL(str(library)), "moeserve_has_tiles").value == 1
    listing = disassembly(library)
    names = ("ldtilecfg", "tileloadd", "tdpbssd", "tdpbsud", "tdpbf16ps", "tilestored", "tilerelease")
    assert [name for name in names if name not in listing] == []


for_arm = pytest.mark.parametrize("target", targets_of("aarch64"), ids=lambda target: target.name)
needs_emulator = pytest.mark.skipif(
    not shutil.which(COMPILER) or not shutil.which(EMULATOR), reason=f"needs {COMPILER} and {EMULATOR}"
)


@needs_emulator
@pytest.mark.long
@pytest.mark.timeout(3600)
@for_arm
def test_the_libraries_for_arm_are_compiled_with_their_instructions(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", COMPILER)
    listing = disassembly(build_library(target), COMPILER.replace("g++", "objdump"))
    names = {"aarch64-bf16": ("bfmlalb", "bfmlalt", "usdot"), "aarch64-dotprod": ("sdot",)}[target.name]
    assert [name for name in names if name not in listing] == []


@pytest.fixture(scope="module")
def emulated_digests() -> dict[str, dict[str, str]]:
    """Return the digests of each target for ARM; emulators, which take one core each, compute them at once."""
    names = [target.name for target in targets_of("aarch64")]
    with ThreadPoolExecutor(len(names)) as pool:
        found = pool.map(lambda name: digests(PLAIN, "tests.support.emulated_kernels", name), names)
        return dict(zip(names, found, strict=True))


@needs_emulator
@pytest.mark.long
@pytest.mark.timeout(3600)
@for_arm
def test_the_kernels_for_arm_compute_the_recorded_bits_in_an_emulator(
    target: Target, emulated_digests: dict[str, dict[str, str]]
) -> None:
    assert differing(target, emulated_digests[target.name], recorded()) == []
