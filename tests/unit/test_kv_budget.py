"""Sizing the KV pool, and reading how much memory there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeserve.config import ConfigError
from moeserve.device import KvBudget, available_bytes, plan_kv

GIB = 2**30


def plan(**changes: int | None) -> KvBudget:
    values: dict[str, int | None] = {
        "block_bytes": 2**20,
        "block_size": 16,
        "available_bytes": 10 * GIB,
        "kv_cache_memory": None,
        "model_max_len": 8192,
        "max_model_len": None,
    }
    return plan_kv(**{**values, **changes})  # type: ignore[arg-type]


def test_by_default_the_pool_takes_half_of_the_rest_but_never_more_than_four_gib() -> None:
    assert plan().num_blocks == 4096
    assert plan(available_bytes=2 * GIB + 2**29).num_blocks == 1024


def test_the_models_context_is_clamped_to_the_pool() -> None:
    assert plan(kv_cache_memory=100 * 2**20) == KvBudget(100, 1600)


def test_a_context_asked_for_must_fit_the_pool_and_the_model() -> None:
    with pytest.raises(ConfigError, match="8192 tokens"):
        plan(max_model_len=9000)
    with pytest.raises(ConfigError, match="hold 1600 tokens; 4000 tokens need 250 MiB"):
        plan(kv_cache_memory=100 * 2**20, max_model_len=4000)
    assert plan(max_model_len=4000).max_model_len == 4000


def test_more_memory_than_is_free_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match="asks for 20480 MiB; beside the weights only 9728 MiB are free"):
        plan(kv_cache_memory=20 * GIB)


def test_too_little_memory_for_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 MiB of KV memory"):
        plan(available_bytes=0)


def test_a_containers_limit_cuts_the_available_memory(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 16000000 kB\nMemAvailable:   8000000 kB\n")
    cgroup = tmp_path / "cgroup"
    assert available_bytes(cgroup, meminfo) == 8000000 * 1024
    cgroup.mkdir()
    (cgroup / "memory.max").write_text("max\n")
    (cgroup / "memory.current").write_text("5000\n")
    assert available_bytes(cgroup, meminfo) == 8000000 * 1024
    (cgroup / "memory.max").write_text("1000000\n")
    (cgroup / "memory.stat").write_text("anon 10\ninactive_file 3000\n")
    assert available_bytes(cgroup, meminfo) == 998000
