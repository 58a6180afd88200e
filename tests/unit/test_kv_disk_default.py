"""Where KV is kept on disk when the user says nothing about it."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from launcher.kv_disk import said_of_disk, with_kv_disk
from moeserve.config import ServeConfig
from moeserve.engine.kv.disk.files import disk_root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOESERVE_CACHE", str(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**12))
    return tmp_path


def decided(notices: list[str] | None = None, **settings: Any) -> ServeConfig:
    found: list[str] = []
    config = with_kv_disk(ServeConfig(**settings), (found if notices is None else notices).append)
    assert notices is not None or not found
    return config


def test_a_service_on_loopback_keeps_kv_in_a_private_folder_of_the_cache(cache: Path) -> None:
    config = decided()
    assert (config.kv_disk_path, config.kv_disk_size) == ("auto", 10 * 10**9)
    assert disk_root("auto") == cache / "kv"
    assert stat.S_IMODE((cache / "kv").stat().st_mode) == 0o700
    assert str(cache / "kv") in (said_of_disk(config) or "")


def test_ranks_of_one_machine_keep_it_too(cache: Path) -> None:
    assert decided(pipeline_parallel_size=2).kv_disk_path == "auto"
    assert decided(expert_parallel_size=2).kv_disk_path == "auto"
    assert decided(tensor_parallel_size=2).kv_disk_path == "auto"


@pytest.mark.parametrize(
    "settings",
    [
        {"kv_disk_path": "none"},
        {"host": "0.0.0.0"},
        {"enable_prefix_caching": False},
        {"device": "cuda"},
        {"nnodes": 2},
        {"expert_parallel_size": 2, "rebalance_interval": 60.0},
    ],
)
def test_other_services_keep_none_and_leave_no_folder(settings: dict[str, Any], cache: Path) -> None:
    config = decided(**settings)
    assert config.kv_disk_path is None
    assert said_of_disk(config) is None
    assert list(cache.iterdir()) == []


def test_a_folder_and_a_size_of_the_users_stay(cache: Path) -> None:
    assert decided(kv_disk_path="/data/kv").kv_disk_path == "/data/kv"
    assert decided(kv_disk_size=5).kv_disk_size == 5
    assert decided(kv_disk_path="auto", host="0.0.0.0").kv_disk_path == "auto"


def test_a_small_disk_is_filled_by_half_and_a_full_one_is_one_notice(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=4 * 10**9))
    assert decided().kv_disk_size == 2 * 10**9
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10**6))
    notices: list[str] = []
    assert decided(notices).kv_disk_path is None
    assert len(notices) == 1
    assert "only" in notices[0]


def test_a_folder_that_cannot_be_used_is_one_notice_and_no_failure(cache: Path) -> None:
    (cache / "kv").write_text("a file")
    notices: list[str] = []
    assert decided(notices).kv_disk_path is None
    assert "its folder cannot be used" in notices[0]
    os.unlink(cache / "kv")
    (cache / "kv").mkdir()
    (cache / "kv").chmod(0o777)
    assert decided(notices).kv_disk_path is None
    assert "all users may write to it" in notices[1]


def test_tests_keep_no_kv_in_the_users_own_cache() -> None:
    assert os.environ["MOESERVE_KV_DISK_PATH"] == "none"
