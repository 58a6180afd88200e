"""The tokens that grammars allow in the rows of a step, as bits, and their effect on logits. Knows no grammars."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from kernels.transfer import copied, to_device
from moeserve.plan import GRAMMAR_FAILED, Chunk


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The allowed tokens of some rows of a step.

    rows: their places among the step's sampled chunks. allowed: [len(rows), W] int32 on the host; bit b of word w
    stands for token 32 w + b, and tokens beyond the last word are forbidden. errors: by place, for rows whose grammar
    has failed; these are not among `rows`.
    """

    rows: array[int]
    allowed: Tensor
    errors: dict[int, str]


class MaskSource(Protocol):
    """Enforces the grammars of requests (`moeserve.model.grammars.Grammars`)."""

    def begin(self, constrained: Sequence[tuple[int, Chunk]]) -> Future[TokenMasks]:
        """Compute the masks of chunks that have a grammar, each with its place among the sampled chunks, on another
        thread."""


def begin_masks(source: MaskSource | None, chunks: Sequence[Chunk]) -> Future[TokenMasks] | None:
    """Begin the masks of a step; None if no chunk has a grammar. Without a source, all chunks with a grammar fail."""
    constrained = []
    place = 0
    for chunk in chunks:
        if chunk.sampling is not None:
            if chunk.sampling.grammar is not None:
                constrained.append((place, chunk))
            place += 1
    if not constrained:
        return None
    if source is not None:
        return source.begin(constrained)
    failed: Future[TokenMasks] = Future()
    reason = f"{GRAMMAR_FAILED}nothing enforces grammars here"
    nothing = torch.empty((0, 0), dtype=torch.int32)
    failed.set_result(TokenMasks(array("q"), nothing, {place: reason for place, _ in constrained}))
    return failed


def forbid(logits: Tensor, masks: TokenMasks) -> None:
    """Set the logits [S, V] (fp32) of forbidden tokens to -inf, in place."""
    if not len(masks.rows):
        return
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
