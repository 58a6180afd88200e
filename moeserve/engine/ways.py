"""How fast a model decodes on several ranks, by which way they share it: a cost model, not a measurement.

A step reads the weights that its rows use and the keys and values of its requests from each rank's memory, spends a
fixed time on each layer beside that, and waits for rows from other ranks. Products are taken to cost nothing, which
holds for steps of few rows; experts are taken to be chosen evenly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

_ROW_BYTES, _PART_BYTES = 2, 4  # of a number that travels to another rank, and of one that is added up there


@dataclass(frozen=True, slots=True)
class Link:
    """Between ranks: bytes per second in one direction, and the seconds until a message is there."""

    name: str
    bytes_per_second: float
    seconds: float


NVLINK = Link("NVLink", 450e9, 8e-6)
PCIE = Link("PCIe 4.0 x16 through the host", 25e9, 25e-6)
LOOPBACK = Link("gloo within a machine", 5e9, 80e-6)
ETHERNET = Link("10 Gbit Ethernet", 1.1e9, 100e-6)


@dataclass(frozen=True, slots=True)
class RankMachine:
    """The hardware of each rank. num_bytes: its memory for weights, keys and values. bytes_per_second: at which that
    memory is read. layer_s: the seconds that a layer takes beside the reading."""

    num_bytes: int
    bytes_per_second: float
    layer_s: float


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """Bytes of a model as its ranks keep it. others_bytes: of all weights but experts and embedding, on all layers.
    expert_bytes: of one expert of one layer, 0 without experts. kv_bytes: of a token, in `num_kv_heads` heads that are
    not cut. shard_counts: into how many shards the model can be cut."""

    num_layers: int
    hidden_size: int
    shard_counts: Collection[int]
    num_kv_heads: int
    embedding_bytes: int
    others_bytes: int
    kv_bytes: int
    num_moe_layers: int = 0
    num_experts: int = 0
    top_k: int = 0
    expert_bytes: int = 0

    def chosen(self, num_rows: int) -> float:
        """Return how many experts of a layer `num_rows` rows choose between them, on average."""
        if not self.num_experts:
            return 0.0
        return self.num_experts * (1 - (1 - self.top_k / self.num_experts) ** num_rows)


@dataclass(frozen=True, slots=True)
class Way:
    """The numbers of stages, of groups of ranks that share the experts of each stage, and of shards of every layer,
    which are the ranks of a group. There are no shards of stages."""

    stages: int = 1
    experts: int = 1
    shards: int = 1

    @property
    def is_single(self) -> bool:
        """True unless two of the three are combined."""
        return (self.stages > 1) + (self.experts > 1) + (self.shards > 1) == 1

    @property
    def flags(self) -> tuple[str, ...]:
        sizes = {"pipeline": self.stages, "expert": self.experts, "tensor": self.shards}
        given = {name: size for name, size in sizes.items() if size > 1}
        return tuple(word for name, size in given.items() for word in (f"--{name}-parallel-size", str(size)))

    def rank_bytes(self, model: ModelCosts) -> int:
        """Return the bytes of the weights on the rank that has most of them."""
        experts = model.num_moe_layers * model.num_experts * model.expert_bytes
        # Stages are of equally many bytes, as nearly as layers allow.
        of_group = model.others_bytes + model.embedding_bytes + experts // self.experts
        return -(-of_group // (self.stages * self.shards))

    def kv_bytes(self, model: ModelCosts) -> int:
        """Return the bytes of a token on each rank that has a part of it."""
        return -(-model.kv_bytes // (self.stages * min(self.shards, model.num_kv_heads)))

    def tokens_per_second(
        self, model: ModelCosts, machine: RankMachine, link: Link, num_requests: int, context: int
    ) -> float:
        """Return how many tokens all of `num_requests` requests with this many tokens of context get per second."""
        rows = -(-num_requests // self.stages)  # of a step: as many steps are in flight as there are stages
        here = -(-rows // self.experts)
        # The busiest rank has one expert at least: experts are not cut.
        chosen = max(1.0, model.chosen(rows) / (self.experts * self.shards))
        read = model.others_bytes / (self.stages * self.shards) + here * context * self.kv_bytes(model)
        read += chosen * model.num_moe_layers * model.expert_bytes / self.stages
        seconds = read / machine.bytes_per_second + model.num_layers / self.stages * machine.layer_s
        if self.experts > 1:
            num_bytes = here * (self.experts - 1) * model.hidden_size * _ROW_BYTES
            seconds += 2 * model.num_moe_layers / self.stages * (link.seconds + num_bytes / link.bytes_per_second)
        if self.shards > 1:
            num_bytes = here * (self.shards - 1) * model.hidden_size * _PART_BYTES
            seconds += 2 * model.num_layers * (link.seconds + num_bytes / link.bytes_per_second)
        if self.stages > 1:
            # To the next stage, or home.
            seconds += link.seconds + here * model.hidden_size * _ROW_BYTES / link.bytes_per_second
        return num_requests / (self.stages * seconds)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A way of several ranks. rank_bytes: of weights. fits: beside keys and values of one request. one, many: tokens
    per second of a single request, and of many together."""

    way: Way
    rank_bytes: int
    fits: bool
    one: float
    many: float


def ways_of(model: ModelCosts, num_ranks: int) -> Iterator[Way]:
    """Yield the ways in which this many ranks can share a model."""
    for size in range(1, num_ranks + 1):
        experts, left = divmod(num_ranks, size)
        if left or (experts > 1 and (not model.num_experts or model.num_experts % experts)):
            continue
        if size <= model.num_layers:
            yield Way(size, experts)
        if size > 1 and size in model.shard_counts and not model.num_experts % num_ranks:
            yield Way(1, experts, size)


def estimates_of(
    model: ModelCosts, machine: RankMachine, link: Link, num_ranks: int, num_requests: int, context: int
) -> list[Estimate]:
    """Return all ways of `num_ranks` ranks, those that fit first, and of these the fastest for a single request."""
    found = []
    for way in ways_of(model, num_ranks):
        rank_bytes = way.rank_bytes(model)
        fits = rank_bytes + context * way.kv_bytes(model) <= machine.num_bytes
        speeds = (way.tokens_per_second(model, machine, link, number, context) for number in (1, num_requests))
        found.append(Estimate(way, rank_bytes, fits, *speeds))
    return sorted(found, key=lambda estimate: (not estimate.fits, -estimate.one))


def advised(estimates: list[Estimate]) -> tuple[Estimate, Estimate] | None:
    """Return the ways to take for one request and for many; None if none fits. A difference of a twentieth decides for
    the other figure: the model is not more exact than that."""
    fitting = [one for one in estimates if one.fits]
    if not fitting:
        return None
    best_one, best_many = max(one.one for one in fitting), max(one.many for one in fitting)
    for_one = max((one for one in fitting if one.one >= 0.95 * best_one), key=lambda one: one.many)
    for_many = max((one for one in fitting if one.many >= 0.95 * best_many), key=lambda one: one.one)
    return for_one, for_many
