"""What the scheduler tells the engine of its requests, and how it follows from what was computed."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.plan import Chunk, ChunkResult, TokenLogprobs
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


def take_over(request: Request, chunk: Chunk, computed: ChunkResult) -> RequestOutput | None:
    """Appends the token that was drawn behind a chunk of the request, and says whether it is the last one.

    Returns None where there is nothing to tell, as in the middle of a prompt.
    """
    prompt_logprobs = computed.prompt_logprobs
    if prompt_logprobs is not None:
        # What a preemption made the request compute again was reported before.
        prompt_logprobs = prompt_logprobs[request.num_prompt_logprobs - chunk.start :]
        request.num_prompt_logprobs += len(prompt_logprobs)
    token_id = computed.token_id
    if chunk.sampling is None or token_id is None:
        return RequestOutput(request, prompt_logprobs=prompt_logprobs) if prompt_logprobs else None
    request.token_ids.append(token_id)
    output = RequestOutput(request, token_id, None, computed.logprobs, prompt_logprobs)
    if token_id in chunk.sampling.stop_token_ids:
        output.finish_reason = FinishReason.STOP
    elif request.num_output_tokens >= chunk.sampling.max_tokens:
        output.finish_reason = FinishReason.LENGTH
    return output
