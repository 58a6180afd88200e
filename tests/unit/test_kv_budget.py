"""Sizing the KV pool, and reading how much memory there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moeserve.config import ConfigError
from moeserve.device import KvBudget, StateDemand, WindowDemand, available_bytes, plan_kv, what_limits_memory

GIB = 2**30
MIB = 2**20


def plan(**changes: Any) -> KvBudget:
    values: dict[str, Any] = {
        "block_bytes": 2**20,
        "block_size": 16,
        "available_bytes": 10 * GIB,
        "kv_cache_memory": None,
        "model_max_len": 8192,
        "max_model_len": None,
        "max_num_seqs": 64,
        "most_bytes": 2**60,
    }
    return plan_kv(**{**values, **changes})


def test_by_default_the_pool_takes_most_of_the_rest_whatever_the_machine_has() -> None:
    assert plan(available_bytes=2 * GIB + 2**29).num_blocks == int(0.85 * 2048)
    assert plan(available_bytes=100 * GIB + 2**29).num_blocks == int(0.85 * 100 * 1024)


def test_by_default_the_pool_holds_no_more_than_four_contexts_for_each_request_that_may_run() -> None:
    assert plan(max_num_seqs=1, model_max_len=1600).num_blocks == 4 * 100
    assert plan(max_num_seqs=2, max_model_len=800).num_blocks == 8 * 50


def test_by_default_the_pool_of_a_demo_keeps_to_its_bound() -> None:
    assert plan(most_bytes=GIB).num_blocks == 1024
    assert plan(most_bytes=100 * GIB).num_blocks == int(0.85 * 9.5 * 1024)


def test_the_models_context_is_clamped_to_the_pool() -> None:
    assert plan(kv_cache_memory=100 * 2**20) == KvBudget(100, 1600)


def test_a_context_asked_for_must_fit_the_pool_and_the_model() -> None:
    with pytest.raises(ConfigError, match="8192 tokens"):
        plan(max_model_len=9000)
    with pytest.raises(ConfigError, match="hold 1600 tokens; 4000 tokens need 250 MiB"):
        plan(kv_cache_memory=100 * 2**20, max_model_len=4000)
    assert plan(max_model_len=4000).max_model_len == 4000


def test_more_memory_than_is_free_is_refused_with_numbers() -> None:
    with pytest.raises(ConfigError, match=r"asks for 20 GiB; beside the weights only 9\.5 GiB are free"):
        plan(kv_cache_memory=20 * GIB)


def test_too_little_memory_for_two_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is too small: beside the weights .* 0 bytes of KV memory"):
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


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    (tmp_path / "meminfo").write_text("MemAvailable:   8000000 kB\n")
    return tmp_path


def write_group(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def room(machine: Path, membership: str) -> int:
    (machine / "own").write_text(membership)
    return available_bytes(machine / "cgroup", machine / "meminfo", machine / "own")


def test_the_limit_of_the_processs_own_group_counts(machine: Path) -> None:
    write_group(machine / "cgroup/system.slice/moeserve.service", memory__max=3_000_000, memory__current=500_000)
    assert room(machine, "0::/system.slice/moeserve.service\n") == 2_500_000


def test_the_limit_of_a_group_above_counts_and_the_tightest_wins(machine: Path) -> None:
    write_group(machine / "cgroup/a", memory__max=2_000_000, memory__current=1_200_000)
    write_group(machine / "cgroup/a/b", memory__max=5_000_000, memory__current=100)
    write_group(machine / "cgroup/a/b/c", memory__max="max", memory__current=100)
    assert room(machine, "0::/a/b/c\n") == 800_000


def test_a_group_that_is_slowed_down_beyond_a_size_has_that_limit(machine: Path) -> None:
    write_group(machine / "cgroup/a", memory__max="max", memory__high=900_000, memory__current=100_000)
    assert room(machine, "0::/a\n") == 800_000


def test_limits_of_version_1_count(machine: Path) -> None:
    files = {"memory__limit_in_bytes": 1_500_000, "memory__usage_in_bytes": 600_000}
    write_group(machine / "cgroup/memory/docker/x", **files, memory__stat="cache 7\ntotal_inactive_file 50000")
    membership = "12:cpu,cpuacct:/elsewhere\n5:memory:/docker/x\n1:name=systemd:/\n0::/\n"
    assert room(machine, membership) == 950_000


def test_in_a_container_the_mount_is_the_group_where_the_named_path_is_the_hosts(machine: Path) -> None:
    write_group(machine / "cgroup/memory", memory__limit_in_bytes=1_500_000, memory__usage_in_bytes=1_000_000)
    assert room(machine, "5:memory:/docker/0123\n") == 500_000


def test_no_limit_leaves_what_the_machine_has(machine: Path) -> None:
    write_group(machine / "cgroup/memory", memory__limit_in_bytes=9223372036854771712, memory__usage_in_bytes=1)
    assert room(machine, "5:memory:/\n") == 8_000_000 * 1024
    (machine / "own").unlink()
    assert available_bytes(machine / "nowhere", machine / "meminfo", machine / "own") == 8_000_000 * 1024


def test_more_used_than_the_limit_leaves_nothing(machine: Path) -> None:
    write_group(machine / "cgroup/a", memory__max=100, memory__current=200)
    assert room(machine, "0::/a\n") == 0


def with_windows(memory: int, *, of_windows: int, window: int = 128, **changes: Any) -> KvBudget:
    """One MiB per block over all layers, `of_windows` of it in layers that see `window` tokens; 8 requests at once."""
    demand = WindowDemand(of_windows, window, max_num_seqs=8, step_tokens=256)
    return plan(kv_cache_memory=memory, windows=demand, available_bytes=20 * GIB, **changes)


@pytest.mark.parametrize(
    ("window", "num_blocks", "num_window_blocks"), [(128, 8192, 2048), (682, 7680, 2560), (1024, 6827, 3413)]
)
def test_layers_with_a_window_get_fewer_blocks_than_the_others_the_longer_it_is_the_more(
    window: int, num_blocks: int, num_window_blocks: int
) -> None:
    budget = with_windows(5120 * MIB, of_windows=MIB // 2, window=window)
    assert budget == KvBudget(num_blocks, 8192, num_window_blocks=num_window_blocks, window=window)


def test_window_blocks_for_all_that_may_run_at_once_come_first_up_to_half_of_one_pool() -> None:
    # 8 requests of 8 + 2 blocks and a step of 16 tokens' blocks.
    assert with_windows(220 * MIB, of_windows=MIB // 2).num_window_blocks == 96
    assert with_windows(160 * MIB, of_windows=MIB // 2).num_window_blocks == 80
    assert with_windows(160 * MIB, of_windows=MIB // 2).num_blocks == 240


def test_a_context_that_is_asked_for_comes_before_window_blocks() -> None:
    budget = with_windows(64 * MIB, of_windows=MIB // 2, max_model_len=1824)
    assert budget == KvBudget(114, 1824, num_window_blocks=14, window=128)
    with pytest.raises(ConfigError, match=r"64 MiB of KV memory hold 1.* tokens; 1920 tokens need 65 MiB"):
        with_windows(64 * MIB, of_windows=MIB // 2, max_model_len=1920)


def test_where_all_layers_have_a_window_all_memory_is_window_blocks() -> None:
    assert with_windows(512 * MIB, of_windows=MIB) == KvBudget(2048, 8192, num_window_blocks=512, window=128)


def test_too_little_memory_or_a_context_within_the_window_leaves_all_layers_together() -> None:
    assert with_windows(24 * MIB, of_windows=MIB // 2) == KvBudget(24, 384)
    assert with_windows(512 * MIB, of_windows=MIB // 2, max_model_len=144) == KvBudget(512, 144)
    assert with_windows(8 * MIB, of_windows=MIB) == KvBudget(8, 128)


def test_snapshots_take_what_both_pools_leave() -> None:
    budget = with_windows(220 * MIB, of_windows=MIB // 2, states=StateDemand(32 * MIB, 8, None))
    assert (budget.num_state_slots, budget.num_snapshots, budget.num_window_blocks) == (8, 1, 96)


def test_without_recurrent_layers_no_memory_is_for_states() -> None:
    assert (plan().num_state_slots, plan().num_snapshots) == (0, 0)


def test_running_requests_get_a_state_slot_each_and_snapshots_a_quarter_of_the_kv_memory() -> None:
    # 9728 MiB are free beside the reserve; slots take 512 MiB, KV and snapshots 0.85 of the rest.
    num_blocks = int(0.85 * (9728 - 512) / 1.25)
    with_states = plan(states=StateDemand(64 * MIB, 8, None))
    assert with_states == KvBudget(num_blocks, 8192, num_state_slots=8, num_snapshots=num_blocks // 4 // 64)
    demand = StateDemand(64 * MIB, 8, None)
    assert plan(states=demand, available_bytes=2 * GIB).num_blocks == int(0.85 * (1536 - 512) / 1.25)


def test_states_of_running_requests_leave_half_of_the_memory_to_kv() -> None:
    budget = plan(states=StateDemand(256 * MIB, 64, None), available_bytes=2 * GIB + 512 * MIB)
    assert (budget.num_state_slots, budget.num_blocks) == (4, int(0.85 * 1024 / 1.25))
    assert plan(states=StateDemand(900 * MIB, 64, None), available_bytes=2 * GIB).num_state_slots == 1


def test_snapshots_take_what_they_are_told_to() -> None:
    assert plan(states=StateDemand(64 * MIB, 8, 640 * MIB)).num_snapshots == 10
    assert plan(states=StateDemand(64 * MIB, 8, 0)).num_snapshots == 0


@pytest.mark.parametrize(
    ("demand", "sentence"),
    [
        (StateDemand(20 * GIB, 8, None), "state of a request takes 20 GiB; beside the weights only 9.5 GiB"),
        (StateDemand(64 * MIB, 8, 20 * GIB), "--state-cache-memory .*20 GiB.* 1.3 GiB"),
        (StateDemand(64 * MIB, 8, MIB), "--state-cache-memory .*64 MiB"),
    ],
)
def test_memory_for_states_that_cannot_be_had_is_refused_with_numbers(demand: StateDemand, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(states=demand)


def test_the_limit_that_is_too_small_is_named(tmp_path: Path) -> None:
    group = tmp_path / "cgroup"
    group.mkdir()
    own = tmp_path / "own"
    own.write_text("0::/\n")
    assert what_limits_memory(group, own) == "The machine's free memory"
    (group / "memory.max").write_text("1600000000\n")
    assert what_limits_memory(group, own) == "The memory limit of 1.4 GiB"
    (group / "memory.max").write_text("max\n")
    assert what_limits_memory(group, own) == "The machine's free memory"
