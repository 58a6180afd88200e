"""Expert selection on the GPU: one program per token, in one launch.

Ties go to the lowest expert id, and to the lowest group, as in `kernels.moe_gate.select_experts_reference`. torch.topk
guarantees no order, so the CPU may choose otherwise among equal scores.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.moe_gate import softmax_of_chosen
from kernels.specs import GateSpec


def select_experts(
    logits: Tensor,
    spec: GateSpec,
    correction_bias: Tensor | None = None,
    *,
    num_valid: Tensor | None = None,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose like `kernels.moe_gate.select_experts` in one launch: ids [T, k] int64 and weights [T, k] fp32.

    logits: [T, E], rows contiguous. correction_bias: [E] fp32. num_valid: int32 scalar tensor on the device; rows from
    it on, which pad a captured batch, get ids -1 and weights 0. out: contiguous tensors to write instead of new ones.
    Ids are distinct and in 0..E-1 whatever the logits are; weights of a row with NaN are NaN where its scores are.
    """
    num_tokens, num_experts = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("rows of gate logits must be contiguous")
    if num_experts % spec.num_groups or spec.top_k > num_experts:
        raise ValueError(f"{num_experts} experts do not make {spec.num_groups} groups or top {spec.top_k}")
    out = out or _new_choice(num_tokens, spec.top_k, logits.device)
    if num_tokens == 0:
        return out
    has_bias = takes_bias(spec, correction_bias)
    _select_kernel[(num_tokens,)](
        logits,
        correction_bias if has_bias else logits,
        logits if num_valid is None else num_valid,
        *out,
        logits.stride(0),
        HAS_COUNT=num_valid is not None,
        **choice_constants(spec, num_experts, has_bias),
        num_warps=1 if num_experts <= 256 else 4,
    )
    return out


def takes_bias(spec: GateSpec, correction_bias: Tensor | None) -> bool:
    return correction_bias is not None and spec.score != "sparsemixer"


