"""The families of models by how they write calls and reasoning, the choice of one for a checkpoint, and its thoughts.

A family has a shape, by which its calls are read, and a grammar, which holds a model to them: for forced calls, strict
tools, and "a call or this format". Grammars are in llguidance's dialect of Lark: markers that are tokens of their own
are named by id, all others are text. JSON is written with a space after colons and commas, as templates render it, so
that the next turn's prompt continues the same tokens.

`moeserve.thoughts` follows the thoughts of an answer by tables over the tokenizer, which `Thoughts` makes. They agree
with the parser (`parser.py`) on where a thought begins and ends, however tokens cut the markers.
"""

# ruff: noqa: RUF001 - DeepSeek's markers have fullwidth bars

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from moeserve.config import ServeConfig
from moeserve.frontend.dialects.formats import ANSWER, closed, enforceable, json_expression
from moeserve.frontend.dialects.internal import ChatPrompt, GenerateRequest, Tool
from moeserve.frontend.errors import invalid
from moeserve.frontend.parsers.calls import CallShape, JsonCalls, MarkedCalls, MistralCalls
from moeserve.frontend.parsers.harmony import HARMONY_BODY_ENDS, HARMONY_MARKERS, HARMONY_THOUGHT, ends_in_thought
from moeserve.frontend.parsers.parser import OutputParser, Start
from moeserve.frontend.parsers.reasoning import Reasoning
from moeserve.frontend.parsers.tagged import Layout, TaggedCalls
from moeserve.frontend.text import TextTokenizer
from moeserve.model.files import read_json
from moeserve.settings.generation import parse_effort_budgets
from moeserve.thoughts import Thought, ThoughtBudget, ThoughtForm, is_blank, make_markers

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# More calls at once than this are the babble of a model that does not find its end.
_MOST_CALLS = 16
_ANY_TEXT = "/(?s:.*)/"
_NO_OBJECT = "/([^{](?s:.*))?/"
_LINE_BREAKS = r"/\n{0,2}/"
_LINE = '"\\n"'
_FENCE = '"\\n```json\\n"'
_DEEPSEEK = MarkedCalls(
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call=("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    separator="<｜tool▁sep｜>",
    has_ids=False,
)
_KIMI = MarkedCalls(
    section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    call=("<|tool_call_begin|>", "<|tool_call_end|>"),
    separator="<|tool_call_argument_begin|>",
    has_ids=True,
)


class Rules:
    """The rules of one grammar. `ids`: the ids of marker texts that are tokens."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._lines: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def choice(self, bodies: Iterable[str]) -> str:
        """Add a rule for one of several bodies and return its name."""
        return self.add(" | ".join([self.add(body) for body in bodies]))

    def is_token(self, marker: str) -> bool:
        return marker in self._ids

    def marker(self, text: str) -> str:
        return f"<[{self._ids[text]}]>" if text in self._ids else literal(text)

    def until(self, marker: str, without: Iterable[str] = ()) -> str:
        """Return the expression for any text that holds none of some texts, and the marker after it."""
        text = " & ".join([_ANY_TEXT, *(f"~/(?s:.*{_escaped(other)}.*)/" for other in without)])
        if marker not in self._ids:
            return self.add(text, f"[suffix={literal(marker)}]")
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {text}")
        return f"{name} {self.marker(marker)}"

    def source(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._lines]) + "\n"


def _escaped(text: str) -> str:
    """Return a pattern for a text inside slashes."""
    return re.escape(text).replace("/", "\\/")


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, Any], *, strict: bool) -> str:
    """Return the expression for JSON of a schema. Unless it is strict, words that llguidance lacks are passed over."""
    spaced = {**enforceable(schema, "tools"), "x-guidance": {**_SPACING, "lenient": not strict}}
    return json_expression(spaced, "tools")


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """Return the schema of a tool's arguments, an object. Objects that list their properties have no others."""
    schema = closed(enforceable(tool.parameters or {}, "tools"))
    return schema if schema.keys() & {"type", "$ref", "anyOf", "oneOf", "allOf"} else {"type": "object", **schema}


@dataclass(frozen=True, slots=True)
class Calls:
    """The expression for calls: behind the marker that opens them, empty where nothing does."""

    opening: str
    rest: str


CallRules = Callable[[Rules, Sequence[Tool], bool], Calls]


def call_grammar(
    family: str,
    tools: Sequence[Tool],
    *,
    forced: bool,
    parallel: bool,
    ids: Mapping[str, int],
    start: Start = "text",
    reasoning: Reasoning | None = None,
    has_format: bool = False,
) -> str:
    """Return the grammar of an answer: reasoning if the model reasons, then calls of `tools` or, unless `forced`, text.

    family: of `GRAMMARS`. start: where the prompt leaves off; `text` allows no reasoning. has_format: the text is what
    the grammar named `ANSWER` says, and any text otherwise. Without tools there are no calls.
    """
    rules = Rules(ids)
    text = f"@{ANSWER}" if has_format else ""
    if family == "harmony":
        return _harmony(rules, tools, forced, start, text)
    calls = GRAMMARS[family](rules, tools, parallel) if tools else None
    whole = "" if calls is None else f"{rules.marker(calls.opening)} {calls.rest}" if calls.opening else calls.rest
    if forced or not text:
        body = whole if forced or calls is None else _text_or(rules, calls)
    else:
        body = f"{whole} | {text}" if whole else text
    before = _reasoning(rules, start, reasoning, CALLS[family.removesuffix("-fenced")].opens if tools else ())
    return rules.source(f"{before} {rules.add(body)}")


def _reasoning(rules: Rules, start: Start, reasoning: Reasoning | None, opens: Iterable[str]) -> str:
    """opens: markers that may begin a call inside reasoning, where no grammar would hold it."""
    if reasoning is None or start == "text":
        return ""
    rest = f"{rules.until(reasoning.end, opens)} {rules.add(_LINE_BREAKS)}"
    return rest if start == "reasoning" else f"({rules.marker(reasoning.begin)} {rest})?"


def _text_or(rules: Rules, calls: Calls) -> str:
    """Return the expression for text with calls behind it or without."""
    if not calls.opening:
        # Only the first character distinguishes a call from text.
        return f"{calls.rest} | {rules.add(_NO_OBJECT)}"
    if rules.is_token(calls.opening):
        return f"{rules.add(_ANY_TEXT)} ({rules.marker(calls.opening)} {calls.rest})?"
    # As soon as the marker is complete, the lexeme that ends with it wins over the lexeme of any text.
    lead = rules.add(_ANY_TEXT, f"[suffix={literal(calls.opening)}]")
    return f"{lead} {calls.rest} | {rules.add(_ANY_TEXT)}"


def _several(one: str, between: str, parallel: bool) -> str:
    """Return one expression, or several with another one between them."""
    return f"{one} ({between} {one}){{0,{_MOST_CALLS - 1}}}" if parallel else one


def _object(tool: Tool, arguments: str = "arguments") -> str:
    begin = literal(f'{{"name": "{tool.name}", "{arguments}": ')
    return f'{begin} {_arguments(tool)} "}}"'


def _hermes(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    after = rules.choice(f'"\\n" {_object(tool)} "\\n" {rules.marker("</tool_call>")}' for tool in tools)
    return Calls("<tool_call>", _several(after, f'"\\n" {rules.marker("<tool_call>")}', parallel))


def _granite(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    return Calls("<|tool_call|>", _list(rules, tools, parallel))


def _list(rules: Rules, tools: Sequence[Tool], parallel: bool) -> str:
    return f'"[" {_several(rules.choice(map(_object, tools)), literal(", "), parallel)} "]"'


def _llama3(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    return Calls("", _several(rules.choice(_object(tool, "parameters") for tool in tools), literal("; "), parallel))


def _mistral(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    opening = "[TOOL_CALLS]"
    if not rules.is_token("[ARGS]"):
        return Calls(opening, f'" "? {_list(rules, tools, parallel)}')
    after = rules.choice(f"{literal(tool.name)} {rules.marker('[ARGS]')} {_arguments(tool)}" for tool in tools)
    return Calls(opening, _several(after, rules.marker(opening), parallel))


def _arguments(tool: Tool) -> str:
    return json_value(arguments_schema(tool), strict=tool.strict)


def _in_section(
    shape: MarkedCalls,
    head: Callable[[Tool, str], str],
    rules: Rules,
    tools: Sequence[Tool],
    parallel: bool,
    *,
    end: str = "",
    between: str = "",
) -> Calls:
    """head: what stands between a call's first marker and its JSON, by the tool and the expression of the separator.
    end: between the JSON and the call's last marker."""
    begin, separator, close = map(rules.marker, (shape.call_open, shape.separator, shape.call_end))
    call = rules.choice(f"{begin} {head(tool, separator)} {_arguments(tool)} {end} {close}" for tool in tools)
    return Calls(shape.section_open, f"{_several(call, between, parallel)} {rules.marker(shape.section_end)}")


def _qwen3_coder(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    form = _Tags(("<parameter=", ">\n"), "\n</parameter>", _LINE)
    after = rules.choice(
        f"{_LINE} {literal(f'<function={tool.name}>')} {_LINE} {_parameters(rules, tool, form)}"
        f" {literal('</function>')} {_LINE} {rules.marker('</tool_call>')}"
        for tool in tools
    )
    return Calls("<tool_call>", _several(after, f'"\\n" {rules.marker("<tool_call>")}', parallel))


def _minimax(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    form = _Tags(('<parameter name="', '">'), "</parameter>", _LINE)
    call = rules.choice(
        f"{literal('<invoke name=')} {literal(json.dumps(tool.name))} {literal('>')} {_LINE}"
        f" {_parameters(rules, tool, form)} {literal('</invoke>')} {_LINE}"
        for tool in tools
    )
    rest = f'"\\n" {_several(call, "", parallel)} {rules.marker("</minimax:tool_call>")}'
    return Calls("<minimax:tool_call>", rest)


def _glm(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    form = _Tags(("<arg_key>", "</arg_key>"), "</arg_value>", f"{_LINE}?", "<arg_value>")
    after = rules.choice(
        f"{literal(tool.name)} {_LINE}? {_parameters(rules, tool, form)} {rules.marker('</tool_call>')}"
        for tool in tools
    )
    return Calls("<tool_call>", _several(after, f'"\\n" {rules.marker("<tool_call>")}', parallel))


@dataclass(frozen=True, slots=True)
class _Tags:
    """The tags of one argument: around its name, after its value, the expression after that, and one before it."""

    name: tuple[str, str]
    value_end: str
    after: str
    value: str = ""


def _parameters(rules: Rules, tool: Tool, form: _Tags) -> str:
    """Return the expression for a tool's arguments in tags, in the order of its schema."""
    schema = arguments_schema(tool)
    properties = schema.get("properties")
    if not isinstance(properties, dict) or not properties:
        free = f"{rules.marker(form.name[0])} /[a-zA-Z0-9_.-]{{1,64}}/ {_value(rules, {}, schema, form, tool)}"
        return "" if schema.get("additionalProperties") is False else f"({rules.add(free)}){{0,64}}"
    required = schema.get("required")
    parts = []
    for name, inner in properties.items():
        part = f"{rules.marker(form.name[0])} {literal(name)} {_value(rules, inner, schema, form, tool)}"
        needed = isinstance(required, list) and name in required
        parts.append(f"{rules.add(part)}{'' if needed else '?'}")
    return " ".join(parts)


def _value(rules: Rules, inner: Any, schema: Mapping[str, Any], form: _Tags, tool: Tool) -> str:
    """Return the expression for what follows an argument's name: its value and the tags around it."""
    head = f"{rules.marker(form.name[1])}" + (f" {_LINE}? {rules.marker(form.value)}" if form.value else "")
    inner = inner if isinstance(inner, dict) else {}
    choices = inner.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(choice, str) for choice in choices):
        value = f"({' | '.join(map(literal, choices))}) {rules.marker(form.value_end)}"
    elif inner.get("type", "string") == "string" and not inner.keys() & {"$ref", "anyOf", "oneOf", "allOf", "const"}:
        value = rules.until(form.value_end)
    else:
        shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
        value = f"{json_value({**inner, **shared}, strict=tool.strict)} {rules.marker(form.value_end)}"
    return f"{head} {value} {form.after}"


def _harmony(rules: Rules, tools: Sequence[Tool], forced: bool, start: Start, text: str) -> str:
    """Return the grammar of harmony's messages: reasoning, then one call or the final message."""
    mark = rules.marker
    header = f"{mark('<|channel|>')} {literal('commentary to=functions.')}"
    tail = f"{literal(' ')} {mark('<|constrain|>')} {literal('json')} {mark('<|message|>')}"
    messages = [f"{header} {literal(t.name)} {tail} {_arguments(t)} {mark('<|call|>')}?" for t in tools]
    said = text or rules.add(_ANY_TEXT)
    if start == "text" and not forced:
        return rules.source(f"{said} {mark('<|return|>')}?")
    if start == "text":
        ended = f"{rules.until('<|end|>')} {mark('<|start|>')} {literal('assistant')}"
        return rules.source(f"{ended} {rules.choice(messages)}")
    if not forced:
        messages.append(f"{mark('<|channel|>')} {literal('final')} {mark('<|message|>')} {said} {mark('<|return|>')}?")
    thought = f"{mark('<|channel|>')} {literal('analysis')} {mark('<|message|>')} {rules.until('<|end|>')}"
    return rules.source(f"({thought} {mark('<|start|>')} {literal('assistant')})? {rules.choice(messages)}")


GRAMMARS: Mapping[str, CallRules] = {
    "hermes": _hermes,
    "qwen3-coder": _qwen3_coder,
    "mistral": _mistral,
    "deepseek": partial(_in_section, _DEEPSEEK, lambda tool, separator: f"{literal(tool.name)} {separator}"),
    "deepseek-fenced": partial(
        _in_section,
        _DEEPSEEK,
        lambda tool, separator: f'"function" {separator} {literal(tool.name)} {_FENCE}',
        end='"\\n```"',
        between=_LINE,
    ),
    "glm": _glm,
    "kimi": partial(
        _in_section, _KIMI, lambda tool, separator: f"{literal(f'functions.{tool.name}:')} /[0-9]+/ {separator}"
    ),
    "minimax": _minimax,
    "llama3": _llama3,
    "granite": _granite,
}


CALLS: Mapping[str, CallShape] = {
    "hermes": JsonCalls("<tool_call>", close="</tool_call>"),
    "qwen3-coder": TaggedCalls(
        Layout(
            region=("<tool_call>\n", "</tool_call>"),
            call=("<function=", ">\n", "</function>\n"),
            argument=("<parameter=", ">\n", "\n</parameter>\n"),
        )
    ),
    "mistral": MistralCalls(),
    "deepseek": _DEEPSEEK,
    "glm": TaggedCalls(
        Layout(
            region=("", ""),
            call=("<tool_call>", "\n", "</tool_call>"),
            argument=("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n"),
        )
    ),
    "kimi": _KIMI,
    "minimax": TaggedCalls(
        Layout(
            region=("<minimax:tool_call>\n", "</minimax:tool_call>"),
            call=('<invoke name="', '">\n', "</invoke>\n"),
            argument=('<parameter name="', '">', "</parameter>\n"),
        )
    ),
    # Harmony reads calls itself; these are the markers of its calls, for callers that ask for markers.
    "harmony": JsonCalls(*HARMONY_MARKERS),
    "llama3": JsonCalls("<|python_tag|>", is_bare=True),
    "granite": JsonCalls("<|tool_call|>", "<tool_call>", close="</tool_call>"),
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
    "glm4_moe_lite": "glm",
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
        self, request: GenerateRequest, start: Start, tokenizer: TextTokenizer, new_id: Callable[[], str]
    ) -> OutputParser:
        """Return a parser for one choice. new_id: makes ids of calls."""
        return OutputParser(
            reasoning=REASONING.get(self.reasoning),
            calls=CALLS.get(self.calls) if self.looks_for_calls(request) else None,
            is_harmony=self.is_harmony,
            start=start,
            schemas={tool.name: tool.parameters for tool in request.tools},
            hidden=self.markers.intersection(tokenizer.special_texts),
            tokens=tokenizer.added_ids.keys(),
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
        tokenizer's added tokens, by text. Raise ApiError for forced calls that nothing would read.
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

    calls, reasoning: names of `CALLS` and `REASONING`, `none` or `auto`. Without a known family, calls are in hermes'
    form, which the prompt then explains to the model.
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
        # By whether calls end thoughts, too.
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
        if not self._shape.thinks(request) or (start == "text" and not self._shape.is_harmony):
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
    if shape.is_harmony:
        header = make_markers(_HARMONY_HEADER, tokens)
        (opening,) = make_markers([HARMONY_THOUGHT], tokens)
        form = ThoughtForm(opening, make_markers(HARMONY_BODY_ENDS, tokens), header, only_first=False)
        return {False: form, True: form}
    silent = tokenizer.special_token_ids - tokenizer.special_ids(shape.markers)
    blanks = tuple(token_id for token_id, data in tokens if token_id in silent or is_blank(data))
    # If other text comes before the marker, the answer begins without a thought.
    (opening,) = make_markers([reasoning.begin], tokens, only_blanks_before=True)
    ends = make_markers([reasoning.end], tokens)
    calls = CALLS.get(shape.calls)
    opens = () if calls is None else calls.opens
    if calls is not None and not calls.ends_reasoning:
        opens = tuple(text for text in opens if text in tokenizer.added_ids)
    return {
        calls_end: ThoughtForm(opening, more_ends, blanks=blanks)
        for calls_end, more_ends in ((False, ends), (True, (*ends, *make_markers(opens, tokens))))
    }
