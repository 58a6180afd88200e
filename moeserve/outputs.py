"""What the scheduler tells the engine of its requests."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.plan import TokenLogprobs
from moeserve.request import FinishReason, Request


@dataclass(slots=True)
class RequestOutput:
    """What became of a request: new tokens, or its end. Exactly one output per request has a `finish_reason`."""

    request: Request
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


class QueueFullError(Exception):
    """As many requests wait as may."""


class NeverFitsError(Exception):
    """The request could not run even alone; the message names both token counts."""
