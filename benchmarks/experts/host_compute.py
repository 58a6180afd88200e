"""Where absent experts are computed, simulated: copied, by the host, or shared between both by their costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np

from benchmarks.experts.figures import Amount, Figure, Progress, at_least, over_seeds
from benchmarks.experts.lab_traces import LabTrace, uniform_control
from benchmarks.experts.simulator import (
    HostModel,
    LayerTiming,
    LinkModel,
    SimulatedHost,
    Simulation,
    SimulationSetup,
    control_of,
)
from benchmarks.experts.synthetic_traces import SPARSE, synthetic_trace
from experts.memory.eviction import POLICIES
from experts.memory.host_share import HostShare

WAYS = ("copy", "host", "auto")
# A model of this many layers; layers do not wait for each other's experts.
_SPEC = replace(SPARSE, num_layers=6)
# Of one expert of Qwen3-30B-A3B in bfloat16: bytes, and operations of a row.
_EXPERT_BYTES, _ROW_OPERATIONS = 3 * 2048 * 768 * 2, 2 * 3 * 2048 * 768
# As measured for one row on an H200, see docs/benchmarks/gpu.md.
_TIMING = LayerTiming(attention=40e-6, experts=30e-6)
_CALL_SECONDS = 30e-6
_CHUNK_BYTES = 4 * 2**20


@dataclass(frozen=True, slots=True)
class Machine:
    """link, memory: bytes a second, from the host to the device and of the host's memory. operations: of the host, a
    second. bits: of a weight, on the host and over the link."""

    name: str
    link: float
    memory: float
    operations: float
    bits: int = 16

    @property
    def expert_bytes(self) -> int:
        return _EXPERT_BYTES * self.bits // 16

    def host(self) -> HostModel:
        return HostModel(_CALL_SECONDS, self.expert_bytes / self.memory, _ROW_OPERATIONS / self.operations)


MACHINES = (
    Machine("desktop, 16 bits", 25e9, 60e9, 0.6e12),
    Machine("desktop, 4 bits", 25e9, 60e9, 0.6e12, bits=4),
    Machine("server, 16 bits", 50e9, 250e9, 3e12),
    Machine("fast link, slow host", 200e9, 40e9, 0.4e12),
)


@dataclass(frozen=True, slots=True)
class Load:
    """num_rows: requests that run at a time, each a row of every step. is_uniform: experts are drawn at random."""

    name: str
    residency: float
    num_rows: int
    num_steps: int
    is_uniform: bool = False


LOADS = (
    Load("1 row, 25 %", 0.25, 1, 600),
    Load("1 row, 50 %", 0.5, 1, 600),
    Load("1 row, 50 %, uniform", 0.5, 1, 600, is_uniform=True),
    Load("8 rows, 50 %", 0.5, 8, 160),
    Load("512 rows, 50 %", 0.5, 512, 8),
)


def compute_simulated(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Tokens a second of `auto` over the better of copying alone and computing alone."""
    for machine in MACHINES:
        for load in LOADS:
            progress(f"{machine.name}, {load.name}")
            num_steps = amount.of(load.num_steps, load.num_steps // 4)
            values = over_seeds(amount.seeds, partial(rates, machine, replace(load, num_steps=num_steps)))
            better = [max(pair) for pair in zip(values["copy"], values["host"], strict=True)]
            ratio = tuple(auto / best for auto, best in zip(values["auto"], better, strict=True))
            means = {way: sum(of_way) / len(of_way) for way, of_way in values.items()}
            note = ", ".join(f"{way} {mean:.0f}" for way, mean in means.items()) + " tokens/s; simulated"
            name = f"{machine.name}, {load.name}"
            yield Figure(name, "the better of copy and host", ratio, "x", at_least(1.0), note=note)


def rates(machine: Machine, load: Load, seed: int) -> dict[str, float]:
    """Return tokens a second of `_SPEC`'s layers by way, over the second half of the steps."""
    trace = _trace(load, seed)
    return {way: rate(way, machine, load, trace) for way in WAYS}


@cache
def _trace(load: Load, seed: int) -> LabTrace:
    trace = synthetic_trace(_SPEC, load.num_rows, load.num_steps, seed)
    return uniform_control(trace, seed) if load.is_uniform else trace


def rate(way: str, machine: Machine, load: Load, trace: LabTrace) -> float:
    link = LinkModel(machine.link, chunk_bytes=_CHUNK_BYTES)
    setup = SimulationSetup(load.residency, "lfru", link, _TIMING, machine.expert_bytes, num_streams=load.num_rows)
    policies = [POLICIES[setup.policy](trace.num_experts) for _ in trace.ids]
    control = control_of(trace, setup, policies)
    host = None
    if way != "copy":
        model = machine.host()
        piece = min(_CHUNK_BYTES / machine.expert_bytes, 1.0)
        waits = way == "auto"
        share = HostShare(control, trace.num_experts, model.costs(), waits_for_copies=waits, piece_share=piece)
        host = SimulatedHost(share, model)
    simulation = Simulation(control, machine.expert_bytes, link, _TIMING, host=host)
    # Requests are of equal length.
    is_warm_up = np.arange(len(trace.requests)) % load.num_steps < load.num_steps // 2
    simulation.replay(trace.select(is_warm_up), load.num_rows)
    result = simulation.replay(trace.select(~is_warm_up), load.num_rows)
    return result.num_steps * load.num_rows / result.seconds
