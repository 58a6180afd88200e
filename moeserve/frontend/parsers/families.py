"""The families of models by how they write calls and reasoning, the choice of one for a checkpoint, and its thoughts.

`moeserve.thoughts` follows the thoughts of an answer by tables over the tokenizer, which `Thoughts` makes. They agree
with the parser (`parser.py`) on where a thought begins and ends, however tokens cut the markers.
"""

# ruff: noqa: RUF001 - DeepSeek's markers have fullwidth bars

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moeserve.config import ServeConfig
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest
from moeserve.frontend.http import invalid
from moeserve.frontend.parsers.calls import CallShape, GlmCalls, JsonCalls, MarkedCalls, MistralCalls, TaggedCalls
from moeserve.frontend.parsers.grammars import call_grammar
from moeserve.frontend.parsers.parser import (
    HARMONY_BODY_ENDS,
    HARMONY_MARKERS,
    HARMONY_THOUGHT,
    OutputParser,
    Reasoning,
    Start,
    ends_in_thought,
)
from moeserve.frontend.text import TextTokenizer
from moeserve.model.files import read_json
from moeserve.settings.generation import parse_effort_budgets
from moeserve.thoughts import Marker, Thought, ThoughtBudget, ThoughtForm

CALLS: Mapping[str, CallShape] = {
    "hermes": JsonCalls("<tool_call>", close="</tool_call>"),
    "qwen3-coder": TaggedCalls(
        region=("<tool_call>", "</tool_call>"),
        call=("<function=", "</function>"),
        parameter=("<parameter=", "</parameter>"),
    ),
    "mistral": MistralCalls(),
    "deepseek": MarkedCalls(
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        separator="<｜tool▁sep｜>",
        has_ids=False,
    ),
    "glm": GlmCalls(),
    "kimi": MarkedCalls(
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        call=("<|tool_call_begin|>", "<|tool_call_end|>"),
        separator="<|tool_call_argument_begin|>",
        has_ids=True,
    ),
    "minimax": TaggedCalls(
        region=("<minimax:tool_call>", "</minimax:tool_call>"),
        call=("<invoke name=", "</invoke>"),
        parameter=("<parameter name=", "</parameter>"),
    ),
    # Harmony reads calls itself; these are the markers of its calls, for callers that ask for markers.
    "harmony": JsonCalls(*HARMONY_MARKERS),
    "llama3": JsonCalls("<|python_tag|>", is_bare=True),
    "granite": JsonCalls("<|tool_call|>"),
}
REASONING: Mapping[str, Reasoning] = {
    "think": Reasoning("<think>", "</think>"),
    "mistral": Reasoning("[THINK]", "[/THINK]"),
    "harmony": Reasoning("<|channel|>", "<|end|>"),
}

