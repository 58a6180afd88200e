"""The simulator counts on a trace what the memory with its copying thread counts."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.experts.lab_traces import LabTrace
from benchmarks.experts.simulator import LayerTiming, LinkModel, Simulation, steps_of
from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.memory.eviction import POLICIES
from experts.memory.file import round_to_page
from experts.memory.memory import ExpertMemory
from experts.memory.residency import ResidencyControl, ResidencyCounters
from experts.memory.slots import SlotArena

EXPERT_BYTES = round_to_page(1)


class OwnNumbers:
    """A tier whose experts consist of their own number."""

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        out[:] = bytes([expert]) * len(out)

    def close(self) -> None:
        """Nothing is open."""


def control_of(policy: str, num_slots: int, trace: LabTrace) -> ResidencyControl:
    return ResidencyControl(
        [num_slots] * len(trace.ids), trace.num_experts, EXPERT_BYTES, lambda layer: POLICIES[policy](trace.num_experts)
    )


def counted_by_the_memory(control: ResidencyControl, num_slots: int, trace: LabTrace, num_streams: int):
    arena = SlotArena([num_slots] * len(trace.ids), EXPERT_BYTES)
    memory = ExpertMemory(control, arena, OwnNumbers())
    try:
        for rows in steps_of(trace, num_streams):
            for layer in range(len(trace.ids)):
                remaining = np.unique(trace.ids[layer, rows]).tolist()
                memory.access(layer, remaining)
                while remaining:
                    ready = memory.wait_ready(layer, remaining)
                    for expert in ready:
                        slot = control.layers[layer].slot_of(expert)
                        assert arena.tensor_of(layer, slot)[0] == expert
                    memory.release(layer, ready)
                    remaining = [expert for expert in remaining if expert not in ready]
        return memory.stats().counters
    finally:
        memory.close()


def counted_by_the_simulator(control: ResidencyControl, trace: LabTrace, num_streams: int) -> ResidencyCounters:
    simulation = Simulation(control, EXPERT_BYTES, LinkModel(1e9), LayerTiming(1e-6, 1e-6))
    return simulation.replay(trace, num_streams).counters


@pytest.mark.parametrize("policy", ["lru", "lfu", "lfru"])
@pytest.mark.parametrize(("num_slots", "num_streams"), [(6, 1), (9, 3)])
def test_demand_loads_alone(policy: str, num_slots: int, num_streams: int) -> None:
    trace = synthetic_trace(SyntheticSpec(4, 12, 3, popularity=0.6), 6, 30, 1)
    memory = counted_by_the_memory(control_of(policy, num_slots, trace), num_slots, trace, num_streams)
    simulator = counted_by_the_simulator(control_of(policy, num_slots, trace), trace, num_streams)
    assert memory == simulator
    assert simulator.num_misses > 100
    assert simulator.num_hits > 100
