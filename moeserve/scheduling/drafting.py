"""Draft tokens: guesses of how requests go on, and how many of them each step verifies.

A guess is read off tokens that are known: where the last tokens of a request occurred before in its prompt or output,
the same tokens are likely to follow. A wrong guess costs a row of a step and never changes a token.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from moeserve.config import SpeculativeConfig
from moeserve.plan import Chunk, Request
from moeserve.scheduling.cost_model import CostModel, StepSize
from moeserve.scheduling.draft_lengths import Acceptance, Rates, best_lengths
from moeserve.scheduling.plan_draft import PlanDraft
from moeserve.scheduling.request_memory import RequestMemory
from moeserve.scheduling.suffix_index import LONGEST_MATCH, SuffixIndex

# Tokens that are indexed in a step, of all requests together.
_INDEXED_PER_STEP = 4096
# The sources of guesses.
OWN_TEXT = "own"


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
    """The facts about one request that drafting keeps: indexed tokens, rates, and the place of its present guess."""

    rates: Rates
    index: SuffixIndex = field(default_factory=SuffixIndex)
    source: str = OWN_TEXT
    num_matched: int = 0


class Drafting:
    """Guesses the next tokens of requests, learns how good guesses are, and chooses how many to verify.

    The guess of a request is its `draft_tokens`.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        """config: of another method than `none`."""
        self._config = config
        self._known: dict[str, _Known] = {}
        self._acceptance = Acceptance()
        self._cost = CostModel()
        self._allowance = 0
        self.counters = DraftCounters()

    def begin_commit(self) -> None:
        """Begin to receive the tokens of a step."""
        self._allowance = _INDEXED_PER_STEP

    def read(self, request: Request, new_tokens: Sequence[int], chunk: Chunk, num_accepted: int) -> None:
        """Learn from the newest tokens of a request, and guess the next.

        new_tokens: the end of its tokens, empty while its prompt is computed. chunk: brought them, and its first
        `num_accepted` drafts were right.
        """
        if chunk.num_drafts:
            self.counters.count(chunk, num_accepted)
        known = self._known.get(request.request_id)
        if known is None:
            known = self._known[request.request_id] = _Known(self._acceptance.of_request())
        self._allowance -= known.index.extend(request.token_ids, self._allowance)
        if not new_tokens:
            return
        for number, (guess, token) in enumerate(zip(request.draft_tokens, new_tokens, strict=False)):
            is_right = guess == token
            self._acceptance.count(known.rates, known.source, known.num_matched + number, is_right=is_right)
            if not is_right:
                break
        request.draft_masks = ()
        request.draft_tokens = self._guess(request, known)

    def forget(self, request: Request) -> None:
        """Forget a request that has ended."""
        self._known.pop(request.request_id, None)

    def count_step(self, size: StepSize, seconds: float) -> None:
        """Learn from the seconds of a step without prompts."""
        self._cost.observe(size.rows, size.attended, seconds)

    def lengths(self, requests: Sequence[Request], rooms: Sequence[int], size: StepSize, most: int) -> list[int]:
        """Return how many drafts of each request the next step of a rank should verify.

        rooms: the number of drafts that each request may have. size: of the step without drafts. most: the number of
        drafts in all.
        """
        wanted = [min(room, len(request.draft_tokens)) for request, room in zip(requests, rooms, strict=True)]
        if self._config.method != "auto":
            return _within(wanted, most)
        chances = []
        for request, count in zip(requests, wanted, strict=True):
            known = self._known[request.request_id]
            chances.append(self._acceptance.chances(known.rates, known.source, known.num_matched, count))
        attended = size.attended / max(1, size.rows)
        return best_lengths(chances, size.rows, most, lambda rows: self._cost.seconds(rows, attended * rows))

    def plan(
        self,
        requests: Iterable[Request],
        draft: PlanDraft,
        memories: Sequence[RequestMemory],
        num_running: int,
        rope_switch: int | None,
    ) -> dict[str, int]:
        """Return by request how many of its drafts a step should verify, where there are any.

        requests: those that lack one token, or none with the one that is being sampled. memories: by rank.
        num_running: the requests of all ranks that may need a block. rope_switch: see `Scheduler`.
        """
        num_drafts: dict[str, int] = {}
        decodes: list[list[Request]] = [[] for _ in memories]
        for request in requests:
            decodes[request.rank].append(request)
        for rank, (own, memory) in enumerate(zip(decodes, memories, strict=True)):
            size = StepSize(len(own), float(sum(len(request.token_ids) for request in own)))
            rooms = [_room_for_drafts(request, memory, num_running, rope_switch) for request in own]
            # Half of what the step has room for is left to prompts.
            most = (draft.budgets[rank] - len(own)) // 2
            lengths = self.lengths(own, rooms, size, most)
            num_drafts |= {r.request_id: n for r, n in zip(own, lengths, strict=True) if n}
        return num_drafts

    def _guess(self, request: Request, known: _Known) -> array[int]:
        """Return the tokens that are likely to follow, and note where they are from."""
        tokens = request.token_ids
        position, known.num_matched = known.index.find(tokens, tokens[-LONGEST_MATCH:])
        if known.num_matched < self._config.prompt_lookup_min:
            return array("i")
        return self._until_stop(request, tokens[position : position + self._config.num_speculative_tokens])

    def _until_stop(self, request: Request, guess: array[int]) -> array[int]:
        """Cut a guess before a token that ends the request: no row is needed after it."""
        for stop in request.sampling.stop_token_ids:
            if stop in guess:
                guess = guess[: guess.index(stop)]
        return guess


def _room_for_drafts(request: Request, memory: RequestMemory, num_running: int, rope_switch: int | None) -> int:
    """Return how many drafts the request's next chunk may have.

    No row is needed whose token would be one too many, would follow the end of a thought, or would need other angles.
    Drafts take no block that a running request may need for its next token.
    """
    if not request.draft_tokens or request.wants_prompt_logprobs:
        return 0
    num_known = len(request.token_ids)
    room = request.sampling.max_tokens - request.num_output_tokens - 1
    if rope_switch is not None and not request.first_angle:
        room = min(room, rope_switch - num_known)
    if request.sampling.grammar is not None:
        room = min(room, len(request.draft_masks))
    if request.thought is not None:
        room = min(room, request.thought.num_free - 1)
    num_slots = memory.num_empty_slots(request) - (num_known - request.num_planned_tokens)
    if num_slots < min(room, len(request.draft_tokens)):
        num_spare = memory.num_available_blocks(request, sparing=True) - num_running
        if num_spare < memory.num_blocks_for(len(request.draft_tokens)):
            room = min(room, num_slots)
    return max(0, room)


def _within(wanted: list[int], most: int) -> list[int]:
    """Return lengths of at most `most` in all, the first ones first."""
    lengths = []
    for length in wanted:
        lengths.append(min(length, most))
        most -= lengths[-1]
    return lengths
