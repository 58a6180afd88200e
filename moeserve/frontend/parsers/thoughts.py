"""The thoughts of one model: their markers as tables over its tokenizer, and the budget that a request has for them.

`moeserve.thoughts` follows an answer by these tables. They agree with the parser (`parser.py`) on where a thought
begins and ends, however tokens cut the markers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moeserve.config import ServeConfig
from moeserve.frontend.dialects.internal import GenerateRequest
from moeserve.frontend.parsers.families import CALLS, REASONING, OutputShape
from moeserve.frontend.parsers.parser import HARMONY_BODY_ENDS, HARMONY_THOUGHT, Reasoning, Start
from moeserve.frontend.text import TextTokenizer
from moeserve.settings.generation import parse_effort_budgets
from moeserve.thoughts import Marker, Thought, ThoughtBudget, ThoughtForm

# Token ids with the bytes of the tokens, none empty.
Vocabulary = Sequence[tuple[int, bytes]]

_HARMONY_END = "<|end|>"
# Behind the opening: the marker before a thought, the beginning of a call's recipient, and the ends of a header.
_HARMONY_HEADER = ("<|message|>", "to=", *HARMONY_BODY_ENDS)


class Thoughts:
    """Counts and bounds the thoughts of a model. Made once per HTTP process: the tables take a pass over the tokenizer
    for each marker. A model that does not reason has none."""

    def __init__(self, tokenizer: TextTokenizer, shape: OutputShape, config: ServeConfig) -> None:
        """shape: how the model writes reasoning and calls."""
        self._shape = shape
        self._default = config.reasoning_budget
        self._of_efforts = parse_effort_budgets(config.reasoning_effort_budgets)
        self._closing: tuple[int, ...] = ()
        self._closing_again: tuple[int, ...] = ()
        # By whether the answer is searched for calls, which may end a thought.
        self._forms: dict[bool, ThoughtForm] = {}
        reasoning = REASONING.get(shape.reasoning)
        if reasoning is None:
            return
        self._forms = _forms(tokenizer, shape, reasoning)
        end = _HARMONY_END if shape.is_harmony else reasoning.end
        self._closing_again = tuple(tokenizer.encode(end, add_special_tokens=False))
        message = config.reasoning_budget_message or ""
        self._closing = (*tokenizer.encode(message, add_special_tokens=False), *self._closing_again)

    def follow(self, request: GenerateRequest, start: Start) -> Thought | None:
        """Return what counts the thoughts of one choice, None where there are none. start: where the prompt leaves
        off."""
        form = self._form(request, start)
        return None if form is None else Thought(form, start == "reasoning")

    def budget(self, request: GenerateRequest, start: Start) -> ThoughtBudget | None:
        """Return the bound for the thoughts of each choice, None where there is none."""
        form, max_tokens = self._form(request, start), self._max_tokens(request)
        if form is None or max_tokens < 0:
            return None
        return ThoughtBudget(form, max_tokens, self._closing, self._closing_again, start == "reasoning")

    def _form(self, request: GenerateRequest, start: Start) -> ThoughtForm | None:
        if not self._shape.thinks(request) or (start == "text" and not self._shape.is_harmony):
            return None
        return self._forms[self._shape.looks_for_calls(request)]

    def _max_tokens(self, request: GenerateRequest) -> int:
        """Return the request's own budget, or its effort's, or the service's; -1 for no bound."""
        asked = request.thought
        if asked.max_tokens is not None:
            return asked.max_tokens
        return self._of_efforts.get(asked.effort or "", self._default)


def _forms(tokenizer: TextTokenizer, shape: OutputShape, reasoning: Reasoning) -> dict[bool, ThoughtForm]:
    tokens = [(token_id, data) for token_id, data in tokenizer.all_token_bytes() if data]
    if shape.is_harmony:
        header = make_markers(_HARMONY_HEADER, tokens)
        (opening,) = make_markers([HARMONY_THOUGHT], tokens)
        form = ThoughtForm(opening, make_markers(HARMONY_BODY_ENDS, tokens), header, only_first=False)
        return {False: form, True: form}
    silent = tokenizer.special_token_ids - tokenizer.special_ids(shape.markers)
    blanks = tuple(token_id for token_id, data in tokens if token_id in silent or _is_blank(data))
    # Other text before the marker says that the answer begins without a thought.
    (opening,) = make_markers([reasoning.begin], tokens, only_blanks_before=True)
    ends = make_markers([reasoning.end], tokens)
    calls = CALLS.get(shape.calls)
    call_ends = make_markers(calls.opens, tokens) if calls is not None and calls.ends_reasoning else ()
    return {
        looks_for_calls: ThoughtForm(opening, more_ends, blanks=blanks)
        for looks_for_calls, more_ends in ((False, ends), (True, (*ends, *call_ends)))
    }


def make_markers(texts: Iterable[str], tokens: Vocabulary, *, only_blanks_before: bool = False) -> tuple[Marker, ...]:
    """Return the tables of markers. only_blanks_before: a token's text before a marker is white space."""
    return tuple(_marker(text.encode(), tokens, only_blanks_before) for text in texts)


def _marker(marker: bytes, tokens: Vocabulary, only_blanks_before: bool) -> Marker:
    length, first = len(marker), marker[0]
    made = Marker(length)
    rests: dict[int, list[tuple[int, bytes]]] = {}
    for num_bytes in range(1, length):
        rests.setdefault(marker[num_bytes], []).append((num_bytes, marker[num_bytes:]))
    for token_id, data in tokens:
        for num_bytes, rest in rests.get(data[0], ()):
            if rest.startswith(data) or data.startswith(rest):
                made.steps.setdefault(num_bytes, {})[token_id] = min(length, num_bytes + len(data))
        if first not in data:
            continue
        place = data.find(marker)
        if place < 0:
            place = data.rfind(first)
            if not marker.startswith(data[place:]):
                continue
        if place == 0:
            made.starts[token_id] = min(length, len(data))
        elif not only_blanks_before or _is_blank(data[:place]):
            made.tails[token_id] = min(length, len(data) - place)
    return made


def _is_blank(data: bytes) -> bool:
    """Return whether bytes show no text but white space."""
    return not data or data.isspace() or (data[0] >= 0x80 and data.decode("utf-8", "replace").isspace())
