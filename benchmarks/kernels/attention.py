"""Attention: the shapes that are measured, and torch's kernels as peers.

Torch's read keys and values that lie contiguously and no block table, which makes them a bar rather than a replacement.
"""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernels.attention_case import AttentionCase, Kind, PreparedAttention, prepare
from benchmarks.kernels.cases import KernelCase, Peers, PlannedCase, Section
from benchmarks.kernels.measure import Call

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
MAX_KV_BYTES = 20 * 10**9
_FP8 = torch.float8_e4m3fn
_LATENT: dict[str, Any] = {"num_heads": 128, "kv_heads": 1, "key_dim": 576, "value_dim": 512, "latent": True}


def attention_sections(device: torch.device, num_sms: int) -> Iterator[Section]:
    cases = attention_cases()
    titles = {"decode": "Decode attention", "extend": "Attention of short extends", "prefill": "Prefill attention"}
    for kind, title in titles.items():
        planned = [
            PlannedCase(case.name, partial(attention_case, case, device, num_sms))
            for case in cases
            if case.kind == kind
        ]
        yield Section(title, planned)


def attention_case(case: AttentionCase, device: torch.device, num_sms: int) -> KernelCase:
    prepared = prepare(case, device, num_sms)
    peers = attention_peers(prepared)
    return KernelCase(
        [partial(prepared.run, index) for index in range(prepared.num_sets)],
        peers.calls,
        case.num_bytes,
        case.num_flops,
        {"sets": str(prepared.num_sets), "config": str(prepared.config)},
        peers.absent,
        partial(prepared.relative_error, 0),
    )


def attention_cases() -> list[AttentionCase]:
    """Return decodes at several batch sizes and lengths, ragged, over fp8 and latent; short extends; prefills.

    Each has at most 20 GB of keys and values.
    """
    cases = []
    for kv_heads in (4, 8):
        for batch in (1, 8, 64, 256):
            for length in (512, 4096, 32768):
                cases.append(_decode(f"{batch} x {length}", [length] * batch, kv_heads=kv_heads))
        cases.append(_decode("64 ragged", ragged_lengths(64), kv_heads=kv_heads))
        cases.append(_decode("64 x 4096 fp8", [4096] * 64, kv_heads=kv_heads, kv_dtype=_FP8))
        for count in (4, 16):
            cases.append(_extend(f"64 x {count} over 4096", [4096] * 64, [count] * 64, kv_heads=kv_heads))
        cases += _prefills(kv_heads)
    cases.append(_decode("1 x 32768 fp8", [32768], kv_dtype=_FP8))
    cases.append(_decode("256 x 4096 fp8", [4096] * 256, kv_dtype=_FP8))
    cases.append(_decode("64 x 4096 blocks of 16", [4096] * 64, block_size=16))
    cases.append(_decode("64 x 4096 latent", [4096] * 64, **_LATENT))
    cases.append(_decode("64 x 4096 latent fp8", [4096] * 64, **_LATENT, kv_dtype=_FP8))
    cases.append(_extend("64 ragged", ragged_lengths(64), few_tokens(64)))
    cases.append(_extend("64 x 8 over 4096 fp8", [4096] * 64, [8] * 64, kv_dtype=_FP8))
    cases.append(_case("prefill", "1 x 4096 fp8", [4096], [4096], kv_dtype=_FP8))
    return [case for case in cases if case.kv_bytes <= MAX_KV_BYTES]


def ragged_lengths(batch: int, seed: int = 0) -> list[int]:
    """Draw log-normal lengths between 128 and 32768 with a median of 2048."""
    draw = random.Random(seed)
    return [min(32768, max(128, round(2048 * math.exp(draw.gauss(0, 1.2))))) for _ in range(batch)]


def few_tokens(batch: int, seed: int = 0) -> list[int]:
    """Draw numbers of new tokens of short extends, 1 to 16, all equally likely."""
    draw = random.Random(seed)
    return [draw.randint(1, 16) for _ in range(batch)]


def _decode(name: str, lengths: Sequence[int], **shape: Any) -> AttentionCase:
    return _case("decode", name, lengths, [1] * len(lengths), **shape)


def _extend(name: str, prefixes: Sequence[int], counts: Sequence[int], **shape: Any) -> AttentionCase:
    lengths = [prefix + count for prefix, count in zip(prefixes, counts, strict=True)]
    return _case("extend", name, lengths, counts, **shape)


