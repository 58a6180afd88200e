"""The simulator and the memory at work count the same on the same trace: they are driven by the same decisions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.experts.lab_traces import LabTrace
from benchmarks.experts.simulator import LayerTiming, LinkModel, Simulation, steps_of
from experts.memory.eviction import POLICIES
from experts.memory.file import PAGE_BYTES, write_expert_file
from experts.memory.memory import ExpertMemory
from experts.memory.residency import ResidencyControl, ResidencyCounters
from experts.memory.slots import SlotArena
from experts.memory.tiers import DiskTier

SOURCE = bytes(32)
NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, TOP_K, NUM_STREAMS = 3, 10, 6, 2, 3


def random_trace(num_tokens: int = 200) -> LabTrace:
    """Tokens that like some experts more than others."""
    rng = np.random.default_rng(5)
    likes = 0.5 + rng.random((NUM_LAYERS, 1, NUM_EXPERTS))
    ids = (rng.random((NUM_LAYERS, num_tokens, NUM_EXPERTS)) * likes).argsort(axis=2)[:, :, -TOP_K:]
    requests = np.sort(rng.integers(0, 12, num_tokens)).astype(np.int32)
    zeros = np.zeros(num_tokens, np.int32)
    return LabTrace(NUM_EXPERTS, ids.astype(np.uint16), requests, zeros)


def new_control(policy: str) -> ResidencyControl:
    return ResidencyControl([NUM_SLOTS] * NUM_LAYERS, NUM_EXPERTS, PAGE_BYTES, lambda _: POLICIES[policy](NUM_EXPERTS))


def counted_at_work(trace: LabTrace, policy: str, path: Path) -> ResidencyCounters:
    write_expert_file(
        path,
        source=SOURCE,
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        expert_bytes=PAGE_BYTES,
        experts=(memoryview(bytes([number]) * PAGE_BYTES) for number in range(NUM_LAYERS * NUM_EXPERTS)),
    )
    arena = SlotArena([NUM_SLOTS] * NUM_LAYERS, PAGE_BYTES)
    memory = ExpertMemory(new_control(policy), arena, DiskTier(path, SOURCE))
    for rows in steps_of(trace, NUM_STREAMS):
        for layer in range(NUM_LAYERS):
            left = set(np.unique(trace.ids[layer, rows]).tolist())
            memory.access(layer, left)
            while left:
                ready = memory.wait_ready(layer, left)
                contents = memory.contents(layer)
                for expert in ready:
                    assert arena.tensor_of(layer, contents.index(expert))[7] == layer * NUM_EXPERTS + expert
                memory.release(layer, ready)
                left -= set(ready)
    stats = memory.stats()
    memory.close()
    assert stats.num_in_flight == 0
    return stats.counters


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru"])
def test_both_count_the_same(policy: str, tmp_path: Path) -> None:
    trace = random_trace()
    simulation = Simulation(new_control(policy), PAGE_BYTES, LinkModel(1e9), LayerTiming(1e-5, 1e-5))
    simulated = simulation.replay(trace, NUM_STREAMS).counters
    assert counted_at_work(trace, policy, tmp_path / "experts.bin") == simulated
    assert simulated.num_evictions > 50
