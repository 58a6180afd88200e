"""From the engine's outputs to text, deltas, usage and cache reports."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from starlette.types import Scope

from moeserve.frontend.dialects.internal import ChatPrompt, Delta, GenerateRequest, TokenText, Usage, by_tier
from moeserve.frontend.errors import OVERLOADED, ApiError, internal_error, invalid
from moeserve.frontend.held import Hold
from moeserve.frontend.parsers.counting import Thoughts
from moeserve.frontend.parsers.feed import CallIds
from moeserve.frontend.parsers.parser import OutputParser
from moeserve.frontend.parsers.shape import PLAIN, OutputShape
from moeserve.frontend.text import NO_IDS, IncrementalDetokenizer, PromptText, StopMatcher, TextTokenizer, prompt_tail
from moeserve.plan import CANCELLED, GRAMMAR_FAILED, FinishReason, TokenLogprobs
from moeserve.thoughts import Thought
from moeserve.wire import Output
from radix_cache import Miss, MissReason

_ECHOED_AT_ONCE = 256  # tokens of a prompt with their log probabilities

_HEADER = b"x-moeserve-cache-report"
_OFF = frozenset({b"", b"0", b"false"})
_SHOWN_TOKENS = 12

_EXPLANATIONS = {
    MissReason.BYPASSED: "The cache was not asked: log probabilities of the prompt are computed, or caching is off.",
    MissReason.LAST_TOKEN: "All is cached but the end: the last token, or the block that it ends, is always computed.",
    MissReason.BLOCK_BOUNDARY: "All whole blocks are cached; the rest is less than a block.",
    MissReason.NO_STATE: (
        "Keys and values are cached up to token {known}, but no snapshot of the model's recurrent state is kept there."
    ),
    MissReason.NO_WINDOW: (
        "The prefix was cached up to token {known}, but what layers with a sliding window would see of it there was "
        "evicted to make room for others."
    ),
    MissReason.EVICTED: "The prefix was cached up to token {known} and was evicted to make room for others.",
    MissReason.OTHER_SALT: "Another cache_salt of this key has the prefix cached, up to token {known}.",
    MissReason.VOLATILE_HEAD: (
        "The prompt differs at token {position}, in {volatile} tokens, and equals {witnesses} earlier prompts again "
        "behind them: something at its head, such as a nonce or a time, changes with every request. Move it to the end."
    ),
    MissReason.DIVERGED: "At token {position} the prompt differs from the nearest prefix that is cached.",
    MissReason.NEVER_SEEN: "No prompt that went on like this was cached before.",
    MissReason.NOT_KNOWN: (
        "No such prefix is cached; it was never seen, or evicted too long ago for the record, which begins with the "
        "first report that this key asks for."
    ),
}


_TOKEN_BYTES, _ALTERNATIVE_BYTES = 256, 128  # of memory for log probabilities: of a token, of each alternative


class Answer:
    """The state of an answer: turns outputs into deltas and counts tokens.

    `finishes` collects (choice, tokens to keep) of choices that met a stop string, `turns` choices that ended
    with calls, for the caller to tell the engine.
    """

    def __init__(
        self,
        request: GenerateRequest,
        prompts: Sequence[array[int]],
        tokenizer: TextTokenizer,
        shape: OutputShape = PLAIN,
        prompt_texts: Sequence[PromptText] = (),
        thoughts: Thoughts | None = None,
        answer_id: str = "",
        hold: Hold | None = None,
    ) -> None:
        """shape: how the model writes reasoning and calls. prompt_texts: of all prompts if the request shows them.
        thoughts: of the model, to be counted. The ids of calls follow from `answer_id`. hold: counts what is kept."""
        self.finishes: list[tuple[int, int]] = []
        self.turns: list[int] = []
        self.num_open = request.num_choices
        self._n, self._best, self._echoes = request.n, request.best, request.echo
        self._prompts = prompts
        self._tokenizer = tokenizer
        self._thoughts = thoughts
        self._answer_id = answer_id
        self._wants_output = request.max_tokens != 0
        self._usage = Usage(prompt_tokens=sum(map(len, prompts)))
        # First samples of prompts that have not yet reported the number of cached tokens.
        self._untold = set(range(0, request.num_choices, request.n))
        self._returns_ids = request.returns_token_ids
        self._without_ids = set(range(request.num_choices))  # choices whose prompt's tokens were not returned yet
        self._reports: dict[int, dict[str, Any]] = {}
        self._shown_prompts = [
            _ShownPrompt(request, prompts[choice // request.n], prompt_texts[choice // request.n], choice)
            if request.shows_prompts
            else None
            for choice in range(request.num_choices)
        ]
        self._texts = [self._output_text(request, choice, tokenizer, shape) for choice in range(request.num_choices)]
        self._kept: dict[int, Delta] = {}
        self._hold = hold

    def _output_text(
        self, request: GenerateRequest, choice: int, tokenizer: TextTokenizer, shape: OutputShape
    ) -> OutputText:
        prompt = self._prompts[choice // request.n]
        shown_prompt = self._shown_prompts[choice]
        parser, thought, markers = None, None, frozenset[str]()
        is_parsed = shape.applies(request)
        if is_parsed or shape.thinks(request):
            start = shape.start_of(request, prompt_tail(tokenizer, prompt), choice // request.n)
            thought = None if self._thoughts is None else self._thoughts.follow(request, start)
        if is_parsed:
            parser = shape.parser(request, start, tokenizer, CallIds(self._answer_id, choice))
            markers = shape.markers
        return OutputText(
            choice,
            tokenizer,
            prompt,
            stops=request.stop,
            include_stop=request.include_stop,
            min_tokens=request.sampling.min_tokens,
            wants_logprobs=request.sampling.logprobs is not None,
            offset=shown_prompt.num_chars if shown_prompt is not None else 0,
            shown=tokenizer.special_in(markers)[0] if request.skip_special_tokens else tokenizer.special_token_ids,
            parser=parser,
            thought=thought,
        )

    @property
    def usage(self) -> Usage:
        """The counts so far, which later outputs change. A prompt counts once, however many samples it has."""
        return self._usage

    def resume(self) -> None:
        """Record that another engine continued the request."""
        self._usage.resumed = True

    def take(self, choice: int, output: Output) -> list[Delta]:
        """Return the deltas of an output of a choice. Raise ApiError if it failed."""
        if output.has_failed:
            raise _failure(output)
        if choice in self._untold:
            self._record_cached(choice, output)
        if output.miss is not None and choice % self._n == 0:
            self._add_report(choice // self._n, output, output.miss)
        deltas = []
        if shown := self._shown_prompts[choice]:
            shown.push(output)
            if shown.echo is not None and (output.token_ids or output.finish_reason is not None):
                deltas += shown.take_echo()
        if not self._wants_output:
            output = Output(output.request_id, finish_reason=output.finish_reason and FinishReason.LENGTH)
        text = self._texts[choice]
        stopped_before = text.keep_tokens is not None
        num_tokens, num_reasoning_tokens = text.num_tokens, text.num_reasoning_tokens
        delta = text.push(output)
        if self._returns_ids:
            delta.token_ids = list(output.token_ids[: max(0, text.num_tokens - num_tokens)])
            if choice in self._without_ids:
                self._without_ids.remove(choice)
                delta.prompt_token_ids = self._prompts[choice // self._n].tolist()
        if output.finish_reason is not None:
            self.num_open -= 1
            self._usage.ticket = output.ticket or self._usage.ticket
            text.finish(delta, output.finish_reason.value)
            if delta.finish_reason == "tool_calls":
                self.turns.append(choice)
            if shown:
                delta.prompt = shown.asked_tokens()
        elif text.keep_tokens is not None and not stopped_before:
            self.finishes.append((choice, text.keep_tokens))
        self._usage.completion_tokens += text.num_tokens - num_tokens
        self._usage.reasoning_tokens += text.num_reasoning_tokens - num_reasoning_tokens
        self._usage.accepted_prediction_tokens += output.judged[0]
        self._usage.rejected_prediction_tokens += output.judged[1]
        if delta.text or delta.tokens or delta.finish_reason or delta.reasoning or delta.calls or delta.token_ids:
            deltas.append(delta)
        return deltas

    def _add_report(self, prompt: int, output: Output, miss: Miss) -> None:
        """Add the cache report of a prompt: usage has one, or for several prompts a list in their order."""
        found = output.num_cached_tokens or 0, output.tier_tokens
        self._reports[prompt] = describe_miss(miss, self._prompts[prompt], *found, self._tokenizer)
        reports = [self._reports[prompt] for prompt in sorted(self._reports)]
        self._usage.cache_report = reports[0] if len(self._prompts) == 1 else reports

    def keep(self, deltas: Iterable[Delta]) -> None:
        """Add deltas to the whole answer. Raise as `hold`."""
        for delta in deltas:
            self.hold(delta)
            self._kept.setdefault(delta.index, Delta(delta.index)).append(delta)

    def hold(self, delta: Delta) -> None:
        """Count the log probabilities of a delta, which stay in memory. Raise ApiError (503) where the key holds too
        much."""
        if self._hold is not None and (delta.tokens or delta.prompt):
            tops = [token.logprobs.top for token in (*delta.tokens, *delta.prompt) if token.logprobs is not None]
            self._hold.grow(_TOKEN_BYTES * len(tops) + _ALTERNATIVE_BYTES * sum(map(len, tops)))

    def choices(self) -> list[Delta]:
        """Return the whole choices that the client gets: of each prompt all, or the best by mean log probability.

        Call it once, when every choice has ended. Choices are numbered anew if some are left out.
        """
        choices = [self._kept[index] for index in sorted(self._kept)]
        if self._best is None:
            return choices
        given: list[Delta] = []
        for number, prompt in enumerate(self._prompts):
            num_echoed = len(prompt) if self._echoes else 0
            samples = choices[number * self._n : (number + 1) * self._n]
            samples.sort(key=lambda choice: _mean_logprob(choice.tokens[num_echoed:]), reverse=True)
            given += samples[: self._best]
        for index, choice in enumerate(given):
            choice.index = index
        return given

    def _record_cached(self, choice: int, output: Output) -> None:
        """Record the cached prompt tokens that the first sample reports with its first token.

        Later numbers may count tokens that a preempted request found again, its own output among them.
        """
        if output.num_cached_tokens is not None and (output.token_ids or output.finish_reason is not None):
            self._usage.cached_tokens += output.num_cached_tokens
            if output.tier_tokens is not None:
                host, disk = self._usage.tier_tokens or (0, 0)
                self._usage.tier_tokens = host + output.tier_tokens[0], disk + output.tier_tokens[1]
            self._untold.discard(choice)


def _mean_logprob(tokens: list[TokenText]) -> float:
    """Return the mean over sampled tokens; without any, the lowest value."""
    found = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(found) / len(found) if found else -math.inf


def _failure(output: Output) -> ApiError:
    if output.finish_reason is FinishReason.LATE:
        message = "The server was too busy to begin this answer in time"
        return ApiError(503, message, type="server_unavailable", code=OVERLOADED)
    if output.error == CANCELLED:
        message = "An operator cancelled this request"
        return ApiError(409, message, type="conflict", code="cancelled_by_operator", may_retry=False)
    if output.finish_reason is FinishReason.ABORT:
        return internal_error("The server ended this request before it was complete")
    if output.error is not None and output.error.startswith(GRAMMAR_FAILED):
        return invalid(output.error[:500], code="grammar_failed")
    return internal_error()


class OutputText:
    """Turns the engine's outputs of one choice into deltas: detokenises, parses, finds stop strings, holds back log
    probabilities with their text.

    Stop strings are looked for in the text that the client gets, neither in reasoning nor in calls. `keep_tokens` is
    set once one is found: the number of output tokens whose text begins before it, at least one. Only these count.
    """

    def __init__(
        self,
        index: int,
        tokenizer: TextTokenizer,
        prompt: Sequence[int],
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        min_tokens: int = 0,
        wants_logprobs: bool = False,
        offset: int = 0,
        shown: frozenset[int] = NO_IDS,
        parser: OutputParser | None = None,
        thought: Thought | None = None,
    ) -> None:
        """shown: the special tokens whose text shows, or is for `parser`. offset: of the text, in characters. thought:
        counts the tokens of reasoning."""
        self.index = index
        self.num_tokens = 0
        self.keep_tokens: int | None = None
        self._detokenizer = IncrementalDetokenizer(tokenizer, prompt, shown)
        self._special_ids = tokenizer.special_token_ids
        self._matcher = StopMatcher(stops, includes=include_stop)
        self._parser = parser
        self._thought = thought
        self._min_tokens = min_tokens
        self._wants_logprobs = wants_logprobs
        self._begin = offset
        self._decoded = offset  # characters of the tokens so far
        self._emitted = offset  # characters that the client has seen, or would have seen without a parser
        self._starts: list[int] = []
        self._held: deque[TokenText] = deque()

    @property
    def num_reasoning_tokens(self) -> int:
        """The counted tokens inside thoughts so far."""
        num_tokens = 0 if self._thought is None else self._thought.num_tokens
        return num_tokens if self.keep_tokens is None else min(num_tokens, self.keep_tokens)

    def push(self, output: Output) -> Delta:
        """Return the delta of an output's tokens, which is empty after a stop string."""
        delta = Delta(self.index)
        if self.keep_tokens is not None:
            return delta
        logprobs: Sequence[TokenLogprobs | None] = output.logprobs or [None] * len(output.token_ids)
        pieces: list[str] = []
        for token_id, logprob in zip(output.token_ids, logprobs, strict=False):
            self._starts.append(self._decoded)
            if self._wants_logprobs:
                self._held.append(TokenText(token_id, self._decoded, logprob))
            if self._thought is not None:
                self._thought.push(token_id)
            text = self._detokenizer.push(token_id)
            may_stop = len(self._starts) > self._min_tokens
            if self._parser is None:
                pieces.append(self._show(text, may_stop))
            else:
                is_special = token_id in self._special_ids
                pieces.append(self._parse(self._parser, text, may_stop, delta, is_special=is_special))
            if self.keep_tokens is not None:
                break
        self.num_tokens = len(self._starts) if self.keep_tokens is None else self.keep_tokens
        delta.text = "".join(pieces)
        delta.tokens = self._release()
        return delta

    def finish(self, delta: Delta, finish_reason: str) -> None:
        """Add the held-back text and tokens to `delta`, and why the choice ended."""
        may_stop = len(self._starts) > self._min_tokens
        if self.keep_tokens is None:
            text = self._detokenizer.flush()
            if self._parser is None:
                delta.text += self._show(text, may_stop)
            else:
                delta.text += self._parse(self._parser, text, may_stop, delta, ended=True)
        if self.keep_tokens is None:
            delta.text += self._matcher.flush()
            delta.tokens += self._held
        else:
            delta.tokens += self._release()
        self._held.clear()
        delta.finish_reason = finish_reason if self.keep_tokens is None else "stop"
        if delta.finish_reason == "stop" and self._parser is not None and self._parser.num_calls:
            delta.finish_reason = "tool_calls"
        delta.matched_stop = self._matcher.matched
        if self.keep_tokens is not None:
            self.num_tokens = self.keep_tokens

    def _show(self, text: str, may_stop: bool) -> str:
        """Return the part of newly decoded text that is shown now, and look for a stop string."""
        self._decoded += len(text)
        return self._match(text, may_stop)

    def _parse(
        self,
        parser: OutputParser,
        text: str,
        may_stop: bool,
        delta: Delta,
        *,
        is_special: bool = False,
        ended: bool = False,
    ) -> str:
        """Return the text that is shown now; add the reasoning and the calls of newly decoded text to `delta`."""
        self._decoded += len(text)
        parsed = [parser.push(text, is_special=is_special)] if text else []
        if ended:
            parsed.append(parser.finish())
        pieces = []
        for part in parsed:
            delta.reasoning += part.reasoning
            pieces.append(self._match(part.text, may_stop))
            if self.keep_tokens is not None:
                break
            if self._thought is not None and part.called_at is not None:
                self._thought.cut(bisect_left(self._starts, self._begin + part.called_at))
            for call in part.calls:
                if delta.calls and not call.name:
                    delta.calls[-1].arguments += call.arguments
                else:
                    delta.calls.append(call)
        return "".join(pieces)

    def _match(self, text: str, may_stop: bool) -> str:
        """Return the part of new text for the client that is shown now, and look for a stop string."""
        matcher = self._matcher
        begin = self._decoded - matcher.num_held - len(text)  # where the shown text begins
        shown = matcher.push(text) if may_stop else text
        self._emitted = self._decoded - matcher.num_held
        if matcher.matched is not None:
            # Text that a parser holds back lies after the stop string, so this place may be a little late.
            self._emitted = begin + len(shown)
            self.keep_tokens = max(1, bisect_left(self._starts, self._emitted))
        return shown

    def _release(self) -> list[TokenText]:
        released = []
        while self._held and self._held[0].offset < self._emitted:
            released.append(self._held.popleft())
        return released


