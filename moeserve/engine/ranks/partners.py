"""Ranks that compute every layer together, each with its shard of the weights, as one rank sees them.

All get the same plan and hold blocks with the same ids, each with the keys, values and states of its own heads. So
there is one scheduler and one prefix cache, as for a single rank, and every rank samples the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experts.placement.placement import Placement
from kernels.activation import Activation
from moeserve.model.shards import Shard, sharded
from moeserve.model.spec import DecoderSpec, ModelSpec

if TYPE_CHECKING:
    from experts.parallel.collectives import Collectives  # It imports deepspeed, which a single rank does not need.

# As `kernels.moe.moe_experts_partial`.
Compute = Callable[[Tensor, Tensor, Tensor, Any, Activation], Tensor]


class RankPartners:
    """Implements `moeserve.model.norms_over_ranks.Partners`.

    parts: the decoders of all shards. part: that of this rank's, of the layers that it has.
    """

    def __init__(
        self, collectives: Collectives, spec: DecoderSpec, layers: DecoderSpec, *, is_open: bool = True
    ) -> None:
        """collectives: of the partners alone. spec: of the whole model. layers: of the layers on these ranks. is_open:
        False where ranks compile each by itself before `open`; until then this rank's rows stand for those of all."""
        self._collectives, self._is_open = collectives, is_open
        size = collectives.num_ranks
        self.shard = Shard(collectives.rank, size)
        self.parts: list[ModelSpec] = [sharded(spec, Shard(number, size)) for number in range(size)]
        self.part = sharded(layers, self.shard)

    def add_up(self, parts: Tensor) -> Tensor:
        first, *others = self.gather(parts.float())
        # In the order of ranks, so that the sum has the same bits on each of them.
        for part in others:
            first.add_(part)
        return first.to(parts.dtype)

    def gather(self, rows: Tensor) -> Sequence[Tensor]:
        count, rows = self.shard.count, rows.contiguous()
        # Before `open`, in as much memory as the rows of all ranks take.
        of_ranks = self._collectives.all_gather(rows) if self._is_open else rows.repeat(count, 1)
        return of_ranks.chunk(count)

    def open(self) -> None:
        """Exchange rows with the other ranks from now on."""
        self._is_open = True

    def begin_capture(self) -> None:
        """Begin to exchange: graphs hold the sums of all ranks."""
        self.open()

    def decoding(self, _: int) -> AbstractContextManager[None]:
        """Return a context that does nothing: rows are exchanged within the layers."""
        return nullcontext()


class FirstRanksRows:
    """Has the first rank of a shard's group bring the rows, which all of the group have, to the experts of all ranks.

    The decoder adds up the results, which are zeros on the others. So the experts' outputs are in one place of the sum,
    whatever rows there are.
    """

    def __init__(self, shard: Shard, dispatch_of: Callable[[int], Compute]) -> None:
        """dispatch_of: of the rows of one rank."""
        self._is_first, self._dispatch_of = shard.number == 0, dispatch_of

    def dispatch_of(self, layer: int) -> Compute:
        dispatch = self._dispatch_of(layer)
        if self._is_first:
            return dispatch

        def serve(x: Tensor, ids: Tensor, weights: Tensor, experts: Any, activation: Activation) -> Tensor:
            dispatch(x[:0], ids[:0], weights[:0], experts, activation)
            return torch.zeros_like(x)

        return serve


class OwnExperts:
    """Computes the rows, which all ranks have, with the experts of one rank. The decoder adds up the ranks' sums."""

    def __init__(
        self,
        placement: Placement,
        moe_layers: Sequence[int],
        rank: int,
        compute_of: Callable[[int], Compute],
        *,
        by_ids: bool,
        device: torch.device | None = None,
    ) -> None:
        """compute_of: returns the function that computes a decoder layer's local experts. by_ids: it finds them by
        their ids in the model; otherwise each is in a slot of its own, in the order of the placement."""
        self._compute_of = compute_of
        # [E + 1], by decoder layer: the slot of each expert, -1 where another rank has it and for padding.
        self._slots = {
            layer: _slots(placement.experts_on(number, rank), placement.num_experts, by_ids=by_ids).to(device)
            for number, layer in enumerate(moe_layers)
        }

    def dispatch_of(self, layer: int) -> Compute:
        slots, compute = self._slots[layer], self._compute_of(layer)

        def dispatch(x: Tensor, ids: Tensor, weights: Tensor, experts: Any, activation: Activation) -> Tensor:
            return compute(x, slots[ids], weights, experts, activation).to(x.dtype) if len(x) else x

        return dispatch


def _slots(experts: Sequence[int], num_experts: int, *, by_ids: bool) -> Tensor:
    slots = torch.full((num_experts + 1,), -1, dtype=torch.int64)
    slots[list(experts)] = torch.tensor(experts) if by_ids else torch.arange(len(experts))
    return slots
