"""The outcomes of requests: tokens, ends and refusals, and how a sampled token becomes an output."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.plan import Chunk, ChunkResult, FinishReason, FoundText, Request, TokenLogprobs
from radix_cache import Miss

# The log probability of a token that was not sampled, since no other one could come.
_CERTAIN = TokenLogprobs(0.0)


@dataclass(slots=True)
class RequestOutput:
    """A request's new token or its end. Exactly one output per request has a `finish_reason`.

    `found`: at the end of a beam search, its answers.
    """

    request: Request
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    miss: Miss | None = None
    found: list[FoundText] | None = None
    judged: tuple[int, int] = (0, 0)

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the request gets."""
        if self.found is None:
            return 0 if self.token_id is None else 1
        return sum(len(text.token_ids) for text in self.found)


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


def append_sampled(request: Request, chunk: Chunk, computed: ChunkResult) -> list[RequestOutput]:
    """Append the tokens that were sampled after a chunk of the request, up to one that is the last of the request.

    Where the end of its thought is due, that follows instead. Return nothing if there is nothing to report, as in the
    middle of a prompt.
    """
    prompt_logprobs = computed.prompt_logprobs
    if prompt_logprobs is not None:
        # After a preemption the request computes some of them again that were reported before.
        prompt_logprobs = prompt_logprobs[request.num_prompt_logprobs - chunk.start :]
        request.num_prompt_logprobs += len(prompt_logprobs)
    if chunk.sampling is None or computed.token_id is None:
        return [RequestOutput(request, prompt_logprobs=prompt_logprobs)] if prompt_logprobs else []
    outputs: list[RequestOutput] = []
    request.num_forced_tokens = 0
    if not request.forced_next:
        for token_id, logprobs in computed.tokens:
            output = _append(request, token_id, logprobs)
            outputs.append(output)
            if output.finish_reason is not None or request.forced_next:
                break
    for token_id in request.forced_next:
        if _has_ended(outputs):
            break
        request.num_forced_tokens += 1
        outputs.append(_append(request, token_id, _CERTAIN if request.sampling.logprobs is not None else None))
    outputs[0].prompt_logprobs = prompt_logprobs
    return outputs


def _has_ended(outputs: list[RequestOutput]) -> bool:
    return bool(outputs) and outputs[-1].finish_reason is not None


def _append(request: Request, token_id: int, logprobs: TokenLogprobs | None) -> RequestOutput:
    """Append the next token of the request, and note whether it is the last one."""
    request.append(token_id)
    output = RequestOutput(request, token_id, None, logprobs)
    if token_id in request.sampling.stop_token_ids:
        output.finish_reason = FinishReason.STOP
    elif request.num_output_tokens >= request.sampling.max_tokens:
        output.finish_reason = FinishReason.LENGTH
    return output
