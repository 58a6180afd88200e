"""What one step computes, and what came of it. A plan is complete: whoever executes it needs no other state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsBytes

from moeserve.request import SamplingParams

# What one request may carry of the cached prefix it was admitted with.
MAX_ANNOTATION_BYTES = 4096


@dataclass(slots=True)
class Chunk:
    """One request's part of a step: `token_ids` enter at position `start`, their KV goes to the slots of `block_table`.

    `sampling` is None for a chunk that does not reach the end of the request's tokens. `block_table` is the request's
    own array, which only grows while the plan is in flight. `extras` is None for most.

    `drawn_by` is set where the plan before is still in flight: the chunk's one token is what that plan's chunk number
    `drawn_by` among its sampled ones will draw, and `token_ids` holds a zero in its place.

    `annotation`: what is kept with the cached tokens before `start`, at most MAX_ANNOTATION_BYTES; only in the first
    chunk after the request's admission. Whoever wrote it (`ChunkResult.annotation`) knows what it means.
    """

    request_id: str
    token_ids: array[int]
    start: int
    block_table: array[int]
    sampling: SamplingParams | None
    extras: ChunkExtras | None = None
    drawn_by: int | None = None
    annotation: bytes | None = None

    @property
    def num_logit_rows(self) -> int:
        """Of how many of its last tokens the logits are wanted: all for log probabilities of the prompt."""
        if self.extras is not None and self.extras.prompt_targets:
            return len(self.token_ids)
        return 0 if self.sampling is None else 1


@dataclass(slots=True)
class ChunkExtras:
    """What few chunks need besides.

    `history` (prompt and output so far) travels where the draw depends on it. `banned_token_ids` may not be drawn (EOS
    before `min_tokens`). `prompt_targets` are the prompt tokens that follow the chunk's tokens, whose log probabilities
    are wanted; None for no such wish.
    """

    history: array[int] | None = None
    num_prompt_tokens: int = 0
    banned_token_ids: tuple[int, ...] = ()
    prompt_targets: array[int] | None = None
    num_top_logprobs: int = 0


@dataclass(slots=True)
class StepPlan:
    """The chunks of one forward, in row order. `zeroed_blocks` changed hands: they are cleared before any write."""

    step: int
    chunks: list[Chunk]
    zeroed_blocks: array[int] = field(default_factory=lambda: array("i"))

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_logit_rows(self) -> int:
        """Of how many tokens the logits are wanted."""
        return sum(chunk.num_logit_rows for chunk in self.chunks)


def wanted_logits(chunks: Sequence[Chunk]) -> tuple[list[int], list[range]]:
    """The rows of a step whose logits are wanted, and each chunk's place among them."""
    wanted: list[int] = []
    places = []
    row = 0
    for chunk in chunks:
        row += len(chunk.token_ids)
        first_place = len(wanted)
        wanted.extend(range(row - chunk.num_logit_rows, row))
        places.append(range(first_place, len(wanted)))
    return wanted, places


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probability of one token; `top` holds (token id, logprob) of the likeliest, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class ChunkResult:
    """What a chunk gave: the drawn token (None without sampling), or the error that makes its request fail alone.

    `annotation`: to be kept with the request's cached tokens up to the chunk's end.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    annotation: bytes | None = None


@dataclass(slots=True)
class StepResult:
    """One `ChunkResult` per chunk of the plan, in the plan's order.

    `routing`: the experts that the gates chose for the plan's rows (bytes of `experts.routing.step_routing`, or what
    becomes them on demand), if recorded.
    `sent`: of one rank of several, what it has sent since the start: rows to each rank, then bytes to each rank.
    """

    step: int
    chunks: list[ChunkResult]
    routing: SupportsBytes | None = None
    sent: list[int] | None = None
