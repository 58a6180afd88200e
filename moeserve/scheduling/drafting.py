"""Draft tokens: guesses of how requests go on, and how many of them each step verifies.

A guess is read off tokens that are known (`moeserve.scheduling.draft_sources`). A wrong guess costs a row of a step and
never changes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from moeserve.plan import Chunk, ChunkResult, Request
from moeserve.scheduling.cost_model import CostModel, StepSize
from moeserve.scheduling.draft_lengths import Acceptance, Chances, Rates, best_lengths, may_pay
from moeserve.scheduling.draft_room import DraftRoom
from moeserve.scheduling.draft_sources import (
    CACHED_TEXT,
    FORCED,
    LAYOUT,
    MTP,
    OWN_TEXT,
    PREDICTED_TEXT,
    CachedText,
    Guess,
    OwnText,
    PredictedText,
)
from moeserve.scheduling.grammars import Drafts
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.plan_draft import PlanDraft
from moeserve.scheduling.request_memory import RequestMemory
from moeserve.settings.drafts import SpeculativeConfig

# Tokens that are indexed in a step, of all requests together.
_INDEXED_PER_STEP = 4096
# The number of tokens at an answer's end by which it is found again in its predicted text.
_TAIL = 3
# The shares of right guesses that are expected of sources before they were seen to guess: right nearly always in the
# benchmark of an agent's second run and of predicted answers. Forced tokens are wrong only where the model divides the
# same text into tokens in another way.
_FIRST_RATES = {OWN_TEXT: 0.5, CACHED_TEXT: 0.9, PREDICTED_TEXT: 0.9, MTP: 0.5, FORCED: 0.9, LAYOUT: 0.5}
_NO_GUESS = Guess(OWN_TEXT, 0, array("i"))


@dataclass(slots=True)
class DraftCounters:
    """Totals since the start: chunks with drafts, their drafts, and accepted drafts by their place in the chunk."""

    chunks: int = 0
    tokens: int = 0
    accepted: list[int] = field(default_factory=list)

    def count(self, chunk: Chunk, num_accepted: int) -> None:
        """Count a chunk whose first `num_accepted` drafts were right."""
        self.chunks += 1
        self.tokens += chunk.num_drafts
        self.accepted.extend([0] * (chunk.num_drafts - len(self.accepted)))
        for place in range(num_accepted):
            self.accepted[place] += 1


@dataclass(slots=True)
class _Known:
    """The facts about one request that drafting keeps: its rates, its texts and its present guess.

    predicted: None where the client predicts no text. num_read: the number of the request's tokens that they have seen.

    tokens: its draft tokens, which are those of the guess, then `num_forced` and `num_laid` tokens, see `MadeMask`.
    """

    rates: Rates
    num_read: int
    own: OwnText = field(default_factory=OwnText)
    cached: CachedText = field(default_factory=CachedText)
    predicted: PredictedText | None = None
    guess: Guess = _NO_GUESS
    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_forced: int = 0
    num_laid: int = 0

    def replace(self, tokens: array[int], num_forced: int = 0, num_laid: int = 0) -> None:
        """Replace the draft tokens."""
        self.tokens, self.num_forced, self.num_laid = tokens, num_forced, num_laid


class _Asked(NamedTuple):
    """The requests of a rank that have drafts. rooms: the number of drafts that each may have. size: of the rank's step
    without drafts. most: the number of drafts in all, not negative. has_states: whether a wrong draft costs a recurrent
    state, so that tokens are computed again."""

    requests: Sequence[Request]
    known: Sequence[_Known]
    rooms: Sequence[int]
    size: StepSize
    most: int
    has_states: bool


class Drafting(Drafts):
    """Guesses the next tokens of requests, learns how good guesses are, and chooses how many to verify.

    A guess is judged by the tokens that follow, so a source is learnt whether or not a step verifies its guesses.
    """

    makes_any = True

    def __init__(self, config: SpeculativeConfig) -> None:
        """config: of another method than `none`."""
        self._config = config
        # `ngram` has drafts from text alone.
        self.most_forced = 0 if config.method == "ngram" else config.num_speculative_tokens
        # An MTP layer reads the token behind each chunk.
        self.tells_following = config.num_predicted_tokens > 0
        self._known: dict[str, _Known] = {}
        self._acceptance = Acceptance(_FIRST_RATES)
        self._cost = CostModel()
        self._allowance = 0
        # By rank, whether the next step may have drafts.
        self._pays = list[bool]()
        self.counters = DraftCounters()

    def begin_commit(self, draft: PlanDraft) -> None:
        """Begin to receive the tokens of a step. The number of its requests decides where the next one may draft.

        On other ranks no text is read, which costs more than planning.
        """
        self._allowance = _INDEXED_PER_STEP
        self._pays.clear()
        for plan, size in zip(draft.plans, draft.sizes, strict=True):
            count = len(plan.chunks)
            most = min(count * self._config.num_speculative_tokens, _num_drafts(draft.budget, count))
            self._pays.append(self._may_pay(count, most, size))

    def _may_pay(self, num_rows: int, most: int, size: StepSize) -> bool:
        """Return whether a step could gain by up to `most` drafts. size: of one whose rows attend to as much each."""
        if self._config.method != "auto" or not num_rows:
            return True
        attended = size.attended / max(1, size.rows)
        return may_pay(num_rows, most, lambda rows: self._cost.seconds(rows, attended * rows))

    def followed(
        self,
        request: Request,
        memory: RequestMemory,
        chunk: Chunk,
        computed: ChunkResult,
        outputs: Sequence[RequestOutput],
    ) -> None:
        """Learn from the newest tokens of a request, and guess the next."""
        num_new = len(outputs) if outputs and outputs[-1].token_id is not None else 0
        num_accepted = max(0, num_new - request.num_forced_tokens - 1)
        if chunk.num_drafts:
            self.counters.count(chunk, num_accepted)
        known = self._known.get(request.request_id)
        if known is None:
            text = PredictedText(request.asked.predicted) if request.asked.predicted else None
            known = _Known(self._acceptance.of_request(), request.num_prompt_tokens, predicted=text)
            self._known[request.request_id] = known
        if not self._pays[request.rank] and not chunk.num_drafts:
            if known.tokens:
                known.replace(_NO_GUESS.tokens)
            return
        self._allowance -= known.own.extend(request.token_ids, self._allowance)
        if not num_new:
            return
        # After steps that were not read, these are the tokens of several steps.
        new_tokens, known.num_read = request.token_ids[known.num_read :], len(request.token_ids)
        self._judge(known, known.guess, new_tokens)
        if known.guess.source == PREDICTED_TEXT and chunk.num_drafts:
            outputs[0].judged = _judged(known.guess, chunk, num_accepted)
        self._judge_added(known, new_tokens)
        known.cached.follow(new_tokens)
        if known.predicted is not None:
            known.predicted.follow(new_tokens, request.token_ids[-min(request.num_output_tokens, _TAIL) :])
        # Behind other tokens than the sampled ones nothing was predicted.
        is_sampled = num_new == len(computed.tokens) and not request.num_forced_tokens
        predicted = computed.drafts if is_sampled else ()
        guesses = (self._until_stop(request, guess) for guess in self._guesses(request, known, memory, predicted))
        known.guess = next((guess for guess in guesses if guess.tokens), _NO_GUESS)
        known.replace(known.guess.tokens)

    def of(self, request: Request) -> array[int]:
        known = self._known.get(request.request_id)
        return _NO_GUESS.tokens if known is None else known.tokens

    def receive(self, request: Request, tokens: array[int], num_forced: int, num_laid: int) -> None:
        """Replace a request's drafts. A request without tokens of its own yet gets none."""
        known = self._known.get(request.request_id)
        if known is not None:
            known.replace(tokens, num_forced, num_laid)

    def left(self, output: RequestOutput) -> None:
        self._known.pop(output.request.request_id, None)

    def counted(self, size: StepSize, seconds: float, *, has_prompts: bool) -> None:
        """Learn from the seconds of a step without prompts."""
        if not has_prompts:
            self._cost.observe(size.rows, size.attended, seconds)

    def drafts(self, draft: PlanDraft, room: DraftRoom) -> dict[str, array[int]]:
        """Return by request the drafts that the step should verify, where there are any.

        A request whose token the previous plan will sample is among them if it should wait for that token, because its
        drafts can only follow it.
        """
        if not any(known.tokens for known in self._known.values()):
            return {}
        asked = list[_Asked]()
        for rank, own in room.decodes([rank for rank, pays in enumerate(self._pays) if pays]).items():
            every = map(self._known.get, [request.request_id for request in own])
            known = [one for one in every if one is not None and one.tokens]
            if not known:
                continue
            # Only tokens lost with a state make a decode's chunk more than one row.
            has_states = room.memories[rank].has_states
            if not has_states:
                rows, attended = len(own), sum([len(request.token_ids) for request in own])
            else:
                counts = list(map(_num_rows, own))
                rows = sum(counts)
                attended = sum([len(request.token_ids) * count for request, count in zip(own, counts, strict=True)])
            size, num_guessed = StepSize(rows, float(attended)), [len(one.tokens) for one in known]
            most = min(_num_drafts(draft.budgets[rank], rows), sum(num_guessed))
            # Rows that are computed again give no token, so that drafts behind them may pay sooner.
            if rows == len(own) and not self._may_pay(rows, most, size):
                continue
            guessed = [request for request in own if self.of(request)]
            rooms = room.of_rank(rank, guessed, num_guessed)
            asked.append(_Asked(guessed, known, rooms, size, most, has_states))
        drafts: dict[str, array[int]] = {}
        for each, lengths in zip(asked, self._lengths(asked), strict=True):
            drafts |= {
                request.request_id: one.tokens if length == len(one.tokens) else one.tokens[:length]
                for request, one, length in zip(each.requests, each.known, lengths, strict=True)
                if length
            }
        return drafts

    def samples(self) -> dict[str, list[list[str | int | float]]]:
        counters = self.counters
        return {
            "moeserve_draft_chunks": [[counters.chunks]],
            "moeserve_draft_tokens": [[counters.tokens]],
            "moeserve_draft_accepted_tokens": [[sum(counters.accepted)]],
            "moeserve_draft_accepted_tokens_per_pos": [[str(p), count] for p, count in enumerate(counters.accepted)],
        }

    def _lengths(self, asked: Sequence[_Asked]) -> Sequence[Sequence[int]]:
        """Return by rank how many drafts of each request the next step should verify."""
        if self._config.method != "auto":
            return [_within(each.rooms, each.most) for each in asked]
        rooms = [room for each in asked for room in each.rooms]
        if not any(rooms):
            return [[0] * len(each.rooms) for each in asked]
        known = [one for each in asked for one in each.known]
        # All ranks at once: for a few rows the cost of such arithmetic is per call.
        chances = self._acceptance.chances(
            [each.rates for each in known],
            [each.guess for each in known],
            [len(each.tokens) - each.num_forced - each.num_laid for each in known],
            [each.num_forced for each in known],
            rooms,
        )
        ends = accumulate(len(each.rooms) for each in asked)
        return [
            self._of_rank(each, chances[end - len(each.rooms) : end]) for each, end in zip(asked, ends, strict=True)
        ]

    def _of_rank(self, asked: _Asked, chances: Chances) -> list[int]:
        """Return how many drafts of each request the next step of a rank should verify. chances: of their drafts."""
        requests, size, cost = asked.requests, asked.size, self._cost
        attended = size.attended / max(1, size.rows)
        lost, num_again = None, 0
        if asked.has_states:
            num_rows = list(map(_num_rows, requests))
            lost, num_again = _lost_rows(chances, num_rows), sum(num_rows) - len(num_rows)
        return best_lengths(
            chances, size.rows, asked.most, lambda rows: cost.seconds(rows, attended * rows), lost, num_again
        )

    def _judge(self, known: _Known, guess: Guess, new_tokens: Sequence[int]) -> None:
        """Learn which tokens of a guess have followed, up to the first wrong one."""
        num_right = guess.num_right(new_tokens)
        num_told = min(num_right + 1, len(guess.tokens), len(new_tokens))
        self._acceptance.count(known.rates, guess.source, guess.num_matched, num_right, num_told)

    def _judge_added(self, known: _Known, new_tokens: Sequence[int]) -> None:
        """Learn whether forced tokens, and then those of the layout, came where all drafts before them were right."""
        drafts, laid = known.tokens, len(known.tokens) - known.num_laid
        for source, first, end in ((FORCED, laid - known.num_forced, laid), (LAYOUT, laid, len(drafts))):
            if first < end and array("i", new_tokens[:first]) == drafts[:first]:
                self._judge(known, Guess(source, 0, drafts[first:end]), new_tokens[first:])

    def _guesses(
        self, request: Request, known: _Known, memory: RequestMemory, predicted: Sequence[int]
    ) -> Iterator[Guess]:
        """Yield the guesses of all sources that have one, that of the usually surest source first."""
        most = self._config.num_speculative_tokens
        if known.predicted is not None:
            yield known.predicted.guess(most)
        if self._config.method != "ngram":
            yield known.cached.guess(request, memory, most)
        yield known.own.guess(request.token_ids, self._config.prompt_lookup_min, most)
        yield Guess(MTP, 1, array("i", predicted))

    def _until_stop(self, request: Request, guess: Guess) -> Guess:
        """Cut a guess before a token that ends the request: no row is needed after it."""
        tokens = guess.tokens
        for stop in request.sampling.stop_token_ids:
            if stop in tokens:
                tokens = tokens[: tokens.index(stop)]
        return guess if tokens is guess.tokens else guess._replace(tokens=tokens)


