"""Kernels that are bound by memory: norms, rotation with KV write, gates, sampling.

At the sizes of Qwen3-30B-A3B in bfloat16. Peers are torch's own operations and its compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.kernels.cases import VARIANT, KernelCase, PlannedCase, compiled
from benchmarks.kernels.measure import cold_sets, relative_error, run_guarded
from benchmarks.kernels.variants.split_filters import keep_by_split_rows
from kernels.gpu.moe_gate import select_experts
from kernels.gpu.norm import add_rms_norm, rms_norm
from kernels.gpu.rope_kv import norm_rope_write_kv
from kernels.gpu.sampling import Keep, greedy, sample, sample_reference
from kernels.specs import GateSpec

_WIDTH, _HEADS, _KV_HEADS, _DIM = 2048, 32, 4, 128
_EXPERTS, _TOP_K, _EPS = 128, 8, 1e-6
_VOCAB = 151936
# The filters of the sampling cases.
_SAMPLED_TOP_K, _SAMPLED_TOP_P = 50, 0.9
# Rows whose tokens are compared with the reference's, which draws on the host.
_COMPARED = 4


def norm_cases(device: torch.device) -> list[PlannedCase]:
    """Plan RMS norms and the kernel between projection and attention."""
    planned = []
    for tokens in (64, 4096):
        planned += [
            PlannedCase(f"RMS norm, {tokens} x {_WIDTH}", partial(_norm_case, tokens, device)),
            PlannedCase(f"residual and RMS norm, {tokens} x {_WIDTH}", partial(_add_norm_case, tokens, device)),
            PlannedCase(f"norms, rotation, KV write, {tokens} tokens", partial(_rope_case, tokens, device)),
        ]
    return planned


def gate_cases(device: torch.device) -> list[PlannedCase]:
    """Plan the step from a gate's logits to experts and weights."""
    return [PlannedCase(f"gate, {tokens} x {_EXPERTS}", partial(_gate_case, tokens, device)) for tokens in (64, 4096)]


def sampling_cases(device: torch.device) -> list[PlannedCase]:
    """Plan greedy sampling, by temperature, and with filters, of one row and of many."""
    makers: dict[str, Callable[[int, torch.device], KernelCase]] = {
        "greedy": _greedy_case,
        "temperature": partial(_draw_case, top_k=0, top_p=1.0),
        f"top-k {_SAMPLED_TOP_K}": partial(_draw_case, top_k=_SAMPLED_TOP_K, top_p=1.0),
        f"top-p {_SAMPLED_TOP_P}": partial(_draw_case, top_k=0, top_p=_SAMPLED_TOP_P),
        f"top-k {_SAMPLED_TOP_K} and top-p {_SAMPLED_TOP_P}": partial(
            _draw_case, top_k=_SAMPLED_TOP_K, top_p=_SAMPLED_TOP_P
        ),
    }
    return [
        PlannedCase(f"{name}, {rows} x {_VOCAB}", partial(make, rows, device))
        for rows in (1, 64, 256)
        for name, make in makers.items()
    ]


