"""`python -m benchmarks.snapshots`: reused tokens, by where snapshots are kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.snapshots import agents_load, every, main, only_the_last, policies, with_snapshots
from moeserve.bench.workloads import Shape

# 4 GiB of KV and a quarter of that for the states of Qwen3.5-35B-A3B.
MEMORY, NUM_SNAPSHOTS = 209_715, 16


def test_agents_reuse_nearly_all_with_states_in_a_quarter_of_the_memory_for_kv() -> None:
    load = agents_load(Shape())
    cached = {}
    for name, policy in policies(load).items():
        service = with_snapshots(MEMORY if policy else MEMORY * 5 // 4, NUM_SNAPSHOTS, load, policy)
        service.serve(load)
        assert service.num_prompt > 24_000
        cached[name] = service.num_cached
    assert cached["the service's"] >= 0.95 * cached["no states needed"]
    assert cached["the service's"] >= cached["every block"] > cached["only the last"]


def test_other_policies_keep_what_their_names_say() -> None:
    assert only_the_last(16, 64, (), 96, 32) == [96]
    assert every(32)(32, 64, (), 112, 32) == [64, 96, 112]


def test_a_trace_is_served_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    requests = [
        {"input_length": 5000, "hash_ids": list(range(10))},
        {"input_length": 5000, "hash_ids": [*range(5), *range(20, 25)]},
        {"input_length": 5000, "hash_ids": [*range(5), *range(30, 35)]},
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(one) + "\n" for one in requests))
    main(["--trace", str(trace), "--memory", "64000", "--state", "1000"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "64000 tokens of KV, 16 snapshots of 1000 tokens"
    # Nine blocks, five of them shared: the third prompt finds the state that the second one left where they branch.
    assert [line for line in lines if line.startswith("| end and branching |")] == [
        "| end and branching | 16.7 % | 50.0 % | 4 | 1 | 0 |"
    ]
