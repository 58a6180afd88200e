"""The formatter of each kind of answer, and the events that it writes of deltas."""

from __future__ import annotations

from collections.abc import Callable

from moeserve.frontend.dialects import chat, completions, messages_answer, prefixes, responses_answer
from moeserve.frontend.dialects.internal import Delta, Formatter, GenerateRequest, Usage
from moeserve.frontend.prepare.messages import Kind
from moeserve.frontend.text import TextTokenizer

# From the answer's id, UNIX time, the request, the tokenizer and the fingerprint of the model.
MakeFormatter = Callable[[str, int, GenerateRequest, TextTokenizer, str], Formatter]
FORMATTERS: dict[Kind, MakeFormatter] = {
    "chat": chat.ChatFormatter,
    "completions": completions.CompletionFormatter,
    "messages": messages_answer.MessageFormatter,
    "responses": responses_answer.ResponsesFormatter,
    "warm": prefixes.WarmFormatter,
}


class EventWriter:
    """Writes the events of deltas, each choice's first ones in their place."""

    def __init__(self, formatter: Formatter) -> None:
        self._formatter = formatter
        self._started: set[int] = set()

    def events(self, delta: Delta, usage: Usage) -> bytes:
        """Return the events of one delta. usage: so far."""
        if delta.index in self._started:
            return self._formatter.delta(delta, usage)
        self._started.add(delta.index)
        return self._formatter.start(delta.index, usage) + self._formatter.delta(delta, usage)
