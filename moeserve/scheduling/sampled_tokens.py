"""How the tokens that were sampled after a chunk, or that parts force in their place, become outputs of its request."""

from __future__ import annotations

from collections.abc import Sequence

from moeserve.plan import Chunk, ChunkResult, FinishReason, Request, TokenLogprobs
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part

# The log probability of a token that was not sampled, since no other one could come.
_CERTAIN = TokenLogprobs(0.0)


def append_sampled(
    request: Request, chunk: Chunk, computed: ChunkResult, watching: Sequence[Part] = ()
) -> list[RequestOutput]:
    """Append the tokens that were sampled after a chunk of the request, up to one that is the last of the request.

    Tokens that a part forces follow in place of sampled ones. Return nothing if there is nothing to report, as in the
    middle of a prompt. watching: the parts that watch the request.
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
    forced = _forced(request, watching)
    for token_id, logprobs in () if forced else computed.tokens:
        outputs.append(_append(request, token_id, logprobs, watching))
        forced = _forced(request, watching)
        if forced or outputs[-1].finish_reason is not None:
            break
    for token_id in forced:
        if outputs and outputs[-1].finish_reason is not None:
            break
        request.num_forced_tokens += 1
        certain = _CERTAIN if request.sampling.logprobs is not None else None
        outputs.append(_append(request, token_id, certain, watching))
    outputs[0].prompt_logprobs = prompt_logprobs
    return outputs


def _forced(request: Request, watching: Sequence[Part]) -> Sequence[int]:
    """Return the tokens that parts force to come next; none for most requests."""
    return next((tokens for part in watching if (tokens := part.forced(request))), ()) if watching else ()


def _append(request: Request, token_id: int, logprobs: TokenLogprobs | None, watching: Sequence[Part]) -> RequestOutput:
    """Append the next token of the request, and note whether it is the last one."""
    request.token_ids.append(token_id)
    for part in watching:
        part.appended(request, token_id)
    output = RequestOutput(request, token_id, None, logprobs)
    if token_id in request.sampling.stop_token_ids:
        output.finish_reason = FinishReason.STOP
    elif request.num_output_tokens >= request.sampling.max_tokens:
        output.finish_reason = FinishReason.LENGTH
    return output