# Texts in a chat template that name a family of models, the most special first.
_CALLS_IN_TEMPLATE = (
    ("<|channel|>", "harmony"),
    ("<minimax:tool_call>", "minimax"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3-coder"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("[TOOL_CALLS]", "mistral"),
    ("<tool_call>", "hermes"),
    ("<|tool_call|>", "granite"),
    ("<|python_tag|>", "llama3"),
)
_CALLS_OF_TYPE = {
    "gpt_oss": "harmony",
    "minimax_m2": "minimax",
    "glm4_moe": "glm",
    "deepseek_v3": "deepseek",
    "kimi_k2": "kimi",
    "granitemoe": "granite",
}
_REASONING_IN_TEMPLATE = (
    ("<|channel|>", "harmony"),
    ("[THINK]", "mistral"),
    ("<think>", "think"),
    ("</think>", "think"),
)

# Token ids with the bytes of the tokens, none empty.
Vocabulary = Sequence[tuple[int, bytes]]

_HARMONY_END = "<|end|>"
# Markers behind the opening: before a thought, before a call's recipient, and at the end of a header.
_HARMONY_HEADER = ("<|message|>", "to=", *HARMONY_BODY_ENDS)


@dataclass(frozen=True, slots=True)
class OutputShape:
    """The spelling of a model's answers: the names of its family for calls and for reasoning.

    `none` in place of a name: nothing is looked for.

    is_fenced: the JSON of its calls stands in fences, DeepSeek's older form.
    """

    calls: str = "none"
    reasoning: str = "none"
    is_fenced: bool = False

    @property
    def is_harmony(self) -> bool:
        return "harmony" in (self.calls, self.reasoning)

    @property
    def markers(self) -> frozenset[str]:
        """Every text that parsing needs to see."""
        shape, reasoning = CALLS.get(self.calls), REASONING.get(self.reasoning)
        found = (*shape.opens, *shape.others) if shape is not None else ()
        around = (reasoning.begin, reasoning.end) if reasoning is not None else ()
        return frozenset((*found, *around, *(HARMONY_MARKERS if self.is_harmony else ())))

    def applies(self, request: GenerateRequest) -> bool:
        """Return whether answers of the request are parsed."""
        if not isinstance(request.prompts[0], ChatPrompt):
            return False
        return self.is_harmony or self.reasoning != "none" or self.looks_for_calls(request)

    def thinks(self, request: GenerateRequest) -> bool:
        """Return whether answers of the request may hold thoughts, which are counted and may have a budget."""
        return self.reasoning != "none" and (isinstance(request.prompts[0], ChatPrompt) or bool(request.thought.starts))

    def start_of_text(self, text: str) -> Literal["reasoning", "answer"]:
        """Return where a prompt that is no chat leaves off. text: all of it, special tokens too."""
        reasoning = REASONING.get(self.reasoning)
        if reasoning is None:
            return "answer"
        if self.is_harmony:
            return "reasoning" if ends_in_thought(text) else "answer"
        return "reasoning" if text.rfind(reasoning.begin) > text.rfind(reasoning.end) else "answer"

    def parser(
        self, request: GenerateRequest, start: Start, special_texts: Collection[str], new_id: Callable[[], str]
    ) -> OutputParser:
        """Return a parser for one choice. special_texts: of the tokenizer's special tokens. new_id: makes ids of
        calls."""
        return OutputParser(
            reasoning=REASONING.get(self.reasoning),
            calls=CALLS.get(self.calls) if self.looks_for_calls(request) else None,
            is_harmony=self.is_harmony,
            start=start,
            schemas={tool.name: tool.parameters for tool in request.tools},
            hidden=self.markers.intersection(special_texts),
            parallel=request.parallel_tool_calls,
            new_id=new_id,
        )

    def start_of(self, request: GenerateRequest, prompt_tail: str, number: int = 0) -> Start:
        """Return where prompt `number` leaves off. prompt_tail: the text of its last tokens, special ones too."""
        prompt = request.prompts[0]
        if not isinstance(prompt, ChatPrompt):
            return request.thought.starts[number]
        reasoning = REASONING.get(self.reasoning)
        continued = prompt.continued
        if reasoning is None or self.is_harmony:
            return "text" if continued is not None else "answer"
        if continued is not None:
            is_open = continued.rfind(reasoning.begin) > continued.rfind(reasoning.end)
            return "reasoning" if is_open else "text"
        return "reasoning" if prompt_tail.rstrip().endswith(reasoning.begin) else "answer"

    def grammar(self, request: GenerateRequest, prompt_tail: str, ids: Mapping[str, int]) -> str | None:
        """Return the grammar that an answer's calls, or its reasoning before a format, need; None for no such need.

        Calls are held to the tools' schemas where the request forces calls, allows some tools only, has strict tools or
        asks for a format of text; the grammar then refers to the format's by the name `grammars.ANSWER`. ids: of the
        tokenizer's added tokens, by text. Raises ApiError for forced calls that nothing would read.
        """
        if not isinstance(request.prompts[0], ChatPrompt):
            return None
        choice, has_format = request.tool_choice, request.output_format is not None
        forced = choice.mode == "required"
        if forced and self.calls == "none":
            raise invalid("`tool_choice` asks for a call, but this server reads none from its model", "tool_choice")
        looks = self.looks_for_calls(request)
        tools = [tool for tool in request.tools if not choice.names or tool.name in choice.names] if looks else []
        holds_calls = bool(tools) and (forced or has_format or bool(choice.names) or any(t.strict for t in tools))
        if not holds_calls and not (has_format and (self.is_harmony or self.reasoning != "none")):
            return None
        return call_grammar(
            "deepseek-fenced" if self.is_fenced else "harmony" if self.is_harmony else self.calls,
            tools,
            forced=forced,
            # A tool that is forced by its name is called once, as clients expect that name it.
            parallel=request.parallel_tool_calls and not (forced and len(choice.names) == 1),
            ids=ids,
            start=self.start_of(request, prompt_tail),
            reasoning=REASONING.get(self.reasoning),
            has_format=has_format,
        )

    def looks_for_calls(self, request: GenerateRequest) -> bool:
        """Return whether answers of the request may hold calls."""
        return self.calls != "none" and bool(request.tools) and request.tool_choice.mode != "none"


PLAIN = OutputShape()


def model_type_of(folder: Path) -> str:
    """Return `model_type` of `config.json`, nothing where there is none."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    return str(config.get("model_type", ""))


def choose_shape(
    templates: Sequence[str], model_type: str, calls: str = "auto", reasoning: str = "auto"
) -> OutputShape:
    """Return the shape of a checkpoint's answers. templates: the sources of its chat templates.

    calls, reasoning: names of `CALLS` and `REASONING`, `none` or `auto`. Where nothing tells the family, calls are
    hermes': the prompt then explains that form to the model.
    """
    source = "\n".join(templates)
    if calls == "auto":
        by_template = (name for marker, name in _CALLS_IN_TEMPLATE if marker in source)
        calls = next(by_template, _CALLS_OF_TYPE.get(model_type, "hermes"))
    if reasoning == "auto":
        default = "harmony" if model_type == "gpt_oss" else "none"
        reasoning = next((name for marker, name in _REASONING_IN_TEMPLATE if marker in source), default)
    return OutputShape(calls, reasoning, calls == "deepseek" and "```json" in source)


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
        """Return the counter of the thoughts of one choice, None where there are none. start: where the prompt ends."""
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
