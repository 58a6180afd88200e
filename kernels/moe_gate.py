"""Expert selection: from gate logits to the chosen experts and their weights."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.activation import sigmoid
from kernels.specs import GateSpec as GateSpec


def select_experts(logits: Tensor, spec: GateSpec, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose ``spec.top_k`` experts per token.

    logits: [T, E], any float dtype; all arithmetic is fp32.
    correction_bias: [E] fp32, added to the scores for the choice only, never to the weights.
    Returns ids [T, k] int64 and weights [T, k] fp32. Every row depends on its own logits only.
    """
    logits = logits.float()
    if spec.score == "sparsemixer":
        return _sparsemixer(logits, spec)
    if spec.score == "ones":
        choice = logits if correction_bias is None else logits + correction_bias
        ids = choice.topk(spec.top_k, dim=-1).indices
        return ids, torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    if _softmax_of_chosen(spec, correction_bias):
        values, ids = logits.topk(spec.top_k, dim=-1)
        weights = values.softmax(-1)
    else:
        scores = sigmoid(logits) if spec.score == "sigmoid" else logits.softmax(-1)
        choice = scores if correction_bias is None else scores + correction_bias
        if spec.num_groups > 1:
            choice = _mask_groups(choice, spec)
        ids = choice.topk(spec.top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        if spec.renormalise:
            total = weights.sum(-1, keepdim=True)
            weights.div_(total.clamp_min_(spec.norm_min) if spec.norm_min else total)
    return ids, weights if spec.scale == 1.0 else weights.mul_(spec.scale)


def _softmax_of_chosen(spec: GateSpec, correction_bias: Tensor | None) -> bool:
    # exp(l_i) / sum over the chosen of exp(l_j) is what a full softmax followed by renormalising gives, in two calls.
    if spec.score != "softmax" or spec.num_groups > 1 or correction_bias is not None:
        return False
    return spec.softmax_after_top_k or (spec.renormalise and spec.norm_min == 0.0)


def _mask_groups(choice: Tensor, spec: GateSpec) -> Tensor:
    grouped = choice.view(choice.shape[0], spec.num_groups, -1)
    worth = grouped.amax(-1) if spec.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    best = worth.topk(spec.top_groups, dim=-1).indices
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
