"""Under prefetches the simulator counts what the memory with its copying thread counts, where time decides nothing.

On both sides all that was asked for arrives before the computation goes on: by a fast link, or by waiting for the
thread. What arrives in time on a slow link depends on clocks, and is then the same only as nearly as the clocks are.
"""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.experts.lab_traces import GateGuesses, LabTrace
from benchmarks.experts.simulator import GatesAhead, LayerTiming, LinkModel, Simulation, steps_of
from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.memory.memory import ExpertMemory
from experts.memory.residency import ResidencyControl, ResidencyCounters
from experts.memory.slots import SlotArena
from experts.prediction.planning import LookaheadPlanner
from experts.routing.files import Tap
from tests.cpu.test_expert_simulation_agrees import EXPERT_BYTES, OwnNumbers, control_of

TOP_K, REACH = 2, 2


def guessed_trace() -> LabTrace:
    """Gates that are often wrong, one and two layers ahead."""
    trace = synthetic_trace(SyntheticSpec(5, 10, TOP_K, popularity=0.6), 6, 20, 1)
    rng = np.random.default_rng(0)
    guesses = []
    for distance in range(1, REACH + 1):
        logits = rng.standard_normal((5 - distance, trace.ids.shape[1], 10))
        truth = trace.ids[distance:].astype(np.int64)
        np.put_along_axis(logits, truth, np.take_along_axis(logits, truth, 2) + 1.5, 2)
        guesses.append(GateGuesses(Tap.EARLY, distance, logits.astype(np.float16)))
    return LabTrace(10, trace.ids, trace.requests, trace.token_ids, tuple(guesses))


def counted_by_the_memory(control: ResidencyControl, num_slots: int, trace: LabTrace) -> ResidencyCounters:
    memory = ExpertMemory(control, SlotArena([num_slots] * len(trace.ids), EXPERT_BYTES), OwnNumbers())
    planner = LookaheadPlanner(control, TOP_K, REACH)

    def ask(layer: int, distances: range, logits: np.ndarray) -> None:
        memory.decide(lambda _: planner.ask(layer, distances, logits))

    try:
        for rows in steps_of(trace, 2):
            for layer in range(len(trace.ids)):
                event = np.unique(trace.ids[layer, rows]).tolist()
                memory.access(layer, event)
                if distances := planner.distances(layer, REACH):
                    of_all = [trace.guesses[distance - 1].logits[layer, rows] for distance in distances]
                    ask(layer, distances, np.stack(of_all))
                for _ in memory.turns(layer, event):
                    """The experts are computed."""
                with memory._changed:
                    while len(control._queue):
                        memory._changed.wait(0.01)
        return memory.stats().counters
    finally:
        memory.close()


@pytest.mark.parametrize("policy", ["lru", "lfru"])
def test_all_that_is_asked_for_arrives(policy: str) -> None:
    trace, num_slots = guessed_trace(), 5
    control = control_of(policy, num_slots, trace)
    # However short a load takes, the plan looks as far as it can: two layers ahead.
    ahead = GatesAhead(LookaheadPlanner(control, TOP_K, REACH), Tap.EARLY)
    simulation = Simulation(control, EXPERT_BYTES, LinkModel(1e12), LayerTiming(0.5, 0.5), ahead)
    simulated = simulation.replay(trace, 2).counters
    assert counted_by_the_memory(control_of(policy, num_slots, trace), num_slots, trace) == simulated
    assert simulated.num_misses > 100
    assert simulated.useful_bytes > 50 * EXPERT_BYTES
    assert simulated.wasted_bytes > 0
