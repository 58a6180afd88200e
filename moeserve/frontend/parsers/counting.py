"""Counts and bounds the thoughts of a model's answers, by tables over its tokenizer for `moeserve.thoughts`.

They agree with the parser (`reasoning.py`) on where a thought begins and ends, however tokens cut the markers.
"""

from __future__ import annotations

from moeserve.config import ServeConfig
from moeserve.frontend.dialects.internal import GenerateRequest
from moeserve.frontend.parsers.families import calls_of
from moeserve.frontend.parsers.message_form import Start
from moeserve.frontend.parsers.reasoning import Reasoning
from moeserve.frontend.parsers.shape import OutputShape
from moeserve.frontend.text import TextTokenizer
from moeserve.settings.generation import parse_effort_budgets
from moeserve.thoughts import Thought, ThoughtBudget, ThoughtForm, is_blank, make_markers


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
        # By whether calls end thoughts, too.
        self._forms: dict[bool, ThoughtForm] = {}
        reasoning = shape.thoughts
        if reasoning is None:
            return
        self._forms = _forms(tokenizer, shape, reasoning)
        end = reasoning.end if shape.messages is None else shape.messages.ends[0]
        self._closing_again = tuple(tokenizer.encode(end, add_special_tokens=False))
        message = config.reasoning_budget_message or ""
        self._closing = (*tokenizer.encode(message, add_special_tokens=False), *self._closing_again)

    def follow(self, request: GenerateRequest, start: Start) -> Thought | None:
        """Return the counter of the thoughts of one choice, None where there are none. start: where the prompt ends.

        A parser tells it of calls that end thoughts (`Thought.cut`).
        """
        form = self._form(request, start, calls_end=False)
        return None if form is None else Thought(form, start == "reasoning")

    def budget(self, request: GenerateRequest, start: Start) -> ThoughtBudget | None:
        """Return the bound for the thoughts of each choice, None where there is none.

        A token that begins calls ends the bounded thought, whether or not a call follows: an end that is forced inside
        a call would break it.
        """
        form = self._form(request, start, calls_end=self._shape.looks_for_calls(request))
        max_tokens = self._max_tokens(request)
        if form is None or max_tokens < 0:
            return None
        return ThoughtBudget(form, max_tokens, self._closing, self._closing_again, start == "reasoning")

    def _form(self, request: GenerateRequest, start: Start, *, calls_end: bool) -> ThoughtForm | None:
        if not self._shape.thinks(request) or (start == "text" and self._shape.messages is None):
            return None
        return self._forms[calls_end]

    def _max_tokens(self, request: GenerateRequest) -> int:
        """Return the request's own budget, or its effort's, or the service's; -1 for no bound."""
        asked = request.thought
        if asked.max_tokens is not None:
            return asked.max_tokens
        return self._of_efforts.get(asked.effort or "", self._default)


def _forms(tokenizer: TextTokenizer, shape: OutputShape, reasoning: Reasoning) -> dict[bool, ThoughtForm]:
    tokens = [(token_id, data) for token_id, data in tokenizer.all_token_bytes() if data]
    if shape.messages is not None:
        (opening,) = make_markers([shape.messages.thought], tokens)
        ends, header = make_markers(shape.messages.ends, tokens), make_markers(shape.messages.thought_heads, tokens)
        form = ThoughtForm(opening, ends, header, only_first=False)
        return {False: form, True: form}
    silent = tokenizer.special_token_ids - tokenizer.special_in(shape.markers)[0]
    blanks = tuple(token_id for token_id, data in tokens if token_id in silent or is_blank(data))
    # If other text comes before the marker, the answer begins without a thought.
    (opening,) = make_markers([reasoning.begin], tokens, only_blanks_before=True)
    ends = make_markers([reasoning.end], tokens)
    calls = calls_of(shape.calls, shape.suffix)
    opens = () if calls is None else calls.opens
    if calls is not None and not calls.ends_reasoning:
        opens = tuple(text for text in opens if text in tokenizer.added_ids)
    return {
        calls_end: ThoughtForm(opening, more_ends, blanks=blanks)
        for calls_end, more_ends in ((False, ends), (True, (*ends, *make_markers(opens, tokens))))
    }
