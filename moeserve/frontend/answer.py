"""From an internal request to the engine's requests, and from the engine's outputs to text, deltas and usage."""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from moeserve.frontend.cache_report import describe_miss
from moeserve.frontend.dialects.internal import Delta, GenerateRequest, TokenText, Usage
from moeserve.frontend.http import ApiError, context_length_exceeded, internal_error
from moeserve.frontend.text import IncrementalDetokenizer, StopMatcher, TextTokenizer
from moeserve.plan import CacheWish, FinishReason, TokenLogprobs
from moeserve.wire import Generate, Output, pack_token_ids

_SEED_MASK = 2**63 - 1


def build_generates(
    request: GenerateRequest,
    prompts: Sequence[list[int]],
    *,
    request_id: str,
    namespace: str,
    seed: int,
    max_model_len: int,
    wishes: Sequence[CacheWish | None] | None = None,
) -> list[Generate]:
    """Return one message per choice, in the order of the choices. Raises ApiError if a prompt does not fit.

    wishes: of each prompt.
    """
    generates: list[Generate] = []
    for number, prompt in enumerate(prompts):
        wish = wishes[number] if wishes is not None else None
        packed = pack_token_ids(prompt)
        wanted = request.max_tokens
        if wanted is not None and request.fit_context:
            wanted = min(wanted, max(1, max_model_len - len(prompt)))
        max_tokens = check_length(len(prompt), wanted, max_model_len, request.prompt_field)
        for sample in range(request.n):
            sampling = replace(request.sampling, max_tokens=max_tokens, seed=derive_seed(seed, sample))
            own_id = f"{request_id}-{len(generates)}"
            generates.append(Generate(own_id, packed, sampling, namespace, request.priority, wish))
    return generates


def check_length(num_prompt_tokens: int, max_tokens: int | None, max_model_len: int, param: str | None = None) -> int:
    """Return the most tokens that the output may have. Raises ApiError if prompt and output do not fit."""
    wanted = 1 if max_tokens is None else max_tokens
    if num_prompt_tokens + wanted > max_model_len:
        raise context_length_exceeded(max_model_len, num_prompt_tokens, wanted, param=param)
    return max_model_len - num_prompt_tokens if max_tokens is None else max_tokens


def derive_seed(seed: int, sample: int) -> int:
    """Return the seed of sample `sample`: the first one has `seed` itself, the others are independent of it."""
    if sample == 0:
        return seed & _SEED_MASK
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK


