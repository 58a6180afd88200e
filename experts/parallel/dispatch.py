"""Expert parallelism: each rank holds some experts of every layer, and rows travel to them and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from experts.parallel.collectives import Collectives
from experts.parallel.exchange import AllGather, AllToAll, DeviceAllToAll, Exchange, FixedCapacity
from experts.parallel.tables import SlotTables
from experts.placement.placement import Placement, Ranks, refilled
from kernels.activation import Activation

# The experts of a layer as the kernels take them: packed on a CPU, tensors on a GPU.
Experts = TypeVar("Experts")
# As `kernels.moe.moe_experts_partial`: (x, slots, weights, experts, activation) -> [M, H] fp32.
Compute = Callable[[Tensor, Tensor, Tensor, Experts, Activation], Tensor]

# Rows of a step of decodes, and of a step with a prompt: a device computes more rows of it at once than a CPU.
_DECODE_ROWS = 16
_PROMPT_ROWS = {"cpu": 128, "cuda": 1024}
# Rounds to warm up, and to measure.
_DECODE_ROUNDS = 3, 21
_PROMPT_ROUNDS = 1, 3


class ExpertParallel(Generic[Experts]):
    """Brings the rows of a rank's decoder to the experts of all ranks, and counts the rows sent to each rank."""

    def __init__(
        self,
        collectives: Collectives,
        placement: Placement,
        moe_layers: Sequence[int],
        *,
        last_layer: int,
        compute: Compute[Experts],
        local_of: Callable[[int], Compute[Experts]] | None = None,
        for_devices: bool = False,
        combine_dtype: torch.dtype = torch.float32,
    ) -> None:
        """moe_layers: the number in the decoder of each layer of the placement. last_layer: the decoder's last layer.

        compute: computes the local experts, each in a slot of its own, in the order of the placement. local_of: returns
        the function that computes a decoder layer's local experts instead; it finds experts by their ids in the model.
        for_devices: exchange rows as suits a GPU; they stay on the device of the collectives. combine_dtype: of the
        parts of rows on their way home. All ranks have to agree on both.
        """
        self._collectives = collectives
        self._combine_dtype = combine_dtype
        self._last_layer = last_layer
        self._num_rows: Sequence[int] = ()
        self._num_logit_rows: Sequence[int] = ()
        self._exchanges: dict[str, Exchange] = {
            "allgather": AllGather(collectives),
            "alltoall": DeviceAllToAll(collectives) if for_devices else AllToAll(collectives),
            "fixed": FixedCapacity(collectives),
        }
        self._exchange = self._exchanges["allgather"]
        self._placed_layer = {layer: number for number, layer in enumerate(moe_layers)}
        self._placement = placement
        self._compute, self._local_of = compute, local_of
        ranks = range(placement.num_ranks)
        # [layer][rank][slot]: the expert there.
        self._slots: list[list[Sequence[int]]]
        if local_of is None:
            self._slots = [
                [placement.experts_on(layer, rank) for rank in ranks] for layer in range(placement.num_layers)
            ]
        else:
            self._slots = [[range(placement.num_experts) for _ in ranks] for _ in range(placement.num_layers)]
        self._tables = tuple(self._make_tables(layer) for layer in range(placement.num_layers))
        self._here = [self._find_experts_here(layer) for layer in range(placement.num_layers)]

    @property
    def placement(self) -> Placement:
        return self._placement

    def experts_here(self, layer: int) -> Collection[int]:
        return self._here[layer]

    def arrivals(self, layer: int, ranks: tuple[Ranks, ...]) -> dict[int, int]:
        """Return the new expert of each slot of this rank that changes if the layer is placed on `ranks`.

        Empty if experts are found by their ids: then they are loaded when rows come.
        """
        if self._local_of is not None:
            return {}
        here = self._collectives.rank
        before = self._slots[layer][here]
        after = refilled(before, self._placement.with_layer(layer, ranks).experts_on(layer, here))
        return {slot: expert for slot, expert in enumerate(after) if expert != before[slot]}

    def place(self, layer: int, ranks: tuple[Ranks, ...]) -> None:
        """Place a layer on other ranks from the next step on. All ranks do so before that step, after their arrivals.

        Tables keep their addresses and are written in the order of the stream, so captured graphs use the new ones.
        """
        self._placement = self._placement.with_layer(layer, ranks)
        if self._local_of is None:
            self._slots[layer] = [
                refilled(slots, self._placement.experts_on(layer, rank))
                for rank, slots in enumerate(self._slots[layer])
            ]
        self._tables[layer].become(self._make_tables(layer))
        self._here[layer] = self._find_experts_here(layer)

    @property
    def num_rows_sent(self) -> int:
        """The number of rows sent to other ranks, padding included."""
        return sum(self._collectives.traffic.rows_to)

    def sent(self) -> list[int]:
        """Return the rows sent to each rank, then the bytes handed over for each rank, both ways and with counts."""
        traffic = self._collectives.traffic
        return [*traffic.rows_to, *traffic.bytes_to]

    def use(self, shape: str) -> None:
        """Use the shape `allgather`, `alltoall` or `fixed` from the next step on."""
        self._exchange = self._exchanges[shape]

    def begin_step(self, num_rows: Sequence[int], num_logit_rows: Sequence[int]) -> None:
        """Set the number of rows that each rank has in this step, and in its last layer."""
        self._num_rows = num_rows
        self._num_logit_rows = num_logit_rows

    def dispatch_of(self, layer: int) -> Compute[Experts]:
        """Return the dispatch of a layer; the last layer computes only sampled rows."""
        is_last = layer == self._last_layer
        placed_layer = self._placed_layer[layer]
        compute = self._compute if self._local_of is None else self._local_of(layer)

        def dispatch(
            x: Tensor, expert_ids: Tensor, weights: Tensor, experts: Experts, activation: Activation
        ) -> Tensor:
            num_rows = self._num_logit_rows if is_last else self._num_rows
            if len(x) != num_rows[self._collectives.rank]:
                raise ValueError(f"{len(x)} rows in layer {layer}, but the plan says {num_rows}")
            if not any(num_rows):
                return x
            arrived = self._exchange.dispatch(x, expert_ids, weights, num_rows, self._tables[placed_layer])
            partial = compute(arrived.rows, arrived.slots, arrived.weights, experts, activation)
            return self._exchange.combine(partial.to(self._combine_dtype), arrived, num_rows).to(x.dtype)

        return dispatch

    def _make_tables(self, layer: int) -> SlotTables:
        here, device = self._collectives.rank, self._collectives.device
        return SlotTables.of(self._placement.serving(layer), self._slots[layer], here, device)

    def _find_experts_here(self, layer: int) -> frozenset[int]:
        return frozenset(self._placement.experts_on(layer, self._collectives.rank))

    def forget_counts(self) -> None:
        """Start counting rows and bytes at zero again."""
        self._collectives.forget_traffic()

    def measure(
        self,
        hidden_size: int,
        top_k: int,
        dtype: torch.dtype,
        experts: Sequence[Experts] = (),
        activation: Activation | None = None,
        *,
        max_rows: int,
    ) -> dict[int, dict[str, float]]:
        """Measure the seconds that each shape takes for one layer of a step, by rows of each rank: the mean over ranks
        of medians, of a small step and of one with a prompt. One size where `max_rows`, the rows that a step of a rank
        may have, are no more than a small step's.

        experts: the local experts of each placed layer. They compute in between, one layer after another, so that
        weights come from memory and ranks wait for the slowest one, as in a step. Without them rows are only exchanged.
        All ranks call it together and get the same result. Counts start at zero again.
        """
        measured = {}
        sizes = {_DECODE_ROWS: _DECODE_ROUNDS, _PROMPT_ROWS[self._collectives.device.type]: _PROMPT_ROUNDS}
        for rows, (warm_up, rounds) in {min(rows, max_rows): rounds for rows, rounds in sizes.items()}.items():
            random = torch.Generator().manual_seed(self._collectives.rank)
            x = torch.randn((rows, hidden_size), generator=random).to(dtype)
            scores = torch.rand((rows, self._placement.num_experts), generator=random)
            seconds = self._time(x, scores, top_k, experts, activation or Activation(), warm_up, rounds)
            measured[rows] = dict(zip(self._exchanges, seconds, strict=True))
        self.forget_counts()
        return measured

    def _time(
        self,
        x: Tensor,
        scores: Tensor,
        top_k: int,
        experts: Sequence[Experts],
        activation: Activation,
        warm_up: int,
        rounds: int,
    ) -> list[float]:
        """Return the seconds of each shape for the same rows on every rank. See `measure`."""
        device = self._collectives.device
        num_rows = [len(x)] * self._placement.num_ranks
        x = x.to(device)
        weights, expert_ids = scores.to(device).topk(top_k)
        seconds = torch.zeros((rounds, len(self._exchanges)), dtype=torch.float64)
        for round_number in range(warm_up + rounds):
            for number, exchange in enumerate(self._exchanges.values()):
                started = time.perf_counter()
                layer = round_number % len(experts) if experts else 0
                arrived = exchange.dispatch(x, expert_ids, weights, num_rows, self._tables[layer])
                partial = arrived.rows.float()
                if experts:
                    computed = (arrived.rows, arrived.slots, arrived.weights)
                    partial = self._compute(*computed, experts[layer], activation)
                exchange.combine(partial.to(self._combine_dtype), arrived, num_rows)
                self._collectives.waits.wait_for_device()
                if round_number >= warm_up:
                    seconds[round_number - warm_up, number] = time.perf_counter() - started
        # Medians, because another process that takes the core in between costs either shape milliseconds.
        means = self._collectives.all_gather(seconds.median(0, keepdim=True).values.to(device)).mean(0)
        found: list[float] = means.tolist()
        return found
