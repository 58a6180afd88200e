"""Draft tokens: guesses of how requests go on, and how many of them each step verifies.

A guess is read off tokens that are known (`moeserve.scheduling.draft_sources`). A wrong guess costs a row of a step and
never changes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from moeserve.plan import Chunk, Request
from moeserve.scheduling.cost_model import CostModel, StepSize
from moeserve.scheduling.draft_lengths import Acceptance, Chances, Rates, best_lengths, may_pay
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

    Its draft tokens are those of the guess, then `num_forced` and `num_laid` tokens, see `MadeMask`.
    """

    rates: Rates
    num_read: int
    own: OwnText = field(default_factory=OwnText)
    cached: CachedText = field(default_factory=CachedText)
    predicted: PredictedText | None = None
    guess: Guess = _NO_GUESS
    num_forced: int = 0
    num_laid: int = 0

    def forget_added(self) -> None:
        """Leave the request only the drafts of the guess."""
        self.num_forced = self.num_laid = 0


class _Asked(NamedTuple):
    """The requests of a rank that have drafts. rooms: the number of drafts that each may have. size: of the rank's step
    without drafts. most: the number of drafts in all, not negative."""

    requests: Sequence[Request]
    rooms: Sequence[int]
    size: StepSize
    most: int


class Drafting:
    """Guesses the next tokens of requests, learns how good guesses are, and chooses how many to verify.

    The guess for a request is its `draft_tokens`. It is judged by the tokens that follow, so a source is learnt whether
    or not a step verifies its guesses.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        """config: of another method than `none`."""
        self._config = config
        self._known: dict[str, _Known] = {}
        self._acceptance = Acceptance(_FIRST_RATES)
        self._cost = CostModel()
        self._allowance = 0
        # By rank, whether the next step may have drafts.
        self._pays = list[bool]()
        self.counters = DraftCounters()

    @property
    def most_forced(self) -> int:
        """The number of drafts up to which tokens that a grammar forces are added; `ngram` has them from text alone."""
        return 0 if self._config.method == "ngram" else self._config.num_speculative_tokens

    @property
    def reads_predictions(self) -> bool:
        """True if steps predict drafts by an MTP layer, which needs the token behind each chunk."""
        return self._config.num_predicted_tokens > 0

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks on which the next step may have drafts."""
        return [rank for rank, pays in enumerate(self._pays) if pays]

    def begin_commit(self, draft: PlanDraft, budget: int) -> None:
        """Begin to receive the tokens of a step. The number of its requests decides where the next one may draft.

        On other ranks no text is read, which costs more than planning. budget: of a rank's step.
        """
        self._allowance = _INDEXED_PER_STEP
        self._pays.clear()
        for plan, size in zip(draft.plans, draft.sizes, strict=True):
            count = len(plan.chunks)
            most = min(count * self._config.num_speculative_tokens, _num_drafts(budget, count))
            self._pays.append(self._may_pay(count, most, size))

    def _may_pay(self, num_rows: int, most: int, size: StepSize) -> bool:
        """Return whether a step could gain by up to `most` drafts. size: of one whose rows attend to as much each."""
        if self._config.method != "auto" or not num_rows:
            return True
        attended = size.attended / max(1, size.rows)
        return may_pay(num_rows, most, lambda rows: self._cost.seconds(rows, attended * rows))

    def read(
        self,
        request: Request,
        memory: RequestMemory,
        new_tokens: Sequence[int],
        chunk: Chunk,
        num_accepted: int,
        predicted: Sequence[int] = (),
    ) -> None:
        """Learn from the newest tokens of a request, and guess the next.

        memory: of its rank. new_tokens: the end of its tokens, empty while its prompt is computed. chunk: brought them,
        and its first `num_accepted` drafts were right. predicted: what an MTP layer has predicted behind them.
        """
        if chunk.num_drafts:
            self.counters.count(chunk, num_accepted)
        known = self._known.get(request.request_id)
        if known is None:
            text = PredictedText(request.asked.predicted) if request.asked.predicted else None
            known = _Known(self._acceptance.of_request(), request.num_prompt_tokens, predicted=text)
            self._known[request.request_id] = known
        if not self._pays[request.rank] and not chunk.num_drafts:
            known.forget_added()
            request.draft_masks = ()
            if request.draft_tokens:
                request.draft_tokens = array("i")
            return
        self._allowance -= known.own.extend(request.token_ids, self._allowance)
        if not new_tokens:
            return
        # After steps that were not read, these are the tokens of several steps.
        new_tokens, known.num_read = request.token_ids[known.num_read :], len(request.token_ids)
        self._judge(known, known.guess, new_tokens)
        if known.guess.source == PREDICTED_TEXT and chunk.num_drafts:
            _count_predicted(request, known.guess, chunk, num_accepted)
        self._judge_added(request, known, new_tokens)
        known.cached.follow(new_tokens)
        if known.predicted is not None:
            known.predicted.follow(new_tokens, request.token_ids[-min(request.num_output_tokens, _TAIL) :])
        guesses = (self._until_stop(request, guess) for guess in self._guesses(request, known, memory, predicted))
        known.guess = next((guess for guess in guesses if guess.tokens), _NO_GUESS)
        known.forget_added()
        request.draft_masks = ()
        request.draft_tokens = known.guess.tokens

    def receive(
        self,
        request: Request,
        draft_tokens: array[int],
        draft_masks: Sequence[bytes],
        num_forced: int,
        num_laid: int = 0,
    ) -> None:
        """Replace a request's drafts by those that its grammar allows and adds, see `MadeMask`.

        A request without tokens of its own yet gets no drafts.
        """
        known = self._known.get(request.request_id)
        if known is not None:
            known.num_forced, known.num_laid = num_forced, num_laid
            request.draft_tokens, request.draft_masks = draft_tokens, tuple(draft_masks)

    def forget(self, request: Request) -> None:
        self._known.pop(request.request_id, None)

    def count_step(self, size: StepSize, seconds: float) -> None:
        """Learn from the seconds of a step without prompts."""
        self._cost.observe(size.rows, size.attended, seconds)

    def plan(self, decodes: Mapping[int, Sequence[Request]], draft: PlanDraft, room: DraftRoom) -> dict[str, int]:
        """Return by request how many of its drafts a step should verify, where there are any.

        decodes: by rank, requests that lack one token, or none but the one that is being sampled; tokens lost with a
        state do not count.
        """
        asked = list[_Asked]()
        for rank, own in decodes.items():
            guessed = [request for request in own if request.draft_tokens]
            if not guessed:
                continue
            # Only tokens lost with a state make a decode's chunk more than one row.
            if own[0].state is None:
                rows, attended = len(own), sum([len(request.token_ids) for request in own])
            else:
                counts = list(map(_num_rows, own))
                rows = sum(counts)
                attended = sum([len(request.token_ids) * count for request, count in zip(own, counts, strict=True)])
            size = StepSize(rows, float(attended))
            most = min(_num_drafts(draft.budgets[rank], rows), sum([len(request.draft_tokens) for request in guessed]))
            # Rows that are computed again give no token, so that drafts behind them may pay sooner.
            if rows == len(own) and not self._may_pay(rows, most, size):
                continue
            asked.append(_Asked(guessed, room.of_rank(rank, guessed), size, most))
        num_drafts: dict[str, int] = {}
        for each, lengths in zip(asked, self._lengths(asked), strict=True):
            num_drafts |= {r.request_id: n for r, n in zip(each.requests, lengths, strict=True) if n}
        return num_drafts

    def _lengths(self, asked: Sequence[_Asked]) -> Sequence[Sequence[int]]:
        """Return by rank how many drafts of each request the next step should verify."""
        if self._config.method != "auto":
            return [_within(each.rooms, each.most) for each in asked]
        rooms = [room for each in asked for room in each.rooms]
        if not any(rooms):
            return [[0] * len(each.rooms) for each in asked]
        requests = [request for each in asked for request in each.requests]
        known = [self._known[request.request_id] for request in requests]
        # All ranks at once: for a few rows the cost of such arithmetic is per call.
        chances = self._acceptance.chances(
            [each.rates for each in known],
            [each.guess for each in known],
            [
                len(request.draft_tokens) - each.num_forced - each.num_laid
                for request, each in zip(requests, known, strict=True)
            ],
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
        if requests[0].state is not None:
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

    def _judge_added(self, request: Request, known: _Known, new_tokens: Sequence[int]) -> None:
        """Learn whether forced tokens, and then those of the layout, came where all drafts before them were right."""
        drafts, laid = request.draft_tokens, len(request.draft_tokens) - known.num_laid
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


def _count_predicted(request: Request, guess: Guess, chunk: Chunk, num_accepted: int) -> None:
    """Count the first drafts of a chunk that come from the text that the client predicts."""
    num_predicted = guess.num_right(chunk.token_ids[-chunk.num_drafts :])
    num_right = min(num_accepted, num_predicted)
    right, wrong = request.judged
    request.judged = right + num_right, wrong + num_predicted - num_right


@dataclass(frozen=True, slots=True)
class DraftRoom:
    """How many drafts the next chunks of requests may have.

    memories: by rank. num_running: the requests of all ranks that may need a block. num_coming: the waiting requests
    that may get a place. rope_switch: see `Scheduler`.
    """

    memories: Sequence[RequestMemory]
    num_running: int
    num_coming: int
    rope_switch: int | None

    def of_rank(self, rank: int, requests: Sequence[Request]) -> list[int]:
        """Return for each request of a rank how many drafts it may have.

        Each request with drafts takes a free slot for recurrent states where the model has them; slots for requests
        that may come are left.
        """
        memory, rooms = self.memories[rank], list[int]()
        num_slots, num_spare = memory.num_free_slots - self.num_coming, dict[str, int]()
        block_size = memory.block_size if memory.needs_slots_alone and self.rope_switch is None else 0
        for request in requests:
            lease, end = request.lease, len(request.token_ids) + len(request.draft_tokens)
            # So it is with most requests of a large step, which costs by their number.
            if (
                lease is not None
                and end <= len(lease.block_ids) * block_size
                and end < request.sampling.max_tokens + request.num_prompt_tokens
                and request.is_always_plain
                and request.thought is None
            ):
                rooms.append(len(request.draft_tokens))
                continue
            rooms.append(self._of(request, memory, num_spare) if num_slots > 0 else 0)
            num_slots -= rooms[-1] > 0
        return rooms

    def _of(self, request: Request, memory: RequestMemory, num_spare: dict[str, int]) -> int:
        """No row is needed whose token would be one too many, would follow the end of a thought, or would need other
        angles. Drafts take no block that a running request may need for its next token.

        num_spare: by namespace, the blocks that are left for drafts, as far as they were counted."""
        num_guessed, num_known, lease = len(request.draft_tokens), len(request.token_ids), request.lease
        assert lease is not None
        room = min(request.sampling.max_tokens + request.num_prompt_tokens - num_known - 1, num_guessed)
        if request.state is not None:
            room = min(room, memory.draft_room(request))
        if self.rope_switch is not None and not request.first_angle:
            room = min(room, self.rope_switch - num_known)
        if not request.is_always_plain:
            if request.wants_prompt_logprobs:
                return 0
            if request.sampling.grammar is not None:
                room = min(room, len(request.draft_masks))
        if request.thought is not None:
            room = min(room, request.thought.num_free - 1)
        num_slots = len(lease.block_ids) * memory.block_size - num_known
        if num_slots < room:
            spare = num_spare.get(request.namespace)
            if spare is None:
                spare = memory.num_available_blocks(request, sparing=True) - self.num_running
                num_spare[request.namespace] = spare
            if spare < memory.num_blocks_for(num_guessed):
                room = num_slots
        return max(0, room)


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
