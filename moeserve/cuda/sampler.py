"""Tokens of a step on the GPU. Drawing is launched at once; what came of it is read when it is asked for."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.gpu.sampling import greedy, sample
from moeserve.cuda.batches import to_device
from moeserve.cuda.logit_adjustments import adjusted_logits
from moeserve.model.runner import NOT_FINITE
from moeserve.plan import Chunk, ChunkResult, TokenLogprobs

_SIGN = 1 << 63
# Rows of logits that a prompt's log probabilities are made of together.
SCORED_AT_ONCE = 256


class Logprobs:
    """Log probabilities of one token per row of some logits, with the likeliest of each row, on their way home."""

    def __init__(self, logits: Tensor, token_ids: Tensor, num_top: int) -> None:
        """logits [S, V], token_ids [S] int64 on the same device."""
        logprobs = logits.float().log_softmax(-1)
        self._chosen = to_host(logprobs.gather(1, token_ids[:, None])[:, 0])
        self._top = tuple(to_host(part) for part in logprobs.topk(min(num_top, logits.shape[1]))) if num_top else None

    def of_row(self, row: int, num_top: int) -> TokenLogprobs:
        """After the device is done."""
        value = float(self._chosen[row])
        if self._top is None or not num_top:
            return TokenLogprobs(value)
        values, places = (part[row, :num_top].tolist() for part in self._top)
        return TokenLogprobs(value, tuple(zip(places, values, strict=True)))


class ScoredTokens:
    """Log probabilities of the tokens that follow some states: few rows of logits are there at a time."""

    def __init__(
        self, logits_of: Callable[[Tensor], Tensor], states: Tensor, token_ids: array[int], num_top: int
    ) -> None:
        """states [S, H] and the S tokens."""
        targets = to_device(token_ids, states.device).long()
        self._num_top = num_top
        self._parts = [
            (len(some), Logprobs(logits_of(some), some_targets, num_top))
            for some, some_targets in zip(states.split(SCORED_AT_ONCE), targets.split(SCORED_AT_ONCE), strict=True)
        ]

    def all(self) -> list[TokenLogprobs]:
        """After the device is done."""
        return [found.of_row(row, self._num_top) for count, found in self._parts for row in range(count)]


@dataclass(slots=True)
class Drawn:
    """Tokens [S] int64 of a step on the device, for the next one, and their copies [S] at home with what goes with
    them: the rows' largest logits [S] fp32, and log probabilities if any row wants them."""

    token_ids: Tensor
    home: Tensor
    largest: Tensor
    logprobs: Logprobs | None

    def results(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """One result per sampled chunk, after the device is done. A row that is not finite fails alone."""
        results = []
        for row, (chunk, token_id, largest) in enumerate(
            zip(chunks, self.home.tolist(), self.largest.tolist(), strict=True)
        ):
            assert chunk.sampling is not None
            if not math.isfinite(largest):
                results.append(ChunkResult(error=NOT_FINITE))
                continue
            wanted = chunk.sampling.logprobs
            found = None if wanted is None or self.logprobs is None else self.logprobs.of_row(row, wanted)
            results.append(ChunkResult(token_id, found))
        return results


def draw_tokens(logits: Tensor, chunks: Sequence[Chunk]) -> Drawn:
    """Launches the draws for logits [S, V], row i being that of `chunks[i]`, which has `sampling`."""
    samplings = [chunk.sampling for chunk in chunks if chunk.sampling is not None]
    adjusted = adjusted_logits(logits, chunks)
    if all(sampling.temperature == 0.0 for sampling in samplings):
        token_ids, largest = greedy(adjusted)
    else:
        device = logits.device
        seeds = array("q", ((s.seed + _SIGN) % (2 * _SIGN) - _SIGN for s in samplings))
        positions = array("q", (chunk.start + len(chunk.token_ids) for chunk in chunks))
        filters = {}
        if any(s.top_k or s.top_p < 1.0 or s.min_p for s in samplings):
            filters = {
                "top_k": to_device(array("i", (s.top_k for s in samplings)), device),
                "top_p": to_device(array("f", (s.top_p for s in samplings)), device),
                "min_p": to_device(array("f", (s.min_p for s in samplings)), device),
            }
        temperatures = to_device(array("f", (s.temperature for s in samplings)), device)
        token_ids, largest = sample(
            adjusted, temperatures, to_device(seeds, device), to_device(positions, device), **filters
        )
    if adjusted is not logits:
        # A banned token may be the only one that is finite; what counts is what the model said.
        largest = logits.float().amax(-1)
    wanted = [s.logprobs for s in samplings if s.logprobs is not None]
    logprobs = Logprobs(logits, token_ids, max(wanted)) if wanted else None
    return Drawn(token_ids, to_host(token_ids), to_host(largest), logprobs)


def launch_all_draws(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    """Launches every kernel that `draw_tokens` may: each way of drawing, from logits as they are and adjusted ones."""
    one = torch.ones(1, device=device)
    places = torch.zeros(1, dtype=torch.int64, device=device)
    filters = {"top_k": torch.ones(1, dtype=torch.int32, device=device), "top_p": one, "min_p": one}
    for kind in {dtype, torch.float32}:
        logits = torch.zeros((1, vocab_size), dtype=kind, device=device)
        greedy(logits)
        sample(logits, one, places, places)
        sample(logits, one, places, places, **filters)


def to_host(values: Tensor) -> Tensor:
    """A copy at home that arrives in the order of the stream: read it after an event behind it."""
    if values.device.type == "cpu":
        return values.clone()
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
