"""The attention kernels' reference: one token at a time in fp32 (fp64 for fp64 queries), with the same arguments."""

from __future__ import annotations

import torch
from torch import Tensor


def paged_attention_reference(
    q: Tensor,
    keys_pool: Tensor,
    values_pool: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_starts: Tensor | None = None,
    *,
    block_size: int,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    soft_cap: float | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Causal attention of q [T, H, Dk] over pools [KV, num_slots, D]; returns [T, H, Dv], zeros where nothing is seen.

    Without `query_starts` [S + 1] each of the `seq_lens` [S] has one new token. Tokens of no sequence come out as 0.
    """
    accurate = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // keys_pool.shape[0]
    starts = list(range(len(seq_lens) + 1)) if query_starts is None else query_starts.tolist()
    out = q.new_zeros((*q.shape[:2], values_pool.shape[2]))
    for seq, length in enumerate(seq_lens.tolist()):
        count = starts[seq + 1] - starts[seq]
        for token in range(starts[seq], starts[seq + 1]):
            end = length - count + token - starts[seq] + 1
            begin = 0 if window is None else max(0, end - window)
            if end <= begin:
                continue
            positions = torch.arange(begin, end, device=q.device)
            slots = block_table[seq].long()[positions // block_size] * block_size + positions % block_size
            keys = keys_pool[:, slots].to(accurate).repeat_interleave(group, 0) * key_scale
            values = values_pool[:, slots].to(accurate).repeat_interleave(group, 0) * value_scale
            scores = torch.einsum("hd,hsd->hs", q[token].to(accurate), keys) * scale
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if sinks is not None:
                scores = torch.cat([scores, sinks.to(accurate)[:, None]], -1)
            weights = scores.softmax(-1)[:, : len(slots)]
            out[token] = torch.einsum("hs,hsd->hd", weights, values).to(q.dtype)
    return out
