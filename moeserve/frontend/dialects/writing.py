"""The parts of answers that dialects write alike: events, counts of tokens and log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import msgspec

from moeserve.frontend.dialects.internal import GenerateRequest, TokenText, Usage
from moeserve.frontend.http import DONE
from moeserve.frontend.text import TextTokenizer
from moeserve.plan import TokenLogprobs

WRITTEN_AT_ONCE = 256  # tokens with log probabilities
_LEAST_LOGPROB = -9999.0


class EventWriter:
    """Writes server-sent events with one object each, as chat and completions have them.

    The common fields of an answer are encoded once. Usage is in the last event or in every event if the client asked
    for that.
    """

    def __init__(self, head: dict[str, Any], request: GenerateRequest) -> None:
        """head: the fields before the choices."""
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def choice(
        self,
        index: int,
        content: bytes,
        logprobs: bytes = b"null",
        finish: str | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """Return the event of one choice. content: JSON of one or more fields, `"name":value`; logprobs: JSON."""
        return b'%b,"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head,
            index,
            content,
            logprobs,
            b"null" if finish is None else b'"' + finish.encode() + b'"',
            _usage_tail(usage) if usage is not None and self._continuous_usage else self._tail,
        )

    def end(self, usage: Usage) -> bytes:
        """Return the last events."""
        return (self._head + b',"choices":[]' + _usage_tail(usage) if self._include_usage else b"") + DONE


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object of chat and of completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": min(usage.accepted_prediction_tokens, usage.completion_tokens),
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
        **usage.extensions,
    }


def written(tokens: Sequence[TokenText], entry: Callable[[TokenText], Any]) -> Generator[None, None, msgspec.Raw]:
    """Return the JSON of a list with an entry for each token. Yields between parts of it."""
    parts = []
    for start in range(0, len(tokens), WRITTEN_AT_ONCE):
        if start:
            yield
        part = [entry(token) for token in tokens[start : start + WRITTEN_AT_ONCE]]
        parts.append(msgspec.json.encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def logprob_entry(token: TokenText, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return a token with its log probability and the likeliest tokens, as chat and Responses have it."""

    def alternative(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    logprobs = token.logprobs
    entry = alternative(token.token_id, logprobs.logprob if logprobs else 0.0)
    return {**entry, "top_logprobs": [alternative(*found) for found in (logprobs.top if logprobs else ())]}


def prompt_logprobs(tokens: Sequence[TokenText], tokenizer: TextTokenizer) -> Generator[None, None, msgspec.Raw]:
    """Return the log probabilities of a prompt: for each token null, or an object of alternatives by token id."""
    return written(tokens, lambda token: None if token.logprobs is None else _by_id(token, token.logprobs, tokenizer))


def _by_id(token: TokenText, logprobs: TokenLogprobs, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the likeliest tokens with their ranks, and the prompt's own one first; its rank is null below them."""
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, start=1)}
    found = {token.token_id: logprobs.logprob} | dict(logprobs.top)
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob in found.items()
    }


def _usage_tail(usage: Usage) -> bytes:
    return b',"usage":' + msgspec.json.encode(openai_usage(usage)) + b"}\n\n"


def finite(logprob: float) -> float:
    """Return a number that JSON can hold: a masked token has -inf, for which clients get -9999."""
    return max(logprob, _LEAST_LOGPROB)
