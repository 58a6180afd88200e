"""Expert selection: from gate logits to the chosen experts and their weights."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kernels.activation import sigmoid
from kernels.cpu.library import NativeKernels, native_kernels
from kernels.specs import GateSpec as GateSpec

# Returns the largest `count` values of each row, in descending order, and their places.
_Top = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def select_experts(logits: Tensor, spec: GateSpec, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose ``spec.top_k`` experts per token.

    logits: [T, E], any float dtype; all arithmetic is fp32.
    correction_bias: [E] fp32, added to the scores for the choice only, never to the weights.
    Returns ids [T, k] int64 and weights [T, k] fp32. Every row depends on its own logits only.
    """
    kernels = native_kernels()
    score = _native_score(logits, spec, correction_bias)
    if kernels is not None and score is not None:
        return _select_native(kernels, logits, spec, correction_bias, score)
    return _select(logits.float(), spec, correction_bias, torch.topk)


def _native_score(logits: Tensor, spec: GateSpec, correction_bias: Tensor | None) -> int | None:
    """Return the number of the score in gate.cpp; None where torch selects."""
    if logits.device.type != "cpu" or logits.dtype != torch.float32 or not logits.is_contiguous():
        return None
    if spec.num_groups > 1 or spec.score not in ("softmax", "sigmoid"):
        return None
    if spec.score == "sigmoid":
        return 2
    return 0 if softmax_of_chosen(spec, correction_bias is not None) else 1


def _select_native(
    kernels: NativeKernels, logits: Tensor, spec: GateSpec, correction_bias: Tensor | None, score: int
) -> tuple[Tensor, Tensor]:
    num_rows, num_experts = logits.shape
    ids = logits.new_empty((num_rows, spec.top_k), dtype=torch.int64)
    weights = logits.new_empty((num_rows, spec.top_k))
    kernels.select_experts(
        logits.data_ptr(),
        num_rows,
        num_experts,
        spec.top_k,
        score,
        None if correction_bias is None else correction_bias.data_ptr(),
        spec.renormalise,
        spec.norm_min,
        spec.scale,
        ids.data_ptr(),
        weights.data_ptr(),
    )
    return ids, weights


def select_experts_reference(
    logits: Tensor, spec: GateSpec, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose like `select_experts`, but among equal scores or groups the lowest first; torch.topk has no such order."""
    return _select(logits.float(), spec, correction_bias, _top_lowest_first)


def softmax_of_chosen(spec: GateSpec, has_bias: bool) -> bool:
    """Return True if the weights are a softmax over the chosen logits.

    A full softmax followed by renormalising also gives exp(l_i) / sum over the chosen of exp(l_j).
    """
    if spec.score != "softmax" or spec.num_groups > 1 or has_bias:
        return False
    return spec.softmax_after_top_k or (spec.renormalise and spec.norm_min == 0.0)


def _select(logits: Tensor, spec: GateSpec, correction_bias: Tensor | None, top: _Top) -> tuple[Tensor, Tensor]:
    if spec.score == "sparsemixer":
        return _sparsemixer(logits, spec)
    if spec.score == "ones":
        _, ids = top(logits if correction_bias is None else logits + correction_bias, spec.top_k)
        return ids, torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    if softmax_of_chosen(spec, correction_bias is not None):
        values, ids = top(logits, spec.top_k)
        weights = values.softmax(-1)
    else:
        scores = sigmoid(logits) if spec.score == "sigmoid" else logits.softmax(-1)
        choice = scores if correction_bias is None else scores + correction_bias
        if spec.num_groups > 1:
            choice = _mask_groups(choice, spec, top)
        _, ids = top(choice, spec.top_k)
        weights = scores.gather(-1, ids)
        if spec.renormalise:
            total = weights.sum(-1, keepdim=True)
            weights.div_(total.clamp_min_(spec.norm_min) if spec.norm_min else total)
    return ids, weights if spec.scale == 1.0 else weights.mul_(spec.scale)


def _mask_groups(choice: Tensor, spec: GateSpec, top: _Top) -> Tensor:
    grouped = choice.view(choice.shape[0], spec.num_groups, -1)
    worth = grouped.amax(-1) if spec.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    _, best = top(worth, spec.top_groups)
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


def _sparsemixer(logits: Tensor, spec: GateSpec) -> tuple[Tensor, Tensor]:
    ids, weights = [], []
    magnitude = logits.abs()
    remaining = logits
    for _ in range(spec.top_k):
        best, index = remaining.max(-1, keepdim=True)
        far = (best - logits) / magnitude.clamp(min=best) > 2 * spec.jitter
        weights.append(remaining.masked_fill(far, -torch.inf).softmax(-1).gather(-1, index))
        ids.append(index)
        remaining = remaining.scatter(-1, index, -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)


def _top_lowest_first(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count]
