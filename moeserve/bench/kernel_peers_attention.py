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
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from moeserve.bench.kernel_attention import PreparedAttention
from moeserve.bench.kernel_case import Call, Peers
from moeserve.bench.kernel_cases_attention import AttentionCase
from moeserve.bench.kernel_peers_servers import server_attention

# A compilation per shape takes long, so one family of shapes has it.
_FLEX_KV_HEADS = 4
_BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}


def attention_peers(prepared: PreparedAttention) -> Peers:
    """Peers of a case; of those that cannot compute it, the reasons."""
    case, peers = prepared.case, server_attention(prepared)
    if reason := _beyond_torch(case):
        peers.absent["torch"] = reason
        return peers
    inputs = [contiguous_inputs(case, prepared.tensors.q.device) for _ in range(prepared.num_sets)]
    causal = case.kind != "decode"
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


def _beyond_torch(case: AttentionCase) -> str | None:
    """Why torch's attention does not compute a case; None if it does."""
    if case.latent:
        return "no keys that are longer than the values they hold"
    if case.kv_dtype != case.dtype:
        return "keys and values only in the queries' dtype"
    if len(set(zip(case.seq_lens, case.query_lens, strict=True))) > 1:
        return "equal lengths only"
    return None


def contiguous_inputs(case: AttentionCase, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Random q [B, heads, rows, D], keys and values [B, KV heads, length, D] of a case of equal lengths.

    In a decode the query heads that share a KV head are rows of it, so that keys and values are read once.
    """
    batch, length = len(case.seq_lens), case.seq_lens[0]
    rows = (case.kv_heads, case.shape.group) if case.kind == "decode" else (case.num_heads, case.query_lens[0])
    shapes = ((batch, *rows), (batch, case.kv_heads, length), (batch, case.kv_heads, length))
    q, keys, values = (torch.randn((*shape, case.key_dim), device=device, dtype=case.dtype) for shape in shapes)
    return q, keys, values


def sdpa(backend: SDPBackend, q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    """With `causal` the last row sees all positions. A backend that has no such mask raises RuntimeError."""
    grouped = q.shape[1] != keys.shape[1]
    mask = causal_lower_right(q.shape[2], keys.shape[2]) if causal and q.shape[2] != keys.shape[2] else None
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=grouped
        )


def flex(q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    """The same. Compiled on a GPU; elsewhere as it is, which only checks it."""
    mask = _causal_mask(q.shape[2], keys.shape[2], str(q.device)) if causal else None
    grouped = q.shape[1] != keys.shape[1]
    run = _compiled_flex() if q.device.type == "cuda" else flex_attention
    result: Tensor = run(q, keys, values, block_mask=mask, enable_gqa=grouped)
    return result


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention, dynamic=False)


@cache
def _causal_mask(rows: int, length: int, device: str) -> Any:
    first = length - rows

    def visible(_batch: Tensor, _head: Tensor, row: Tensor, position: Tensor) -> Tensor:
        return first + row >= position

    return create_block_mask(visible, None, None, rows, length, device=device)
