"""The experts of a layer of which only some are in a GPU's memory: computed as they arrive, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from experts.expert_memory import ExpertMemory
from experts.observer import AnyObserver
from kernels.gpu.moe import SlotExperts
from kernels.specs import Activation
from moeserve.model.gpu_kernels import rows_at_once


class GpuResidentExperts:
    """One layer's dispatch (`experts.moe_layer.Dispatch`) through its slots.

    What is missing is decided on the host, so the host waits for the gate's choice in every layer, and a graph cannot
    record the step. Whether experts are missing or not, the same kernels are launched: none is compiled while serving.
    observers: told of the rows that are computed here, their ids on the host.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        layer: int,
        experts: SlotExperts,
        max_rows: int,
        observers: Sequence[AnyObserver] = (),
    ) -> None:
        """experts: over the slots that the memory fills for this layer, with scratch for `max_rows` rows."""
        self._memory = memory
        self._layer = layer
        self._experts = experts
        self._max_rows = max_rows
        self._observers = observers

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor, _: object, activation: Activation) -> Tensor:
        return self.partial(x, expert_ids, weights, _, activation).to(x.dtype)

    def partial(self, x: Tensor, expert_ids: Tensor, weights: Tensor, _: object, activation: Activation) -> Tensor:
        """[T, H] fp32, over the experts that are computed here; -1 stands for others, by number in the model."""
        memory, layer, experts = self._memory, self._layer, self._experts
        chosen = expert_ids.cpu()
        wanted = set(chosen.flatten().tolist())
        some_elsewhere = -1 in wanted
        wanted.discard(-1)
        if wanted:
            memory.access(layer, wanted)
        if self._observers:
            # Missing experts are being loaded meanwhile.
            here = (chosen >= 0).any(1)
            rows = here.nonzero().flatten().to(x.device) if some_elsewhere else slice(None)
            arrived = x[rows], chosen[here], weights[rows]
            for observer in self._observers:
                observer.arrived(layer, *arrived)
        if not wanted:
            return x.new_zeros(x.shape, dtype=torch.float32)
        make = x.new_zeros if some_elsewhere else x.new_empty
        products = make((*expert_ids.shape, x.shape[1]), dtype=torch.float32)
        size = rows_at_once(len(x), self._max_rows)
        for ready in memory.turns(layer, wanted):
            contents = memory.contents(layer)
            # Who had a turn before may be overwritten now.
            few = len(ready) < len(wanted)
            experts.show([expert if expert in ready else -1 for expert in contents] if few else contents)
            for rows, ids, out in zip(*(part.split(size) for part in (x, expert_ids, products)), strict=True):
                experts.multiply(rows, ids, activation, out)
        return experts.combine(products, weights)
