"""Launches the experts' kernels as any number of rows does: what arrives from other ranks follows no step's shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernels.gpu.moe_weights import GpuExperts
from kernels.specs import Activation
from moeserve.cuda.launch_variants import Choice
from moeserve.model.decoder import Decoder
from moeserve.model.spec import MoeSpec


def launch_expert_variants(
    compute: Callable[[Tensor, Tensor, Tensor, GpuExperts, Activation], Tensor],
    experts: GpuExperts,
    decoder: Decoder,
    moe: MoeSpec,
    variant: Choice,
    max_rows: int,
    ids: Sequence[int],
) -> None:
    """Every variant that up to `max_rows` rows are computed with, once. experts: of some layer, which goes by `ids`."""
    smallest = {variant(num_rows): num_rows for num_rows in range(max_rows, 0, -1)}
    for num_rows in smallest.values():
        x = torch.zeros((num_rows, decoder.spec.hidden_size), dtype=decoder.dtype, device=decoder.device)
        places = torch.arange(num_rows * moe.gate.top_k).remainder(len(ids)).view(num_rows, -1)
        chosen = torch.tensor(ids)[places].to(decoder.device)
        compute(x, chosen, torch.zeros(chosen.shape, device=decoder.device), experts, moe.activation)