def _judged(guess: Guess, chunk: Chunk, num_accepted: int) -> tuple[int, int]:
    """Count the first drafts of a chunk that come from the text that the client predicts: right and wrong ones."""
    num_predicted = guess.num_right(chunk.token_ids[-chunk.num_drafts :])
    num_right = min(num_accepted, num_predicted)
    return num_right, num_predicted - num_right


def _lost_rows(chances: Chances, num_rows: Sequence[int]) -> Chances:
    """Return how many rows of its chunk a request with a recurrent state is likely to compute again for each draft.

    If a draft is the first wrong one, that are all rows before it. num_rows: by request, before its drafts.
    """
    before = np.concatenate((np.ones((len(chances), 1)), chances[:, :-1]), axis=1)
    return (before - chances) * (np.array(num_rows)[:, None] + np.arange(chances.shape[1]))


def _num_rows(request: Request) -> int:
    """Return how many tokens the request's next chunk has before its drafts."""
    return max(1, len(request.token_ids) - request.num_computed_tokens - request.num_scheduled_tokens)


def _num_drafts(budget: int, num_rows: int) -> int:
    """Return the most drafts of a step with `num_rows` other rows: half of the free rows are left to prompts."""
    return max(0, budget - num_rows) // 2


def _within(wanted: Sequence[int], most: int) -> list[int]:
    """Return lengths of at most `most` in all, the first ones first."""
    lengths = []
    for length in wanted:
        lengths.append(min(length, most))
        most -= lengths[-1]
    return lengths