class Answer:
    """The state of an answer: turns outputs into deltas and counts tokens.

    `finishes` collects (choice, tokens to keep) of choices that met a stop string, for the caller to tell the engine.
    """

    def __init__(self, request: GenerateRequest, prompts: Sequence[list[int]], tokenizer: TextTokenizer) -> None:
        self.finishes: list[tuple[int, int]] = []
        self.num_open = request.num_choices
        self._n = request.n
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._cached: list[int | None] = [None] * len(prompts)
        self._reports: dict[int, dict[str, Any]] = {}
        self._num_tokens = [0] * request.num_choices
        self._echoes = [
            _Echo(request, prompts[choice // request.n], tokenizer, choice) if request.echo else None
            for choice in range(request.num_choices)
        ]
        self._texts = [
            OutputText(
                choice,
                tokenizer,
                prompts[choice // request.n],
                stops=request.stop,
                min_tokens=request.sampling.min_tokens,
                wants_logprobs=request.sampling.logprobs is not None,
                offset=echo.num_chars if (echo := self._echoes[choice]) else 0,
            )
            for choice in range(request.num_choices)
        ]

    @property
    def usage(self) -> Usage:
        """The counts so far. A prompt counts once, however many samples it has."""
        return Usage(
            prompt_tokens=sum(map(len, self._prompts)),
            completion_tokens=sum(self._num_tokens),
            cached_tokens=sum(cached or 0 for cached in self._cached),
            cache_report=self._report() if self._reports else None,
        )

    def take(self, choice: int, output: Output) -> list[Delta]:
        """Return the deltas of one output of a choice. Raises ApiError if the request failed."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            raise _failure(output)
        self._note_cached(choice, output)
        if output.miss is not None and choice % self._n == 0:
            prompt = choice // self._n
            num_cached = output.num_cached_tokens or 0
            self._reports[prompt] = describe_miss(output.miss, self._prompts[prompt], num_cached, self._tokenizer)
        deltas = []
        if echo := self._echoes[choice]:
            echo.push(output)
            if output.token_ids or output.finish_reason is not None:
                deltas.append(echo.delta)
                self._echoes[choice] = None
        text = self._texts[choice]
        stopped_before = text.keep_tokens is not None
        delta = text.push(output)
        if output.finish_reason is not None:
            self.num_open -= 1
            text.finish(delta, output.finish_reason.value)
        elif text.keep_tokens is not None and not stopped_before:
            self.finishes.append((choice, text.keep_tokens))
        self._num_tokens[choice] = text.num_tokens if text.keep_tokens is None else text.keep_tokens
        if delta.text or delta.tokens or delta.finish_reason:
            deltas.append(delta)
        return deltas

    def _report(self) -> dict[str, Any] | list[dict[str, Any]]:
        """Return the cache report of the prompt, or the reports of the prompts in their order."""
        reports = [self._reports[prompt] for prompt in sorted(self._reports)]
        return reports[0] if len(self._prompts) == 1 else reports

    def _note_cached(self, choice: int, output: Output) -> None:
        """Note the cached prompt tokens that the first sample reports with its first token.

        Later numbers may count what a preempted request found again, its own tokens among them.
        """
        prompt, sample = divmod(choice, self._n)
        if sample == 0 and self._cached[prompt] is None and (output.token_ids or output.finish_reason is not None):
            self._cached[prompt] = output.num_cached_tokens


def _failure(output: Output) -> ApiError:
    if output.finish_reason is FinishReason.ABORT:
        return internal_error("The server ended this request before it was complete")
    return internal_error()


class OutputText:
    """Turns the engine's outputs of one choice into deltas: detokenises, finds stop strings, holds back log
    probabilities with their text.

    `keep_tokens` is set once a stop string is found: the number of output tokens whose text begins before it, at least
    one. Only these count.
    """

    def __init__(
        self,
        index: int,
        tokenizer: TextTokenizer,
        prompt: Sequence[int],
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        wants_logprobs: bool = False,
        offset: int = 0,
    ) -> None:
        self.index = index
        self.num_tokens = 0
        self.keep_tokens: int | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._wants_logprobs = wants_logprobs
        self._decoded = offset  # characters of the tokens so far
        self._emitted = offset  # characters that the client has seen
        self._starts: list[int] = []
        self._held: deque[TokenText] = deque()

    def push(self, output: Output) -> Delta:
        """Return the delta of an output's tokens, which is empty after a stop string."""
        delta = Delta(self.index)
        if self.keep_tokens is not None:
            return delta
        logprobs: Sequence[TokenLogprobs | None] = output.logprobs or [None] * len(output.token_ids)
        pieces = []
        for token_id, logprob in zip(output.token_ids, logprobs, strict=False):
            self._starts.append(self._decoded)
            if self._wants_logprobs:
                self._held.append(TokenText(token_id, self._decoded, logprob))
            pieces.append(self._show(self._detokenizer.push(token_id), len(self._starts) > self._min_tokens))
            if self.keep_tokens is not None:
                break
        self.num_tokens = len(self._starts) if self.keep_tokens is None else self.keep_tokens
        delta.text = "".join(pieces)
        delta.tokens = self._release()
        return delta

    def finish(self, delta: Delta, finish_reason: str) -> None:
        """Add the held-back text and tokens to `delta`, and why the choice ended."""
        if self.keep_tokens is None:
            delta.text += self._show(self._detokenizer.flush(), len(self._starts) > self._min_tokens)
        if self.keep_tokens is None:
            delta.text += self._matcher.flush()
            delta.tokens += self._held
        else:
            delta.tokens += self._release()
        delta.finish_reason = finish_reason if self.keep_tokens is None else "stop"
        delta.matched_stop = self._matcher.matched
        self._held.clear()

    def _show(self, text: str, may_stop: bool) -> str:
        """Return the part of newly decoded text that is shown now, and look for a stop string."""
        self._decoded += len(text)
        shown = self._matcher.push(text) if may_stop else text
        self._emitted += len(shown)
        if self._matcher.matched is not None:
            self.keep_tokens = max(1, bisect_left(self._starts, self._emitted))
        return shown

    def _release(self) -> list[TokenText]:
        released = []
        while self._held and self._held[0].offset < self._emitted:
            released.append(self._held.popleft())
        return released


class _Echo:
    """The prompt at the head of a completion, with its tokens' log probabilities if they were asked for."""

    def __init__(self, request: GenerateRequest, prompt: list[int], tokenizer: TextTokenizer, choice: int) -> None:
        spoken = request.prompts[choice // request.n]
        self._prompt = prompt
        self._logprobs: list[TokenLogprobs] = []
        self._wants_logprobs = request.sampling.prompt_logprobs is not None
        self._offsets, text = _offsets(tokenizer, prompt)
        self._text = spoken if isinstance(spoken, str) else text
        self._choice = choice
        self.num_chars = len(self._text)

    def push(self, output: Output) -> None:
        """Collect prompt log probabilities, which come chunk by chunk."""
        self._logprobs += output.prompt_logprobs or ()

    @property
    def delta(self) -> Delta:
        """The prompt as a delta. Its first token follows no other one and has no probability."""
        if not self._wants_logprobs:
            return Delta(self._choice, self._text)
        rest = self._logprobs[-(len(self._prompt) - 1) :] if len(self._prompt) > 1 else []
        missing = [None] * (len(self._prompt) - len(rest))
        tokens = [
            TokenText(token_id, offset, logprobs)
            for token_id, offset, logprobs in zip(self._prompt, self._offsets, (*missing, *rest), strict=True)
        ]
        return Delta(self._choice, self._text, tokens)


def _offsets(tokenizer: TextTokenizer, prompt: list[int]) -> tuple[list[int], str]:
    """Return where each prompt token's text begins, and the whole text."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    offsets, pieces, length = [], [], 0
    for token_id in prompt:
        offsets.append(length)
        piece = detokenizer.push(token_id)
        pieces.append(piece)
        length += len(piece)
    pieces.append(detokenizer.flush())
    return offsets, "".join(pieces)
