"""Beam search: which continuations of a request's beams go on, which texts have ended, and when the search does.

It follows the rules of transformers' `generate` with beams, so the texts are the same. Pure: no memory, no tensors.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter
from typing import Literal

from moeserve.plan import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Search for the likeliest texts with `width` beams, and give the `num_answers` best ones.

    A text's score is the sum of the log probabilities of its tokens, over their number to the power `length_penalty`.
    `early_stopping`: True ends the search once `width` texts have ended; False once no beam is better than the worst of
    them at its present length; `never` once none can become so at any length. `logprobs`: as in `SamplingParams`.
    """

    width: int
    num_answers: int
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class FoundText:
    """A text that a search has found. `logprobs` are of its tokens, empty if they were not asked for."""

    token_ids: list[int]
    finish_reason: FinishReason
    score: float
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Beam:
    """A text that may go on: its output, and the sum of the log probabilities of the tokens.

    `parent`: the number of the beam of the step before that it continues.
    """

    parent: int = 0
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    total: float = 0.0
    logprobs: tuple[TokenLogprobs, ...] = ()


class BeamSearch:
    """The beams of one request, all of the same length, and the best texts that have ended.

    `beams` is one empty beam until the first `advance`. Afterwards it has `width` beams, the best first, until
    `is_done`.
    """

    def __init__(
        self, params: BeamParams, *, max_tokens: int, min_tokens: int = 0, stop_token_ids: Collection[int]
    ) -> None:
        """min_tokens: up to this length no stop token may be chosen."""
        self.beams = [Beam()]
        self.is_done = False
        self._params = params
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._stop_token_ids = frozenset(stop_token_ids)
        self._length = 0
        self._ended: list[FoundText] = []

    @property
    def num_alternatives(self) -> int:
        """The number of likeliest tokens of each beam that `advance` needs."""
        return max(self._params.width + len(self._stop_token_ids), self._params.logprobs or 0)

    def advance(self, likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Let each beam go on with its best continuations.

        likeliest: of each beam, (token id, log probability) of its `num_alternatives` likeliest tokens, best first.
        """
        if self.is_done:
            raise ValueError("the beam search is over")
        is_banned = self._length < self._min_tokens
        self._length += 1
        is_last = self._length == self._max_tokens
        candidates = [
            (beam.total + logprob, number, token_id)
            for number, (beam, row) in enumerate(zip(self.beams, likeliest, strict=True))
            for token_id, logprob in row
            if logprob > -inf and not (is_banned and token_id in self._stop_token_ids)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        beams, ended = [], []
        for place, (total, parent, token_id) in enumerate(candidates):
            is_stop = token_id in self._stop_token_ids
            if not (is_stop or is_last):
                beams.append(self._continued(total, parent, token_id, likeliest[parent]))
                if len(beams) == self._params.width:
                    break
            elif place < self._params.width:
                reason = FinishReason.STOP if is_stop else FinishReason.LENGTH
                ended.append(self._text(self._continued(total, parent, token_id, likeliest[parent]), reason))
        self._ended = sorted(self._ended + ended, key=attrgetter("score"), reverse=True)[: self._params.width]
        self.beams = beams
        self.is_done = is_last or not beams or not self._may_improve(beams[0].total)

    def best(self) -> list[FoundText]:
        """Return the answers, the best first, once the search is over: fewer than asked for if fewer were found."""
        return self._ended[: self._params.num_answers]

    def _may_improve(self, best_total: float) -> bool:
        """Return whether the search goes on: a beam may still become better than a text that has ended."""
        params = self._params
        if len(self._ended) < params.width:
            return True
        if params.early_stopping is True:
            return False
        is_longest = params.early_stopping == "never" and params.length_penalty > 0
        length = self._max_tokens if is_longest else self._length
        return bool(best_total / length**params.length_penalty > self._ended[-1].score)

    def _continued(self, total: float, parent: int, token_id: int, row: Sequence[tuple[int, float]]) -> Beam:
        before, count = self.beams[parent], self._params.logprobs
        logprobs = before.logprobs
        if count is not None:
            logprobs = (*logprobs, TokenLogprobs(dict(row)[token_id], tuple(row[:count])))
        return Beam(parent, before.token_ids + array("i", [token_id]), total, logprobs)

    def _text(self, beam: Beam, reason: FinishReason) -> FoundText:
        score = beam.total / self._length**self._params.length_penalty
        return FoundText(beam.token_ids.tolist(), reason, score, list(beam.logprobs))
