"""Other attention kernels at the shapes of the attention cases: torch's own, and those of other servers.

Torch's read keys and values that lie contiguously and no block table, which makes them a bar rather than a replacement.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from moeserve.bench.kernel_case import Call, Peers
from moeserve.bench.kernel_cases_attention import AttentionCase, PreparedAttention
from moeserve.bench.kernel_peers_servers import server_attention

# A compilation per shape takes long, so one family of shapes has it.
_FLEX_KV_HEADS = 4
_BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


def attention_peers(prepared: PreparedAttention) -> Peers:
    """Peers of a case. Torch's compute equal lengths, 16-bit keys and values, no cached prefix."""
    case, peers = prepared.case, server_attention(prepared)
    length, count = case.seq_lens[0], case.query_lens[0]
    if (
        len(set(case.seq_lens)) > 1
        or case.latent
        or case.kv_dtype != case.dtype
        or (case.kind == "prefill" and count != length)
    ):
        return peers
    inputs = [contiguous_inputs(case, prepared.q.device) for _ in range(prepared.num_sets)]
    causal = case.kind == "prefill"
    torch_calls: dict[str, list[Call]] = {
        name: [partial(sdpa, backend, *own, causal) for own in inputs] for name, backend in _BACKENDS.items()
    }
    if case.kv_heads == _FLEX_KV_HEADS:
        torch_calls["flex_attention"] = [partial(flex, *own, causal) for own in inputs]
    else:
        peers.absent["flex_attention"] = f"only with {_FLEX_KV_HEADS} KV heads"
    for name, calls in torch_calls.items():
        try:
            calls[0]()
        except Exception as error:  # A backend without this shape, or a compiler that fails: whichever it is.
            peers.absent[name] = f"refuses: {type(error).__name__}"
        else:
            peers.calls[name] = calls
    return peers


def contiguous_inputs(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random q, keys, values [B, heads, length, D] of a case of equal lengths.

    In a decode the query heads that share a KV head are rows of it, so that keys and values are read once.
    """
    batch, length, group = len(case.seq_lens), case.seq_lens[0], case.num_heads // case.kv_heads
    rows = (case.kv_heads, group) if case.kind == "decode" else (case.num_heads, length)
    shapes = ((batch, *rows), (batch, case.kv_heads, length), (batch, case.kv_heads, length))
    q, keys, values = (torch.randn((*shape, case.key_dim), device=device, dtype=case.dtype) for shape in shapes)
    return q, keys, values


def sdpa(backend: SDPBackend, q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(
            q, keys, values, is_causal=causal, enable_gqa=q.shape[1] != keys.shape[1]
        )


def flex(q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    """Compiled on a GPU; elsewhere as it is, which only checks it."""
    mask = _causal_mask(q.shape[2], str(q.device)) if causal else None
    grouped = q.shape[1] != keys.shape[1]
    run = _compiled_flex() if q.device.type == "cuda" else flex_attention
    result: Tensor = run(q, keys, values, block_mask=mask, enable_gqa=grouped)
    return result


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_mask(length: int, device: str) -> Any:
    def visible(_batch: Tensor, _head: Tensor, row: Tensor, position: Tensor) -> Tensor:
        return row >= position

    return create_block_mask(visible, None, None, length, length, device=device)
