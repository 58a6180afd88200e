"""The experts of a layer of which only some are in a GPU's memory: computed as they arrive, with the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from experts.memory.expert_memory import ExpertMemory
from experts.prefetch.prefetcher import LayerListener
from kernels.gpu.moe_slots import SlotExperts
from kernels.specs import Activation


class GpuResidentExperts:
    """One layer's dispatch (`moeserve.cuda.parts.GpuDispatch`) through its slots.

    What is missing is decided on the host, so the host waits for the gate's choice in every layer, and a graph cannot
    record the step. Whether experts are missing or not, the same kernels are launched: none is compiled while serving.
    prefetcher: hears what the gate chose, if there is one.
    """

    def __init__(self, memory: ExpertMemory, layer: int, experts: SlotExperts) -> None:
        """experts: over the slots that the memory fills for this layer."""
        self._memory = memory
        self._layer = layer
        self._experts = experts
        self.prefetcher: LayerListener | None = None

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor, _: object, activation: Activation) -> Tensor:
        memory, layer, experts = self._memory, self._layer, self._experts
        chosen = expert_ids.cpu()
        wanted = set(chosen.flatten().tolist())
        has_padding = -1 in wanted
        wanted.discard(-1)
        if not wanted:
            return torch.zeros_like(x)
        memory.access(layer, wanted)
        if self.prefetcher is not None:
            # Missing experts are being loaded meanwhile.
            self.prefetcher.observe(layer, x, chosen, weights)
        make = x.new_zeros if has_padding else x.new_empty
        products = make((*expert_ids.shape, x.shape[1]), dtype=torch.float32)
        for ready in memory.turns(layer, wanted):
            contents = memory.contents(layer)
            # Who had a turn before may be overwritten now.
            few = len(ready) < len(wanted)
            experts.show([expert if expert in ready else -1 for expert in contents] if few else contents)
            experts.multiply(x, expert_ids, activation, products)
        return experts.combine(products, weights).to(x.dtype)
