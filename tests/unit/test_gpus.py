"""Which GPUs and which driver the launcher finds, on Linux and under WSL2."""

from __future__ import annotations

from pathlib import Path

import pytest

import launcher.gpus
from launcher.gpu_choice import remember, remembered
from launcher.gpus import driver_version, gpu_names

H100, RTX_4090 = "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the driver, which is not there yet; no nvidia-smi is there either."""
    monkeypatch.setattr(launcher.gpus, "_DRIVER", tmp_path / "driver")
    monkeypatch.setattr(launcher.gpus, "_PROGRAMS_OF_WSL", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "driver"


@pytest.fixture
def smi(tmp_path: Path) -> Path:
    """Return where the machine's nvidia-smi is to be."""
    return tmp_path / "nvidia-smi"


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o700)
    launcher.gpus._ask.cache_clear()


def answering(driver: str) -> str:
    return f"""[ "$1" = --query-gpu=driver_version,uuid,name ] && printf '{driver}, GPU-a1, {H100}\\n\
{driver}, GPU-b2, {RTX_4090}\\n'"""


def test_gpus_are_named_by_the_driver(driver: Path) -> None:
    (driver / "gpus").mkdir(parents=True)
    assert gpu_names() == []
    (driver / "gpus" / "0000:01:00.0").mkdir()
    (driver / "gpus" / "0000:01:00.0" / "information").write_text("Model: \t\t NVIDIA H200\nIRQ: 1\n")
    assert gpu_names() == ["NVIDIA H200"]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("", []),
        ("-1", []),
        ("1", [RTX_4090]),
        ("1,0", [RTX_4090, H100]),
        ("0,7,1", [H100]),
        ("GPU-b2", [RTX_4090]),
        ("GPU-ff", []),
        ("MIG-c3", [f"{H100} MIG"]),
    ],
)
def test_gpus_that_the_environment_hides_are_not_named(
    driver: Path, monkeypatch: pytest.MonkeyPatch, visible: str, names: list[str]
) -> None:
    for place, (name, uuid) in enumerate(((H100, "GPU-a1"), (RTX_4090, "GPU-b2"))):
        gpu = driver / "gpus" / f"0000:0{place}:00.0"
        gpu.mkdir(parents=True)
        (gpu / "information").write_text(f"Model: \t {name}\nGPU UUID: \t {uuid}\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_names() == names


def test_nvidia_smi_names_gpus_and_driver_where_there_is_no_folder_of_the_driver_as_under_wsl2(
    smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (gpu_names(), driver_version()) == ([], "")
    write_program(smi, answering("581.42"))
    assert gpu_names() == [H100, RTX_4090]
    assert driver_version() == "581.42"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b2")
    assert gpu_names() == [RTX_4090]


def test_the_driver_of_linux_is_asked_before_nvidia_smi(smi: Path, driver: Path) -> None:
    write_program(smi, answering("581.42"))
    (driver / "gpus").mkdir(parents=True)
    (driver / "version").write_text("NVRM version: 580.1\nGCC version: 12\n")
    assert (gpu_names(), driver_version()) == ([], "NVRM version: 580.1")


@pytest.mark.parametrize(
    "script",
    [
        "exec /usr/bin/tail -f /dev/null",
        f"{answering('581.42')}; exit 9",
        "echo No devices were found",
        "printf '\\377\\n'",
    ],
)
def test_an_nvidia_smi_that_hangs_fails_or_names_nothing_is_no_gpu(
    smi: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    if "tail" in script:
        monkeypatch.setattr(launcher.gpus, "_SMI_SECONDS", 0.1)
    write_program(smi, script)
    assert (gpu_names(), driver_version()) == ([], "")


def test_checks_of_a_gpu_are_made_anew_once_nvidia_smi_tells_another_driver(
    smi: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path / "cache"))
    write_program(smi, answering("581.42"))
    remember([H100], ["a fault"])
    assert remembered([H100]) == ["a fault"]
    write_program(smi, answering("590.10"))
    assert remembered([H100]) is None
