"""A layer's experts on a CPU when only some are in the fast tier: compute them as they arrive, to the same bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from experts.memory.memory import ExpertMemory
from experts.memory.slots import SlotArena
from experts.moe_layer import LoadingDispatch
from experts.observer import AnyObserver
from kernels.activation import Activation
from kernels.packed_experts import SplitExperts


class ResidentExperts(LoadingDispatch):
    """One layer's dispatch through its slots.

    The rows of an expert do not depend on when they are computed, and a token sums its results in the gate's order, so
    residency never changes a bit. experts: the layer's experts, none of them with weights yet. observers: receive
    `arrived` for the rows that this rank computes.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        arena: SlotArena,
        layer: int,
        experts: SplitExperts,
        observers: Sequence[AnyObserver],
    ) -> None:
        self._memory = memory
        self._arena = arena
        self._layer = layer
        self._experts = experts
        self._in_slots = [-1] * memory.num_slots(layer)
        self._observers = observers

    def partial(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        _: object,
        activation: Activation,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Tensor:
        memory, layer = self._memory, self._layer
        left = set(ids.flatten().tolist())
        some_elsewhere = -1 in left
        left.discard(-1)
        with memory.event(layer, left) as access:
            if self._observers:
                # The missing experts are loading meanwhile.
                arrived = x, ids, weights
                if some_elsewhere:
                    here = (ids >= 0).any(1)
                    arrived = x[here], ids[here], weights[here]
                for observer in self._observers:
                    observer.arrived(layer, *arrived)
            meanwhile()
            if access is None:
                return x.new_zeros(x.shape, dtype=torch.float32)
            if len(access.ready) == len(left):
                self._follow_slots()
                out = self._experts(x, ids, weights, activation)
                memory.release(layer, access.ready)
                return out
            # No kernel writes the products of remote experts.
            make = x.new_zeros if some_elsewhere else x.new_empty
            products = make((*ids.shape, x.shape[1]), dtype=torch.float32)
            for ready in memory.turns(layer, left):
                self._follow_slots()
                chosen = torch.isin(ids, torch.tensor(ready))
                self._experts.multiply(x, ids.where(chosen, -1), activation, products)
            return self._experts.combine(products, weights)

    def _follow_slots(self) -> None:
        """Tell the kernel which experts have moved, and where."""
        contents = self._memory.contents(self._layer)
        if contents == self._in_slots:
            return
        moved = [slot for slot, expert in enumerate(contents) if expert != self._in_slots[slot]]
        for slot in moved:
            if self._in_slots[slot] >= 0:
                self._experts.drop(self._in_slots[slot])
        for slot in moved:
            if contents[slot] >= 0:
                self._experts.put(contents[slot], self._arena.tensor_of(self._layer, slot))
        self._in_slots = contents
