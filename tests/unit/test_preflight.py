"""Settings that would have no effect, and machines that cannot serve, are refused in one sentence."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from launcher.preflight import check_settings, frontends_for, odd_settings
from moeserve.config import ConfigError, ServeConfig, load_config


@pytest.mark.parametrize(
    ("settings", "flag", "needed"),
    [
        ({"dispatch": "alltoall"}, "--dispatch", "--expert-parallel-size"),
        ({"num_redundant_experts": 2}, "--num-redundant-experts", "--expert-parallel-size"),
        ({"expert_policy": "lru"}, "--expert-policy", "--expert-memory"),
        ({"expert_prefetch": "gate"}, "--expert-prefetch", "--expert-memory"),
        ({"expert_compute": "host"}, "--expert-compute host", "--expert-memory"),
        ({"expert_memory": 1 << 30, "expert_compute": "host"}, "--expert-compute host", "--device cuda"),
        ({"rebalance_threshold": 0.2, "expert_parallel_size": 2}, "--rebalance-threshold", "--rebalance-interval"),
        ({"enforce_eager": True}, "--enforce-eager", "--device cuda"),
        ({"quantization": "experts=fp8"}, "--quantization experts=fp8", "--device cuda"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype", "--device cuda"),
        ({"gpu_memory_utilization": 0.5, "device": "cpu"}, "--gpu-memory-utilization", "--device cuda"),
    ],
)
def test_a_setting_without_what_it_needs_is_refused(settings: dict[str, object], flag: str, needed: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag} .*needs {needed}"):
        check_settings(ServeConfig(**settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"expert_memory": 1 << 30, "expert_policy": "lru", "expert_prefetch": "gate"},
        {"device": "cuda", "enforce_eager": True, "gpu_memory_utilization": 0.5},
        {"device": "cuda", "quantization": "experts=fp8", "kv_cache_dtype": "fp8_e4m3"},
        {"expert_parallel_size": 2, "dispatch": "alltoall"},
        {"expert_parallel_size": 2, "rebalance_interval": 8, "rebalance_threshold": 0.2},
    ],
)
def test_a_setting_with_what_it_needs_is_taken(settings: dict[str, object]) -> None:
    check_settings(ServeConfig(**settings))  # type: ignore[arg-type]


def test_a_machine_that_allows_too_few_open_files_is_named_in_one_sentence() -> None:
    command = f"ulimit -n 16; exec {sys.executable} -c 'from launcher.cli import main; main()' serve"
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "Error: A process may open only 16 files here, and moeserve needs 64 (ulimit -n).\n"


@pytest.mark.parametrize(
    ("limit", "most"), [(64, 4), (53, 1), (1024, 484), (1048576, None), (resource.RLIM_INFINITY, None)]
)
def test_fewer_connections_than_asked_for_are_told(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int | None
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, limit))
    sentences = list(odd_settings(ServeConfig()))
    if most is None:
        assert sentences == []
    else:
        (sentence,) = sentences
        assert f"--max-connections is lowered from 1024 to {most}: a process may open only {limit} files" in sentence


@pytest.mark.parametrize(("cores", "expected"), [(1, 1), (2, 1), (8, 1), (16, 2), (63, 7), (64, 8), (256, 8)])
def test_auto_is_a_frontend_for_each_eight_cores(cores: int, expected: int) -> None:
    assert frontends_for(cores, 1024) == expected


@pytest.mark.parametrize(("num_streams", "expected"), [(1, 1), (32, 1), (33, 2), (64, 2), (256, 8), (1024, 8)])
def test_auto_is_no_more_frontends_than_streams_need(num_streams: int, expected: int) -> None:
    assert frontends_for(256, num_streams) == expected


@pytest.mark.parametrize(("given", "expected"), [("auto", 0), ("3", 3), (2, 2)])
def test_the_number_of_frontends_may_be_auto(given: str | int, expected: int) -> None:
    assert load_config({"num_frontends": given}, {}).num_frontends == expected
