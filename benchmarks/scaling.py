"""`python -m benchmarks.scaling`: bytes and times of a decode step on 8, 16 and 64 ranks, from stated assumptions.

A model of arithmetic alone: it runs no kernel and measures nothing. See docs/design/scaling.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

_MOVED_BYTES_PER_CHOICE = 6  # a slot in two bytes and a weight in four; see `experts.parallel.exchange.pack_rows`


@dataclass(frozen=True, slots=True)
class Model:
    """A mixture of experts. num_layers: with experts. weight_bytes: of one weight of an expert."""

    hidden: int = 7168
    intermediate: int = 2048
    num_experts: int = 256
    top_k: int = 8
    num_layers: int = 58
    weight_bytes: float = 1.0

    @property
    def expert_bytes(self) -> float:
        return 3 * self.hidden * self.intermediate * self.weight_bytes


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes per second of one rank: to ranks of its node, to other nodes, and from its memory, as experts of 256 tokens
    in bf16 read it on an H200 (docs/benchmarks-gpu.md). latency: seconds of one
    collective beyond its bytes. slack: the room of a fixed capacity, as a multiple of the rows that are expected."""

    ranks_per_node: int = 8
    inside: float = 400e9
    outside: float = 50e9
    memory: float = 4.0e12
    latency: float = 20e-6
    slack: float = 1.5


def ranks_of_a_row(model: Model, num_ranks: int) -> float:
    """Return the number of ranks that serve a row's experts, if each choice falls on any rank alike."""
    return num_ranks * (1 - (1 - 1 / num_ranks) ** model.top_k)


def row_bytes(model: Model, machine: Machine, num_ranks: int, num_rows: int) -> dict[str, tuple[float, float]]:
    """Return, by way of exchange, the bytes that a rank sends to one other rank in a layer: there, and back home."""
    there, choices = 2 * model.hidden, _MOVED_BYTES_PER_CHOICE * model.top_k
    expected = num_rows * ranks_of_a_row(model, num_ranks) / num_ranks
    capacity = min(num_rows, ceil(machine.slack * expected))
    return {
        "all-gather, fp32 home": (num_rows * (there + choices), num_rows * 4 * model.hidden),
        "all-gather, bf16 home": (num_rows * (there + choices), num_rows * 2 * model.hidden),
        "fixed capacity, bf16 home": (capacity * (there + choices), capacity * 2 * model.hidden),
        "counts first, bf16 home": (expected * (there + choices), expected * 2 * model.hidden),
    }


def step_seconds(model: Model, machine: Machine, num_ranks: int, each_way: tuple[float, float], *, calls: int) -> float:
    """Return the time that all layers of a step spend in exchanges. each_way: bytes for each other rank."""
    near = min(num_ranks, machine.ranks_per_node) - 1
    far = num_ranks - 1 - near
    # Both kinds of links work at once.
    of_bytes = max(sum(each_way) * near / machine.inside, sum(each_way) * far / machine.outside)
    return model.num_layers * (of_bytes + calls * machine.latency)


def expert_seconds(model: Model, machine: Machine, num_ranks: int, num_rows: int) -> float:
    """Return the time that a rank reads its chosen experts' weights in a step; the least that they take."""
    here = model.num_experts / num_ranks
    unused = (1 - model.top_k / model.num_experts) ** (num_ranks * num_rows)
    return model.num_layers * here * (1 - unused) * model.expert_bytes / machine.memory


def main() -> None:
    model, machine, num_rows = Model(), Machine(), 128
    print(f"{num_rows} decodes per rank, {model}, {machine}")
    print("| ranks | exchange | MB per layer and rank | ms per step, exchanges | ms per step, experts' weights |")
    print("|---|---|---|---|---|")
    for num_ranks in (8, 16, 64):
        experts = 1e3 * expert_seconds(model, machine, num_ranks, num_rows)
        for name, each_way in row_bytes(model, machine, num_ranks, num_rows).items():
            calls = 3 if name.startswith("counts") else 2
            seconds = step_seconds(model, machine, num_ranks, each_way, calls=calls)
            sent = sum(each_way) * (num_ranks - 1) / 1e6
            print(f"| {num_ranks} | {name} | {sent:.1f} | {1e3 * seconds:.1f} | {experts:.1f} |")


if __name__ == "__main__":
    main()
