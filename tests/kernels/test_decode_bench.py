"""The benchmark of whole decode steps: its bound, and that a tiny model is served as a large one would be."""

import types
from itertools import count

import pytest
import torch

from benchmarks.decode_steps import DecodeBench, Limits, Load, Throughput, max_model_len
from benchmarks.gpu import Ceilings, Deadline
from benchmarks.random_decoder import qwen3_moe_spec
from benchmarks.steps import QWEN3_30B, bound_tokens_per_second, decode_bytes, distinct_experts, main, report

TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "expert_width": 32,
    "top_k": 2,
    "vocab": 96,
}


def test_the_bound_of_a_known_model():
    spec = qwen3_moe_spec(**QWEN3_30B, max_position=4096)
    assert distinct_experts(128, 8, 1) == pytest.approx(8)
    assert distinct_experts(128, 8, 64) == pytest.approx(125.9, abs=0.05)
    # Per layer 37.7 MB of attention, 0.5 MB of gate and 75.5 MB of experts; 622 MB for the logits; 96 KiB a position.
    assert decode_bytes(spec, 1, 0, 2) == pytest.approx(48 * (37.75e6 + 0.52e6 + 75.5e6) + 622.3e6, rel=1e-3)
    assert decode_bytes(spec, 64, 1024, 2) - decode_bytes(spec, 64, 0, 2) == 64 * 1024 * 96 * 1024
    assert decode_bytes(spec, 64, 0, 2) - decode_bytes(spec, 64, 0, 2, distinct=100.0) == pytest.approx(
        48 * 25.94 * 9437184, rel=1e-2
    )
    assert bound_tokens_per_second(1000, 4, 5000.0) == 20.0


@pytest.mark.kernel_change
def test_all_requests_decode_in_every_timed_step(device):
    loads, limits, ticks = [Load(1, 5, 2), Load(3, 9, 2)], Limits(4, 16), count()
    bench = DecodeBench(TINY, loads, limits, device, clock=lambda: float(next(ticks)))
    assert bench.spec.num_layers == 2
    for load in loads:
        result = bench.run(load)
        assert (result.tokens, result.seconds) == (load.batch * load.steps, 1.0)
        assert load.prompt < result.context < max_model_len(load, limits)
        if load.batch == 1:
            assert result.distinct_experts == TINY["top_k"]
        assert TINY["top_k"] <= result.distinct_experts <= TINY["num_experts"]


def test_a_batch_that_leaves_no_room_for_prompts_is_refused(capsys):
    with pytest.raises(ValueError, match="no room"):
        DecodeBench(TINY, [Load(16, 5, 2)], Limits(4, 16), torch.device("cpu"))
    assert main(["--interpret", "--batch", "16", "--max-batched-tokens", "16"]) == 2
    assert capsys.readouterr().err == "Error: 16 requests leave no room for prompts in 16 tokens.\n"


class Bench:
    """Takes 100 s per load; a batch of 64 does not fit."""

    spec = qwen3_moe_spec(**QWEN3_30B, max_position=4096)
    now = 0.0

    def run(self, load):
        self.now += 100.0
        if load.batch == 64:
            raise RuntimeError("out of | memory")
        return Throughput(load.batch * load.steps, 0.2, 1060, 8.0)


def rows_of(monkeypatch, sizes, limit=1000.0, prompt=1024):
    gpu = {"name": "GPU", "multi_processor_count": 132, "total_memory": 2**37}
    monkeypatch.setattr("benchmarks.gpu.measure_ceilings", lambda _: Ceilings(4e12, 4e12, 8e14))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(**gpu))
    bench, loads = Bench(), [Load(batch, prompt, 64) for batch in (1, 64, 256)]
    deadline = Deadline(limit, lambda: bench.now)
    lines = list(report(bench, loads, sizes, torch.device("cpu"), deadline))
    assert lines[0] == "# Decode steps on GPU\n"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    assert {len(row) for row in rows} == {8}
    return rows[2:]


def test_a_row_says_how_its_target_stands_and_a_batch_that_fails_leaves_the_others(monkeypatch):
    one, failed, many = rows_of(monkeypatch, QWEN3_30B)
    assert one[:5] == ["1", "1060", "320", "3.12", "8.0"]
    assert one[7] == "250 tokens/s met"
    assert failed[1] == "FAILED: RuntimeError: out of / memory"
    assert many[7].startswith("70% of the bound ")
    assert [row[7] for row in rows_of(monkeypatch, QWEN3_30B, prompt=16)] == ["", "", ""]
    assert [row[7] for row in rows_of(monkeypatch, TINY)] == ["", "", ""]


def test_batches_beyond_the_time_limit_are_said_not_to_be_measured(monkeypatch):
    rows = rows_of(monkeypatch, QWEN3_30B, limit=150.0)
    assert [row[1] for row in rows] == [
        "1060",
        "FAILED: RuntimeError: out of / memory",
        "not measured: 150 s were used up",
    ]
