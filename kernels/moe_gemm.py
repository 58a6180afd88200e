"""The experts of a mixture-of-experts layer applied to the rows their gate chose.

Only chosen experts are computed and their weights are never gathered: rows are sorted by expert, each expert runs once
over its rows, and every token sums its k results in the gate's order, so that its bits do not depend on the batch.

The matrix library prepares itself for every new number of rows, which takes longer than a product with few rows. So an
expert's rows are rounded up to one of a few numbers, with rows of the next expert whose results are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.activation import Activation, glu
from kernels.linear import Linear, pack_linear


class Expert:
    """One expert's packed weights: `gate_up` [2I, H] (gate rows first) and `down` [H, I]."""

    __slots__ = ("down", "gate_up")

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    def __call__(self, x: Tensor, activation: Activation) -> Tensor:
        """x [M, H] -> [M, H]."""
        return self.down(glu(self.gate_up(x), activation))


PackedExperts = Sequence[Expert]


def padded_rows(count: int) -> int:
    """The number of rows an expert is run with for `count` of them: at most an eighth more, from 16 on."""
    if count <= 16:
        return count
    step = 8 if count <= 64 else 1 << ((count - 1).bit_length() - 4)
    return -(-count // step) * step


def pack_experts(
    gate_up: Tensor, down: Tensor, gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None
) -> PackedExperts:
    """Packs gate_up [E, 2I, H] and down [E, H, I] with optional biases [E, 2I] and [E, H]."""
    return [
        Expert(
            pack_linear(gate_up[e], None if gate_up_bias is None else gate_up_bias[e]),
            pack_linear(down[e], None if down_bias is None else down_bias[e]),
        )
        for e in range(gate_up.shape[0])
    ]


def moe_experts(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: PackedExperts, activation: Activation
) -> Tensor:
    """Sum over k of weight * expert(x): x [T, H], expert_ids [T, k] int64, expert_weights [T, k] fp32 -> [T, H]."""
    num_tokens, top_k = expert_ids.shape
    weights = expert_weights.to(x.dtype)
    if num_tokens == 1:
        results = [experts[e](x, activation) for e in expert_ids[0].tolist()]
        out = results[0] * weights[:, :1]
        for k in range(1, top_k):
            out.addcmul_(results[k], weights[:, k : k + 1])
        return out
    flat_ids = expert_ids.flatten()
    order = torch.sort(flat_ids, stable=True).indices
    counts = torch.bincount(flat_ids, minlength=len(experts)).tolist()
    num_rows = len(order)
    rows = x.new_empty((num_rows + padded_rows(max(counts)), x.shape[1]))
    torch.index_select(x, 0, order // top_k, out=rows[:num_rows])
    rows[num_rows:] = 0
    results_sorted = torch.empty_like(rows[:num_rows])
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            results_sorted[first : first + count] = expert(rows[first : first + padded_rows(count)], activation)[:count]
            first += count
    place = torch.empty_like(order)
    place[order] = torch.arange(num_rows)
    results_of = results_sorted.index_select(0, place).view(num_tokens, top_k, -1)
    out = results_of[:, 0] * weights[:, :1]
    for k in range(1, top_k):
        out.addcmul_(results_of[:, k], weights[:, k : k + 1])
    return out


def moe_experts_partial(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: PackedExperts, activation: Activation
) -> Tensor:
    """The same over those experts that are here, in fp32 whatever x is: expert_ids -1 stand for experts elsewhere.

    x [T, H], expert_ids [T, k] int64, expert_weights [T, k] fp32 -> [T, H] fp32, zeros for a row without any expert.
    """
    num_tokens, top_k = expert_ids.shape
    chosen = (expert_ids >= 0).flatten().nonzero().flatten()
    flat_ids = expert_ids.flatten()[chosen]
    order = torch.sort(flat_ids, stable=True).indices
    counts = torch.bincount(flat_ids, minlength=len(experts)).tolist()
    places = chosen[order]
    rows = x.index_select(0, places // top_k)
    results = torch.zeros((num_tokens * top_k, x.shape[1]), dtype=torch.float32)
    first = 0
    for expert, count in zip(experts, counts, strict=True):
        if count:
            last = first + count
            results[places[first:last]] = expert(rows[first:last], activation).float()
            first = last
    results_of = results.view(num_tokens, top_k, x.shape[1])
    out = results_of[:, 0] * expert_weights[:, :1]
    for k in range(1, top_k):
        out.addcmul_(results_of[:, k], expert_weights[:, k : k + 1])
    return out


def moe_experts_reference(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
) -> Tensor:
    """The same, token by token, from unpacked weights gate_up [E, 2I, H] and down [E, H, I] without biases."""
    out = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for e, weight in zip(expert_ids[t].tolist(), expert_weights[t], strict=True):
            hidden = glu((x[t] @ gate_up[e].T)[None], activation)[0]
            out[t] += (hidden @ down[e].T) * weight
    return out
