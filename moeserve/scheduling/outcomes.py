"""The outcomes of requests: tokens, ends and refusals."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.kv_transfer import KvTicket
from moeserve.plan import FinishReason, Request, TokenLogprobs
from radix_cache import Miss


@dataclass(slots=True)
class RequestOutput:
    """A request's new token or its end. Exactly one output per request has a `finish_reason`.

    `offered`: at the end, the ticket by which the blocks of the prompt are held for another service.
    """

    request: Request
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    miss: Miss | None = None
    judged: tuple[int, int] = (0, 0)
    offered: KvTicket | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the request gets."""
        return 0 if self.token_id is None else 1


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since the start."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0


class QueueFullError(Exception):
    """The queue has no place for another request."""


class TooLateError(Exception):
    """The request would wait longer than it may."""


class NeverFitsError(Exception):
    """The request could not run even alone; the message gives both token counts."""