class Numbers:
    """Random tensors, drawn without torch's global generator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device=self.device, generator=self.generator).to(dtype)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, device=self.device, generator=self.generator)


def _norm_case(tokens: int, device: torch.device) -> KernelCase:
    numbers, num_bytes = Numbers(device), 4 * tokens * _WIDTH
    weight = numbers.normal(_WIDTH)
    rows = [numbers.normal(tokens, _WIDTH) for _ in range(cold_sets(num_bytes))]

    def error() -> float:
        out = run_guarded(lambda out: rms_norm(rows[0], weight, _EPS, out), rows[0])
        return relative_error(out, functional.rms_norm(rows[0].double(), (_WIDTH,), weight.double(), _EPS))

    return KernelCase(
        [partial(rms_norm, x, weight, _EPS) for x in rows],
        {"torch": [partial(functional.rms_norm, x, (_WIDTH,), weight, _EPS) for x in rows]},
        num_bytes,
        4 * tokens * _WIDTH,
        relative_error=error,
    )


def _add_norm_case(tokens: int, device: torch.device) -> KernelCase:
    numbers, num_bytes = Numbers(device), 8 * tokens * _WIDTH
    weight = numbers.normal(_WIDTH)
    pairs = [(numbers.normal(tokens, _WIDTH), numbers.normal(tokens, _WIDTH)) for _ in range(cold_sets(num_bytes))]

    def by_torch(x: Tensor, residual: Tensor) -> Tensor:
        return functional.rms_norm(residual.add_(x), (_WIDTH,), weight, _EPS)

    def error() -> float:
        x, residual = pairs[0]
        total = (residual + x).double()
        out = add_rms_norm(x, residual.clone(), weight, _EPS)
        return relative_error(out, functional.rms_norm(total, (_WIDTH,), weight.double(), _EPS))

    peers = {"torch": by_torch, "torch.compile": compiled(by_torch)}
    # Residuals grow from call to call until, in bf16, an addition no longer changes them: they stay finite.
    return KernelCase(
        [partial(add_rms_norm, x, residual, weight, _EPS) for x, residual in pairs],
        {name: [partial(run, x, residual) for x, residual in pairs] for name, run in peers.items()},
        num_bytes,
        5 * tokens * _WIDTH,
        relative_error=error,
    )


def _rope_case(tokens: int, device: torch.device) -> KernelCase:
    numbers, heads = Numbers(device), _HEADS + 2 * _KV_HEADS
    num_bytes = 4 * tokens * heads * _DIM
    weight, angles = numbers.normal(_DIM), numbers.normal(tokens, _DIM // 2, dtype=torch.float32)
    cos, sin = angles.cos(), angles.sin()
    keys, values = (numbers.normal(_KV_HEADS, 2 * tokens, _DIM) for _ in range(2))
    slots = numbers.permutation(2 * tokens)[:tokens]
    merged = [numbers.normal(tokens, heads, _DIM) for _ in range(cold_sets(num_bytes))]
    parts = [torch.split(each, [_HEADS, _KV_HEADS, _KV_HEADS], 1) for each in merged]

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rotation, pools = (cos, sin), (keys, values)
        return norm_rope_write_kv(
            q, k, v, *rotation, slots, *pools, interleaved=False, q_weight=weight, k_weight=weight, eps=_EPS
        )

    def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        normed = [functional.rms_norm(x.float(), (_DIM,), weight.float(), _EPS) for x in (q, k)]
        q_out, k_out = (_rotated(x, cos, sin) for x in normed)
        keys.index_copy_(1, slots, k_out.to(keys.dtype).transpose(0, 1))
        values.index_copy_(1, slots, v.transpose(0, 1))
        return q_out.to(q.dtype)

    def error() -> float:
        found = [ours(*parts[0]), keys[:, slots].clone(), values[:, slots].clone()]
        expected = [by_torch(*parts[0]), keys[:, slots], values[:, slots]]
        return max(relative_error(*pair) for pair in zip(found, expected, strict=True))

    return KernelCase(
        [partial(ours, *each) for each in parts],
        {
            "torch": [partial(by_torch, *each) for each in parts],
            "torch.compile": [partial(compiled(by_torch), *each) for each in parts],
        },
        num_bytes,
        0,
        relative_error=error,
    )


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _gate_case(tokens: int, device: torch.device) -> KernelCase:
    numbers, spec = Numbers(device), GateSpec(_TOP_K, renormalise=True)
    num_bytes = tokens * (2 * _EXPERTS + 12 * _TOP_K)
    logits = [numbers.normal(tokens, _EXPERTS) for _ in range(cold_sets(num_bytes))]

    def by_torch(logits: Tensor) -> Tensor:
        weights, _ = logits.float().softmax(-1).topk(_TOP_K, -1)
        return weights / weights.sum(-1, keepdim=True)

    return KernelCase(
        [lambda x=x: select_experts(x, spec)[1] for x in logits],  # type: ignore[misc]
        {"torch": [partial(by_torch, x) for x in logits]},
        num_bytes,
        0,
        relative_error=lambda: relative_error(select_experts(logits[0], spec)[1], by_torch(logits[0])),
    )


def _logits(rows: int, device: torch.device) -> list[Tensor]:
    numbers = Numbers(device)
    return [numbers.normal(rows, _VOCAB, dtype=torch.float32) for _ in range(cold_sets(_logit_bytes(rows)))]


def _logit_bytes(rows: int) -> int:
    return 4 * rows * _VOCAB


def _greedy_case(rows: int, device: torch.device) -> KernelCase:
    sets = _logits(rows, device)
    return KernelCase(
        [lambda x=x: greedy(x)[0] for x in sets],  # type: ignore[misc]
        {"torch.argmax": [partial(torch.argmax, x, -1) for x in sets]},
        _logit_bytes(rows),
        0,
        relative_error=lambda: float((greedy(sets[0])[0] != sets[0].argmax(-1)).any()),
    )


def _draw_case(rows: int, device: torch.device, *, top_k: int, top_p: float) -> KernelCase:
    """At temperature 1. Peers draw from the same distribution, but not the same tokens."""
    ones, seeds = torch.ones(rows, device=device), torch.arange(rows, device=device)
    filters: dict[str, Any] = {}
    if top_k or top_p < 1:
        ks = torch.full((rows,), top_k, dtype=torch.int32, device=device)
        filters = {"top_k": ks, "top_p": ones * top_p, "min_p": 0 * ones}
    sets = _logits(rows, device)

    def drawn(x: Tensor, keep: Keep | None = None) -> Tensor:
        return sample(x, ones, seeds, seeds, keep=keep, **filters)[0]

    peer = _by_torch(top_k, top_p)
    if filters:
        peer[f"{VARIANT}over split rows"] = lambda x: drawn(x, keep_by_split_rows)
    return KernelCase(
        [partial(drawn, x) for x in sets],
        {name: [partial(draw, x) for x in sets] for name, draw in peer.items()},
        _logit_bytes(rows),
        0,
        relative_error=lambda: max(
            _wrong(sets[0][:_COMPARED], ones[:_COMPARED], seeds[:_COMPARED], filters, keep)
            for keep in ((None, keep_by_split_rows) if filters else (None,))
        ),
    )


def _wrong(logits: Tensor, ones: Tensor, seeds: Tensor, filters: dict[str, Any], keep: Keep | None = None) -> float:
    """Return 1 if some row's token is not the reference's."""
    some = {name: values[:_COMPARED] for name, values in filters.items()}
    tokens, _ = sample(logits, ones, seeds, seeds, **some, keep=keep)
    return float((tokens != sample_reference(logits, ones, seeds, seeds, **some)[0]).any())


def _by_torch(top_k: int, top_p: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Write the filters with torch's own operations: by the largest values, or by sorting all."""

    def with_noise(logits: Tensor) -> Tensor:
        return _drawn(logits.softmax(-1)).squeeze(-1)

    def of_largest(logits: Tensor) -> Tensor:
        values, places = logits.topk(top_k, -1)
        return _place(_within(values.softmax(-1), 0, top_p), places)

    def of_sorted(logits: Tensor) -> Tensor:
        values, places = logits.sort(dim=-1, descending=True)
        return _place(_within(values.softmax(-1), top_k, top_p), places)

    if not top_k and top_p == 1:
        return {"torch": with_noise}
    return {"torch.sort": of_sorted, **({"torch.topk": of_largest} if top_k else {})}


def _within(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """Return the sorted probabilities that the filters keep, others 0."""
    if top_k:
        probabilities = probabilities[:, :top_k]
    if top_p == 1:
        return probabilities
    return probabilities.masked_fill(probabilities.cumsum(-1) - probabilities > top_p, 0.0)


def _drawn(probabilities: Tensor) -> Tensor:
    """Draw a place, [rows, 1]: the first of exponential clocks to ring, since `multinomial` synchronises."""
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)


def _place(probabilities: Tensor, places: Tensor) -> Tensor:
    return places.gather(1, _drawn(probabilities)).squeeze(-1)