def choice_constants(spec: GateSpec, num_experts: int, has_bias: bool) -> dict[str, Any]:
    """Return the constants of `choice_of`."""
    sparsemixer = spec.score == "sparsemixer"
    groups = 1 if sparsemixer else spec.num_groups
    return {
        "NUM_EXPERTS": num_experts,
        "GROUPS": groups,
        "TOP_GROUPS": spec.top_groups,
        "TOP2": spec.group_score == "top2",
        "TOP_K": spec.top_k,
        "SCORE": spec.score,
        "OF_CHOSEN": softmax_of_chosen(spec, has_bias),
        "RENORMALISE": spec.renormalise and not sparsemixer,
        "NORM_MIN": spec.norm_min,
        "SCALE": spec.scale,
        "JITTER": spec.jitter,
        "HAS_BIAS": has_bias,
        "ROWS": triton.next_power_of_2(groups),
        "COLUMNS": triton.next_power_of_2(num_experts // groups),
        "SLOTS": triton.next_power_of_2(spec.top_k),
    }


def _new_choice(num_tokens: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    ids, weights = (
        torch.empty((num_tokens, top_k), dtype=dtype, device=device) for dtype in (torch.int64, torch.float32)
    )
    return ids, weights


@triton.jit(do_not_specialize_on_alignment=["bias", "num_valid"])
def _select_kernel(
    logits,
    bias,
    num_valid,
    ids,
    weights,
    stride_logits: tl.int64,
    NUM_EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NORM_MIN: tl.constexpr,
    SCALE: tl.constexpr,
    JITTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, SLOTS)
    if HAS_COUNT:  # noqa: SIM102 - decided when compiled, the inner one when run
        if token >= tl.load(num_valid):
            tl.store(ids + token * TOP_K + k, tl.full([SLOTS], -1, tl.int64), mask=k < TOP_K)
            tl.store(weights + token * TOP_K + k, tl.zeros([SLOTS], tl.float32), mask=k < TOP_K)
            return
    chosen_ids, chosen = choice_of(
        logits + token * stride_logits,
        bias,
        NUM_EXPERTS,
        GROUPS,
        TOP_GROUPS,
        TOP2,
        TOP_K,
        SCORE,
        OF_CHOSEN,
        RENORMALISE,
        NORM_MIN,
        SCALE,
        JITTER,
        HAS_BIAS,
        ROWS,
        COLUMNS,
        SLOTS,
    )
    tl.store(ids + token * TOP_K + k, chosen_ids.to(tl.int64), mask=k < TOP_K)
    tl.store(weights + token * TOP_K + k, chosen, mask=k < TOP_K)


@triton.jit
def choice_of(
    logits,
    bias,
    NUM_EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    TOP2: tl.constexpr,
    TOP_K: tl.constexpr,
    SCORE: tl.constexpr,
    OF_CHOSEN: tl.constexpr,
    RENORMALISE: tl.constexpr,
    NORM_MIN: tl.constexpr,
    SCALE: tl.constexpr,
    JITTER: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Return the experts of the token with these logits and their weights, [SLOTS] int32 and fp32, the best first."""
    k = tl.arange(0, SLOTS)
    size: tl.constexpr = NUM_EXPERTS // GROUPS
    group = tl.arange(0, ROWS)[:, None]
    member = tl.arange(0, COLUMNS)[None, :]
    absent = (group >= GROUPS) | (member >= size)
    # Padding lanes come after all experts, so the lowest lane among equals is the lowest expert id.
    lanes = tl.where(absent, ROWS * COLUMNS, group * size + member)
    value = tl.load(logits + lanes, mask=absent == 0, other=-float("inf")).to(tl.float32)
    scores = value
    if not OF_CHOSEN:
        if SCORE == "sigmoid":
            scores = 1.0 / (1.0 + tl.exp(-value))
        if SCORE == "softmax":
            powers = tl.exp(value - tl.max(tl.max(value, 1), 0))
            scores = powers / tl.sum(tl.sum(powers, 1), 0)
    choice = scores
    if HAS_BIAS:
        choice += tl.load(bias + lanes, mask=absent == 0, other=0.0)
    # NaN is chosen last, so that ids are valid for any logits.
    choice = tl.where(absent | (choice != choice), -float("inf"), choice)
    taken = absent
    if GROUPS > 1:
        choice = _mask_groups(choice, lanes, taken, GROUPS, TOP_GROUPS, TOP2)
    chosen_ids = tl.zeros([SLOTS], tl.int32)
    chosen = tl.full([SLOTS], -float("inf") if OF_CHOSEN else 0.0, tl.float32)
    for j in tl.static_range(TOP_K):
        best, index = _lowest_best(choice, lanes, taken, ROWS * COLUMNS)
        if SCORE == "sparsemixer":
            weight = _sparsemixer_weight(value, tl.where(taken, -float("inf"), value), best, JITTER)
        else:
            weight = tl.sum(tl.sum(tl.where(lanes == index, scores, 0.0), 1), 0)
        chosen_ids = tl.where(k == j, index, chosen_ids)
        chosen = tl.where(k == j, weight, chosen)
        taken = taken | (lanes == index)
    if SCORE == "ones":
        chosen = tl.full([SLOTS], 1.0, tl.float32)
    elif OF_CHOSEN:
        powers = tl.exp(chosen - tl.max(chosen, 0))
        chosen = powers / tl.sum(powers, 0)
    elif RENORMALISE:
        chosen = chosen / tl.maximum(tl.sum(chosen, 0), NORM_MIN)
    return chosen_ids, chosen * SCALE


@triton.jit
def _lowest_best(values, lanes, taken, LANES: tl.constexpr):
    """Return the greatest value of lanes not taken, and its lowest lane, which is in range whatever the values."""
    best = tl.max(tl.max(tl.where(taken, -float("inf"), values), 1), 0)
    index = tl.min(tl.min(tl.where((values == best) & (taken == 0), lanes, LANES), 1), 0)
    return best, index


@triton.jit
def _mask_groups(choice, lanes, taken, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, TOP2: tl.constexpr):
    """Set all experts outside the best groups to -inf. choice, lanes, taken: [groups, experts of a group]."""
    num_rows: tl.constexpr = choice.shape[0]
    num_lanes: tl.constexpr = choice.shape[0] * choice.shape[1]
    worth = tl.max(choice, 1)
    if TOP2:
        first = tl.min(tl.where(choice == worth[:, None], lanes, num_lanes), 1)
        worth += tl.max(tl.where(lanes == first[:, None], -float("inf"), choice), 1)
    group = tl.arange(0, num_rows)
    dropped = group >= 0
    done = group >= GROUPS
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(tl.where(done, -float("inf"), worth), 0)
        index = tl.min(tl.where((worth == best) & (done == 0), group, num_rows), 0)
        dropped = dropped & (group != index)
        done = done | (group == index)
    return tl.where(dropped[:, None], -float("inf"), choice)


@triton.jit
def _sparsemixer_weight(logits, remaining, best, JITTER: tl.constexpr):
    far = (best - logits) / tl.maximum(tl.abs(logits), best) > 2 * JITTER
    kept = tl.where(far, -float("inf"), remaining)
    return 1.0 / tl.sum(tl.sum(tl.exp(kept - best), 1), 0)
