"""Torch's attention kernels at the shapes of the attention cases.

They read keys and values that lie contiguously and no block table, which makes them a bar rather than a replacement.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernels.torch_peers import forget_compiled
from moeserve.tune.attention_cases import AttentionCase
from moeserve.tune.kernel_case import Call, Peers
from moeserve.tune.prepared_attention import PreparedAttention

# A compilation per shape takes seconds, so some shapes of one family have it: sequences, positions, new tokens.
_FLEX_KV_HEADS = 4
_FLEX_SHAPES = {
    (1, 32768, 1),
    (8, 4096, 1),
    (64, 4096, 1),
    (256, 4096, 1),
    (64, 4112, 16),
    (1, 4096, 4096),
    (1, 16384, 16384),
    (1, 8704, 512),
}
_BACKENDS = {"SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION}
Inputs = tuple[Tensor, Tensor, Tensor]


def attention_peers(prepared: PreparedAttention) -> Peers:
    """Peers of a case; of those that cannot compute it, the reasons."""
    case, peers = prepared.case, Peers()
    if reason := _beyond_torch(case):
        peers.absent["torch"] = reason
    elif len(set(zip(case.seq_lens, case.query_lens, strict=True))) > 1:
        _add(peers, "varlen_attn", partial(_varlen_calls, case, prepared))
    else:
        _add_of_equal_lengths(peers, case, prepared)
    return peers


def _add_of_equal_lengths(peers: Peers, case: AttentionCase, prepared: PreparedAttention) -> None:
    inputs = [contiguous_inputs(case, prepared.tensors.q.device) for _ in range(prepared.num_sets)]
    causal, group = case.kind != "decode", case.shape.group
    for name, backend in _BACKENDS.items():
        ways = [partial(_sdpa_calls, backend, inputs, causal)]
        if causal and group > 1:
            # A backend may know no groups of query heads, nor may the mask of an extend.
            ways.append(partial(_sdpa_calls, backend, inputs, causal, group))
        _add(peers, name, *ways)
    if case.kv_heads == _FLEX_KV_HEADS and (len(case.seq_lens), case.seq_lens[0], case.query_lens[0]) in _FLEX_SHAPES:
        forget_compiled()
        _add(peers, "flex_attention", lambda: [partial(flex, *own, causal) for own in inputs])
    else:
        peers.absent["flex_attention"] = "not compiled for this shape"


def _add(peers: Peers, name: str, *ways: Callable[[], list[Call]]) -> None:
    """The calls of the first way that run, or why those of the last do not."""
    for way in ways:
        try:
            calls = way()
            calls[0]()
        except Exception as error:  # A backend without this shape, or a compiler that fails: whichever it is.
            peers.absent[name] = f"refuses: {type(error).__name__}"
        else:
            peers.calls[name] = calls
            peers.absent.pop(name, None)
            return


def _beyond_torch(case: AttentionCase) -> str | None:
    """Why torch's attention does not compute a case; None if it does."""
    if case.latent:
        return "no keys that are longer than the values they hold"
    if case.kv_dtype != case.dtype:
        return "keys and values only in the queries' dtype"
    return None


def contiguous_inputs(case: AttentionCase, device: torch.device) -> Inputs:
    """Random q [B, heads, rows, D], keys and values [B, KV heads, length, D] of a case of equal lengths.

    In a decode the query heads that share a KV head are rows of it, so that keys and values are read once.
    """
    batch, length = len(case.seq_lens), case.seq_lens[0]
    rows = (case.kv_heads, case.shape.group) if case.kind == "decode" else (case.num_heads, case.query_lens[0])
    shapes = ((batch, *rows), (batch, case.kv_heads, length), (batch, case.kv_heads, length))
    q, keys, values = (_normal((*shape, case.key_dim), case.dtype, device) for shape in shapes)
    return q, keys, values


@cache
def _generator(device: str) -> torch.Generator:
    """Its own: torch's global one may be left in a graph that could not be captured."""
    return torch.Generator(device).manual_seed(0)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=_generator(str(device)))


def _sdpa_calls(backend: SDPBackend, inputs: list[Inputs], causal: bool, repeats: int = 1) -> list[Call]:
    """repeats: of every head of keys and values. Prompts are bound by their products, so that this costs little."""
    return [
        partial(sdpa, backend, q, keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1), causal)
        if repeats > 1
        else partial(sdpa, backend, q, keys, values, causal)
        for q, keys, values in inputs
    ]


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


def _varlen_calls(case: AttentionCase, prepared: PreparedAttention) -> list[Call]:
    """Torch's flash attention over sequences of several lengths, one behind the other without padding."""
    device = prepared.tensors.q.device
    starts = torch.tensor([0, *case.seq_lens], device=device).cumsum(0).to(torch.int32)
    # Torch 2.11 takes groups of query heads without a word; later ones want to be told.
    attend = _varlen_attn()
    options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(attend).parameters else {}
    calls: list[Call] = []
    for _ in range(prepared.num_sets):
        keys, values = (_normal((sum(case.seq_lens), case.kv_heads, case.key_dim), case.dtype, device) for _ in "kv")
        calls.append(
            partial(
                attend,
                prepared.tensors.q,
                keys,
                values,
                prepared.tensors.query_starts,
                starts,
                max(case.query_lens),
                max(case.seq_lens),
                window_size=(-1, 0),
                **options,
            )
        )
    return calls


def _varlen_attn() -> Callable[..., Any]:
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn
