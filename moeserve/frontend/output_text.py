"""One choice's way from tokens to text: detokenising, stop strings, log probabilities held back with their text."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from moeserve.frontend.dialects.internal import Delta, TokenText
from moeserve.frontend.text import IncrementalDetokenizer, StopMatcher, TextTokenizer
from moeserve.messages import Output
from moeserve.plan import TokenLogprobs


class OutputText:
    """Turns the engine's outputs of one choice into deltas.

    `keep_tokens` is set once a stop string was found: the number of output tokens that count, which are those whose
    text begins before the stop string (at least one).
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
        self._decoded = offset  # characters that the tokens so far stand for
        self._emitted = offset  # of which the client has seen these
        self._starts: list[int] = []
        self._held: deque[TokenText] = deque()

    def push(self, output: Output) -> Delta:
        """What the output's tokens add; nothing after a stop string."""
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
        """Adds to `delta` what was held back and why the choice ended."""
        if self.keep_tokens is None:
            delta.text += self._show(self._detokenizer.flush(), len(self._starts) > self._min_tokens)
        if self.keep_tokens is None:
            delta.text += self._matcher.flush()
            delta.tokens += self._held
        else:
            delta.tokens += self._release()
        delta.finish_reason = finish_reason if self.keep_tokens is None else "stop"
        self._held.clear()

    def _show(self, text: str, may_stop: bool) -> str:
        """The part of newly decoded text that is shown now; notices a stop string."""
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
