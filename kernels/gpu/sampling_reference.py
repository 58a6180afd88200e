"""The draws of `kernels.gpu.sampling` in plain torch: the same random stream, filters by sorting."""

from __future__ import annotations

import torch
from torch import Tensor

_LANES = 1024
_MASK_32 = 0xFFFFFFFF
_KEYS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = (0xD2511F53, 0xCD9E8D57)


def sample_reference(
    logits: Tensor,
    temperatures: Tensor,
    seeds: Tensor,
    positions: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `kernels.gpu.sampling.sample`."""
    values = logits.float()
    largest = values.max(-1).values
    kept = values
    if top_k is not None and top_p is not None and min_p is not None:
        thresholds = filter_thresholds_reference(logits, temperatures, top_k, top_p, min_p)
        kept = values.masked_fill(values < thresholds[:, None], -torch.inf)
    token_ids = torch.empty(len(values), dtype=torch.int64, device=logits.device)
    for row, (temperature, seed, position) in enumerate(
        zip(temperatures.tolist(), seeds.tolist(), positions.tolist(), strict=True)
    ):
        scores = kept[row]
        if temperature > 0:
            noise = gumbel_noise(seed, position, values.shape[1]).to(values.device)
            scores = scores.double() / temperature + noise
        token_ids[row] = int((scores == scores.max()).nonzero()[0]) if not scores.isnan().any() else 0
    return token_ids, largest


def filter_thresholds_reference(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """See `kernels.gpu.sampling_filters.filter_thresholds`."""
    thresholds = torch.full((len(logits),), -torch.inf, device=logits.device)
    filters = zip(temperatures.tolist(), top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)
    for row, (temperature, k, p, share) in enumerate(filters):
        if temperature == 0.0:
            continue
        values = logits[row].float().sort(descending=True).values
        if 0 < k < len(values):
            thresholds[row] = values[k - 1]
            values = values[values >= values[k - 1]]
        if p < 1.0:
            cumulative = (values.double() / temperature).softmax(0).cumsum(0)
            reached = int((cumulative < p).sum())
            thresholds[row] = torch.maximum(thresholds[row], values[min(reached, len(values) - 1)])
        if share > 0.0:
            least = values[0] + temperature * torch.tensor(share).log()
            thresholds[row] = torch.maximum(thresholds[row], least)
    return thresholds


def gumbel_noise(seed: int, position: int, vocab: int) -> Tensor:
    """The noise [V] (fp64) of every token at one position."""
    tokens = torch.arange(vocab)
    counter = tokens // (4 * _LANES) * _LANES + tokens % _LANES
    words = philox(seed, counter, position)
    word = words.gather(0, (tokens // _LANES % 4)[None])[0]
    uniform = ((word.double() + 0.5) * 2.0**-32).clamp(max=0.99999994)
    return -(-torch.log1p(-uniform)).log()


def philox(seed: int, counter: Tensor, position: int) -> Tensor:
    """Four words of 32 random bits [4, N] (int64) per counter [N], keyed by `seed` (Philox 4x32-10)."""
    key = [seed & _MASK_32, (seed >> 32) & _MASK_32]
    zero = torch.zeros_like(counter)
    words = [counter, zero + (position & _MASK_32), zero + ((position >> 32) & _MASK_32), zero]
    for _ in range(10):
        product_0, product_1 = words[0] * _ROUNDS[0], words[2] * _ROUNDS[1]
        # The products need 64 bits unsigned; as signed ones they wrap, and the mask takes the sign off again.
        high_0, high_1 = (product_0 >> 32) & _MASK_32, (product_1 >> 32) & _MASK_32
        words = [
            high_1 ^ words[1] ^ key[0],
            product_1 & _MASK_32,
            high_0 ^ words[3] ^ key[1],
            product_0 & _MASK_32,
        ]
        key = [(key[0] + _KEYS[0]) & _MASK_32, (key[1] + _KEYS[1]) & _MASK_32]
    return torch.stack(words)
