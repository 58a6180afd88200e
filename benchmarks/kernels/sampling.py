"""Benchmark cases of choosing tokens from logits, over the vocabulary of Qwen3-30B-A3B."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.small import Numbers
from kernels.gpu.sampling import greedy, sample
from kernels.gpu.sampling_reference import sample_reference
from moeserve.tune.kernel_case import KernelCase, PlannedCase, cold_sets

_VOCAB = 151936
_TOP_K, _TOP_P = 50, 0.9
# Rows whose tokens are compared with the reference's, which draws on the host.
_COMPARED = 4


def sampling_cases(device: torch.device) -> list[PlannedCase]:
    """Greedy, by temperature, and with filters, of one row and of many."""
    makers: dict[str, Callable[[int, torch.device], KernelCase]] = {
        "greedy": _greedy_case,
        "temperature": partial(_draw_case, top_k=0, top_p=1.0),
        f"top-k {_TOP_K}": partial(_draw_case, top_k=_TOP_K, top_p=1.0),
        f"top-p {_TOP_P}": partial(_draw_case, top_k=0, top_p=_TOP_P),
        f"top-k {_TOP_K} and top-p {_TOP_P}": partial(_draw_case, top_k=_TOP_K, top_p=_TOP_P),
    }
    return [
        PlannedCase(f"{name}, {rows} x {_VOCAB}", partial(make, rows, device))
        for rows in (1, 64, 256)
        for name, make in makers.items()
    ]


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
    filters: dict[str, Tensor] = {}
    if top_k or top_p < 1:
        ks = torch.full((rows,), top_k, dtype=torch.int32, device=device)
        filters = {"top_k": ks, "top_p": ones * top_p, "min_p": 0 * ones}
    sets = _logits(rows, device)
    peer = _by_torch(top_k, top_p)
    return KernelCase(
        [lambda x=x: sample(x, ones, seeds, seeds, **filters)[0] for x in sets],  # type: ignore[misc]
        {name: [partial(draw, x) for x in sets] for name, draw in peer.items()},
        _logit_bytes(rows),
        0,
        relative_error=lambda: _wrong(sets[0][:_COMPARED], ones[:_COMPARED], seeds[:_COMPARED], filters),
    )


def _wrong(logits: Tensor, ones: Tensor, seeds: Tensor, filters: dict[str, Tensor]) -> float:
    """1 if some row's token is not the reference's."""
    some = {name: values[:_COMPARED] for name, values in filters.items()}
    tokens, _ = sample(logits, ones, seeds, seeds, **some)
    return float((tokens != sample_reference(logits, ones, seeds, seeds, **some)[0]).any())


def _by_torch(top_k: int, top_p: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """How the filters are written with torch's own operations: by the largest values, or by sorting all."""

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
    """The sorted ones that the filters leave, others 0."""
    if top_k:
        probabilities = probabilities[:, :top_k]
    if top_p == 1:
        return probabilities
    return probabilities.masked_fill(probabilities.cumsum(-1) - probabilities > top_p, 0.0)


def _drawn(probabilities: Tensor) -> Tensor:
    """The place of a draw, [rows, 1]: the first of exponential clocks to ring, since `multinomial` asks the host."""
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(-1, keepdim=True)


def _place(probabilities: Tensor, places: Tensor) -> Tensor:
    return places.gather(1, _drawn(probabilities)).squeeze(-1)
