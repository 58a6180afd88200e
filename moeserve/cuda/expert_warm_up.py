"""Launches the experts' kernels as any number of rows does: what arrives from other ranks follows no step's shape."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.gpu.moe_weights import GpuExperts
from kernels.specs import Activation
from moeserve.cuda.decoder import GpuDecoder
from moeserve.cuda.launch_variants import Choice
from moeserve.models.spec import MoeSpec


def launch_expert_variants(
    compute: Callable[[Tensor, Tensor, Tensor, GpuExperts, Activation], Tensor],
    experts: GpuExperts,
    decoder: GpuDecoder,
    moe: MoeSpec,
    variant: Choice,
    max_rows: int,
) -> None:
    """Every variant that up to `max_rows` rows are computed with, once. experts: of some layer, in slots."""
    smallest = {variant(num_rows): num_rows for num_rows in range(max_rows, 0, -1)}
    for num_rows in smallest.values():
        x = torch.zeros((num_rows, decoder.spec.hidden_size), dtype=decoder.dtype, device=decoder.device)
        slots = torch.arange(num_rows * moe.gate.top_k, device=decoder.device).remainder(experts.gate_up.num_slots)
        slots = slots.view(num_rows, -1)
        compute(x, slots, torch.zeros(slots.shape, device=decoder.device), experts, moe.activation)