def _case(kind: Kind, name: str, lengths: Sequence[int], counts: Sequence[int], **shape: Any) -> AttentionCase:
    heads = f"{shape.get('num_heads', 32)}/{shape.get('kv_heads', 4)} heads"
    return AttentionCase(f"{kind} {name}, {heads}", kind, tuple(lengths), tuple(counts), **shape)


def _prefills(kv_heads: int) -> list[AttentionCase]:
    """Return prefills; the last continues a prompt with too many new tokens for an extend."""
    shapes = {
        "1 x 1024": ([1024], [1024]),
        "1 x 4096": ([4096], [4096]),
        "1 x 16384": ([16384], [16384]),
        "8 x 1024": ([1024] * 8, [1024] * 8),
        "512 over 8192": ([8192 + 512], [512]),
    }
    return [_case("prefill", name, *lengths, kv_heads=kv_heads) for name, lengths in shapes.items()]


def attention_peers(prepared: PreparedAttention) -> Peers:
    """Return the peers of a case, and for others why they cannot compute it."""
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
    causal, group = case.kind != "decode", case.group
    for name, backend in _BACKENDS.items():
        ways = [partial(_sdpa_calls, backend, inputs, causal)]
        if causal and group > 1:
            # A backend may know no groups of query heads, nor may the mask of an extend.
            ways.append(partial(_sdpa_calls, backend, inputs, causal, group))
        _add(peers, name, *ways)
    if case.kv_heads == _FLEX_KV_HEADS and (len(case.seq_lens), case.seq_lens[0], case.query_lens[0]) in _FLEX_SHAPES:
        # Torch compiles a limited number of shapes of a function, then runs it as it is.
        torch.compiler.reset()
        _add(peers, "flex_attention", lambda: [partial(flex, *own, causal) for own in inputs])
    else:
        peers.absent["flex_attention"] = "not compiled for this shape"


def _add(peers: Peers, name: str, *ways: Callable[[], list[Call]]) -> None:
    """Add the calls of the first way that runs, or the reason why the last does not."""
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
    """Return why torch's attention does not compute a case; None if it does."""
    if case.latent:
        return "no keys that are longer than the values they hold"
    if case.kv_dtype != case.dtype:
        return "keys and values only in the queries' dtype"
    return None


def contiguous_inputs(case: AttentionCase, device: torch.device) -> Inputs:
    """Make random q [B, heads, rows, D], keys and values [B, KV heads, length, D] of a case of equal lengths.

    In a decode the query heads that share a KV head are rows of it, so that keys and values are read once.
    """
    batch, length = len(case.seq_lens), case.seq_lens[0]
    rows = (case.kv_heads, case.group) if case.kind == "decode" else (case.num_heads, case.query_lens[0])
    shapes = ((batch, *rows), (batch, case.kv_heads, length), (batch, case.kv_heads, length))
    q, keys, values = (_normal((*shape, case.key_dim), case.dtype, device) for shape in shapes)
    return q, keys, values


@cache
def _generator(device: str) -> torch.Generator:
    """Return a generator of our own: torch's global one may be left in a graph that could not be captured."""
    return torch.Generator(device).manual_seed(0)


def _normal(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device).normal_(generator=_generator(str(device)))


def _sdpa_calls(backend: SDPBackend, inputs: list[Inputs], causal: bool, repeats: int = 1) -> list[Call]:
    """repeats: copies of every KV head. Prompts are bound by their products, so that copies cost little."""
    return [
        partial(sdpa, backend, q, keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1), causal)
        if repeats > 1
        else partial(sdpa, backend, q, keys, values, causal)
        for q, keys, values in inputs
    ]


def sdpa(backend: SDPBackend, q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    """Attend by one backend; with `causal` the last row sees all positions. Raise RuntimeError if the backend has no
    such mask."""
    grouped = q.shape[1] != keys.shape[1]
    mask = causal_lower_right(q.shape[2], keys.shape[2]) if causal and q.shape[2] != keys.shape[2] else None
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(
            q, keys, values, attn_mask=mask, is_causal=causal and mask is None, enable_gqa=grouped
        )


def flex(q: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
    """Attend as `sdpa` does, compiled on a GPU, uncompiled elsewhere, where it is only checked."""
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
    """Call torch's flash attention over sequences of several lengths, packed without padding."""
    device = prepared.tensors.q.device
    starts = torch.tensor([0, *case.seq_lens], device=device).cumsum(0).to(torch.int32)
    # Torch 2.11 accepts groups of query heads by itself; later versions need an option.
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
