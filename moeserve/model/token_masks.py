"""The tokens that grammars allow in the rows of a step, as bits, and their effect on logits. Knows no grammars."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.transfer import copied, to_device
from moeserve.plan import Chunk


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The allowed tokens of some rows of a step.

    rows: their places among the step's sampled chunks. allowed: [len(rows), W] int32 on the host; bit b of word w
    stands for token 32 w + b, and tokens beyond the last word are forbidden.
    """

    rows: array[int]
    allowed: Tensor


def masks_of(chunks: Sequence[Chunk]) -> TokenMasks | None:
    """Return the masks of sampled chunks, one per row of logits; None if no chunk has one."""
    masks = [None if chunk.extras is None else chunk.extras.mask for chunk in chunks]
    rows = array("q", (row for row, mask in enumerate(masks) if mask is not None))
    if not rows:
        return None
    words = torch.frombuffer(bytearray().join(mask for mask in masks if mask is not None), dtype=torch.int32)
    return TokenMasks(rows, words.view(len(rows), -1))


def forbid(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits [S, V] (fp32) of forbidden tokens to -inf, in place."""
    device, vocab_size = logits.device, logits.shape[1]
    words = copied(masks.allowed, device)
    changes = _changes_of_byte(device).index_select(0, words.view(torch.uint8).view(-1).int()).view(len(words), -1)
    known = min(changes.shape[1], vocab_size)
    if len(words) == len(logits) and known == vocab_size:
        logits.add_(changes[:, :known])
        return
    rows = to_device(masks.rows, device)
    logits[:, :known].index_add_(0, rows, changes[:, :known])
    if known < vocab_size:
        logits[:, known:].index_fill_(0, rows, -torch.inf)


@cache
def _changes_of_byte(device: torch.device) -> Tensor:
    """Return [256, 8] fp32: the numbers that a byte of a mask adds to the logits of its eight tokens."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)
