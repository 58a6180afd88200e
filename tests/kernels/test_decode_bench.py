"""The benchmark of whole decode steps: its bound, and that a tiny model is served as a large one would be."""

from itertools import count

import pytest
import torch

from moeserve.bench.decode_bound import bound_tokens_per_second, decode_bytes, distinct_experts
from moeserve.bench.decode_steps import Limits, Load, max_model_len, measure
from moeserve.bench.decode_throughput import QWEN3_30B, _parser, _report
from moeserve.bench.kernel_timing import Ceilings
from moeserve.bench.random_model import qwen3_moe_spec

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
    assert bound_tokens_per_second(1000, 4, 5000.0) == 20.0


def test_all_requests_decode_in_every_timed_step(device):
    loads = [Load(1, 5, 2), Load(3, 9, 2)]
    ticks = count()
    results = list(measure(TINY, loads, Limits(4, 16), device, clock=lambda: float(next(ticks))))
    for load, (measured, spec, result) in zip(loads, results, strict=True):
        assert measured == load
        assert spec.num_layers == 2
        assert (result.tokens, result.seconds) == (load.batch * load.steps, 1.0)
        assert load.prompt < result.context < max_model_len(load, Limits(4, 16))


def test_a_batch_that_leaves_no_room_for_prompts_is_refused(device):
    with pytest.raises(ValueError, match="no room"):
        next(measure(TINY, [Load(16, 5, 2)], Limits(4, 16), torch.device("cpu")))


def test_batches_beyond_the_time_limit_are_said_not_to_be_measured(monkeypatch):
    """And no weights are made for them."""
    monkeypatch.setattr("moeserve.bench.kernel_timing.measure_ceilings", lambda _: Ceilings(4e12, 4e12, 8e14))
    monkeypatch.setattr("moeserve.bench.decode_steps.random_decoder", None)
    options = _parser().parse_args(["--time-limit", "0", "--batch", "1", "64"])
    lines = list(_report(options, torch.device("cpu"), "GPU"))
    assert [line for line in lines if "not measured" in line] == [
        f"| {batch} | not measured: 0 s were used up | | | | |" for batch in (1, 64)
    ]
