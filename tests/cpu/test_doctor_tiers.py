"""What `moeserve doctor` says of KV on disk and in a GPU's host, and the settings that it refuses as a start does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import launcher.doctor
import moeserve.machine
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.doctor import setups_of
from moeserve.engine.known_model import examine
from moeserve.engine.memory_plan import check_kv_tiers
from moeserve.machine import Gpu
from tests.cpu.test_doctor import GIB, HOPPER, MACHINE, QWEN3, ask, folder_of
from tests.support.tiny_models import save

GPU = Gpu("a GPU", 80 * GIB, 79 * GIB, *HOPPER, 1e12)
WITH_GPU = replace(MACHINE, gpus=(GPU,))


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    return folder_of(QWEN3, tmp_path)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(moeserve.machine, "read_machine", lambda _: MACHINE)
    save("mixtral", tmp_path)
    return tmp_path


def test_the_disk_that_kv_takes_is_told_with_its_tokens(tiny: Path) -> None:
    kv = tiny / "below" / "kv"
    said = ask(tiny, "--kv-cache-memory", "1MiB", "--kv-disk-path", str(kv), "--kv-disk-size", "2MiB").stdout
    (setup,) = setups_of(examine(tiny), MACHINE, ServeConfig(kv_cache_memory=2**20))
    tokens = 2 * 2**20 * setup.kv_tokens // setup.kv_bytes
    assert f"disk      at most 2 MiB of KV = about {tokens:,} tokens; {kv} has " in said
    assert "too little" not in said
    assert not kv.parent.exists()


def test_a_disk_that_is_too_small_for_its_kv_is_told(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher.doctor, "_free_below", lambda _: GIB)
    said = ask(tiny, "--kv-disk-path", str(tiny)).stdout
    assert "has 1 GiB free, too little: what finds no room is not kept" in said


def test_the_host_memory_of_a_gpu_is_counted_and_refused_as_at_a_start(qwen3: Path) -> None:
    model = examine(qwen3)
    for size, words in ((8 * GIB, None), (2**20, "is too little beside"), (40 * GIB, "of the host's memory are free")):
        on_cpu, on_gpu = setups_of(model, WITH_GPU, ServeConfig(kv_host_memory=size))[:2]
        assert on_cpu.obstacle is not None
        assert "--kv-host-memory" in on_cpu.obstacle
        if words is None:
            assert on_gpu.obstacle is None
            assert size - 2**23 < on_gpu.kv_host_bytes <= size
        else:
            assert on_gpu.obstacle is not None
            assert words in on_gpu.obstacle


@pytest.mark.parametrize(
    "options",
    [
        {"kv_host_memory": GIB},
        {"kv_disk_size": GIB},
        {"kv_overflow": "swap"},
        {"kv_disk_path": "kv", "enable_prefix_caching": False},
    ],
)
def test_settings_that_a_start_refuses_are_refused_once_in_its_words(options: dict[str, object], tiny: Path) -> None:
    config = ServeConfig(**options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        check_kv_tiers(config, "cpu")
    (setup,) = setups_of(examine(tiny), MACHINE, config)
    assert setup.obstacle == str(refused.value)


def test_a_folder_that_cannot_be_used_is_refused(tiny: Path) -> None:
    (tiny / "file").touch()
    said = ask(tiny, "--kv-disk-path", str(tiny / "file" / "kv")).stdout
    assert f"/file/kv, cannot be used: {tiny / 'file'} is not a folder." in said
    assert said.count("does not fit") == 1
