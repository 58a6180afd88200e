"""Torch's own attention at the shapes of the attention cases, over keys and values that lie contiguously."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from moeserve.bench.kernel_case import Call
from moeserve.bench.kernel_cases_attention import AttentionCase

_BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


def attention_peers(case: AttentionCase, num_sets: int, device: torch.device) -> dict[str, list[Call]]:
    """Peers that can compute this case: equal lengths, 16-bit keys and values, no cached prefix. They read no block
    table, which makes them a bar rather than a replacement. Those that refuse the shape here are left out."""
    length, count = case.seq_lens[0], case.query_lens[0]
    if (
        len(set(case.seq_lens)) > 1
        or case.latent
        or case.kv_dtype != case.dtype
        or (case.kind == "prefill" and count != length)
    ):
        return {}
    batch, group = len(case.seq_lens), case.num_heads // case.kv_heads
    calls: dict[str, list[Call]] = {name: [] for name in _BACKENDS}
    for _ in range(num_sets):
        keys, values = (_random(case, device, batch, case.kv_heads, length) for _ in range(2))
        if case.kind == "decode":
            # Query heads that share a KV head as rows: keys and values are read once.
            q = _random(case, device, batch, case.kv_heads, group)
        else:
            q = _random(case, device, batch, case.num_heads, length)
        for name, backend in _BACKENDS.items():
            calls[name].append(partial(_attend, backend, q, keys, values, case.kind == "prefill"))
    return {name: own for name, own in calls.items() if _works(own[0])}


def _random(case: AttentionCase, device: torch.device, *shape: int) -> Tensor:
    return torch.randn((*shape, case.key_dim), device=device, dtype=case.dtype)


def _attend(backend: SDPBackend, q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(
            q, keys, values, is_causal=causal, enable_gqa=q.shape[1] != keys.shape[1]
        )


def _works(call: Call) -> bool:
    try:
        call()
    except RuntimeError:
        return False
    return True