class _ShownPrompt:
    """The prompt of one choice as the client sees it: at the head of the answer, as log probabilities, or both.

    `echo` is the text at the head, for a chat the continued text; None if it is not asked for or was taken.
    """

    def __init__(self, request: GenerateRequest, prompt: array[int], decoded: PromptText, choice: int) -> None:
        spoken = request.prompts[choice // request.n]
        is_chat = isinstance(spoken, ChatPrompt)
        self._prompt = prompt
        self._choice = choice
        self._logprobs: list[TokenLogprobs] = []
        self._num_echoed = request.sampling.logprobs if request.echo and not is_chat else None
        self._num_asked = request.prompt_logprobs
        self._offsets = decoded.offsets
        text = spoken.continued or "" if isinstance(spoken, ChatPrompt) else decoded.text
        self.echo: str | None = text if request.echo else None
        self.num_chars = len(text) if request.echo and not is_chat else 0

    def push(self, output: Output) -> None:
        """Collect prompt log probabilities, which come chunk by chunk."""
        self._logprobs += output.prompt_logprobs or ()

    def take_echo(self) -> list[Delta]:
        """Return the prompt as deltas of not too many tokens, once."""
        text, tokens = self.echo or "", self._tokens(self._num_echoed)
        self.echo = None
        starts = range(0, len(tokens), _ECHOED_AT_ONCE)
        places = [0, *(tokens[start].offset for start in starts[1:]), len(text)]
        return [
            Delta(self._choice, text[begin:end], tokens[start : start + _ECHOED_AT_ONCE])
            for start, begin, end in zip(starts or (0,), places, places[1:], strict=False)
        ]

    def asked_tokens(self) -> list[TokenText]:
        """Return the tokens of the prompt if the client asked for them in a field of their own."""
        return self._tokens(self._num_asked)

    def _tokens(self, num_top: int | None) -> list[TokenText]:
        """Return the prompt's tokens with `num_top` alternatives each, none for None.

        The first token follows no other one and has no probability.
        """
        if num_top is None:
            return []
        rest = self._logprobs[-(len(self._prompt) - 1) :] if len(self._prompt) > 1 else []
        missing = [None] * (len(self._prompt) - len(rest))
        return [
            TokenText(
                token_id,
                offset,
                found
                if found is None or len(found.top) <= num_top
                else TokenLogprobs(found.logprob, found.top[:num_top]),
            )
            for token_id, offset, found in zip(self._prompt, self._offsets, (*missing, *rest), strict=True)
        ]


def asks_for_report(scope: Scope) -> bool:
    """Return whether the header `x-moeserve-cache-report` asks for a report."""
    return any(name == _HEADER and value.strip().lower() not in _OFF for name, value in scope["headers"])


def describe_miss(
    miss: Miss,
    prompt: Sequence[int],
    num_cached: int,
    tier_tokens: tuple[int, int] | None,
    tokenizer: TextTokenizer,
) -> dict[str, Any]:
    """Return the report of a prompt: `num_cached` of its tokens were cached, `tier_tokens` of them below memory.

    tier_tokens: see `Output`; without them the report names no tiers.

    `yours` is the prompt's text from `at_token` on, `nearest` the text of the caller's nearest prefix from there on,
    `before` the text that both share before it.
    """

    def text(token_ids: Sequence[int]) -> str:
        return tokenizer.decode(token_ids, skip_special_tokens=False)

    position = miss.position
    report: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "matched_tokens": num_cached,
        "reason": miss.reason.value,
        "at_token": position,
        "explanation": _EXPLANATIONS[miss.reason].format(
            known=miss.num_known_tokens,
            position=position,
            volatile=miss.num_volatile_tokens,
            witnesses=miss.num_witnesses,
        ),
    }
    if tier_tokens is not None:
        report["matched_tokens_details"] = by_tier(num_cached, tier_tokens)
    if position < len(prompt) and miss.reason is not MissReason.BYPASSED:
        report["before"] = text(prompt[max(0, position - _SHOWN_TOKENS) : position])
        report["yours"] = text(prompt[position : position + _SHOWN_TOKENS])
    if miss.nearest:
        report["nearest"] = text(miss.nearest[position - miss.nearest_start :])
    if miss.num_known_tokens:
        report["known_tokens"] = miss.num_known_tokens
    if miss.reason is MissReason.VOLATILE_HEAD:
        differing = prompt[position : position + miss.num_volatile_tokens]
        report["volatile_head"] = {
            "at_token": position,
            "tokens": miss.num_volatile_tokens,
            "text": text(differing),
            "prompts": miss.num_witnesses,
        }
    return report
