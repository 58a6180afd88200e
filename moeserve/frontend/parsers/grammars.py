"""Grammars that hold a model to its family's form of calls: forced calls, strict tools, and "a call or this format".

They are in llguidance's dialect of Lark. Markers that are tokens of their own are named by id, all others are text.
JSON is written with a space after colons and commas, as templates render it, so that the next turn's prompt continues
the same tokens.
"""

# ruff: noqa: RUF001 - DeepSeek's markers have fullwidth bars

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.frontend.dialects.formats import ANSWER, closed, enforceable
from moeserve.frontend.dialects.internal import Tool
from moeserve.frontend.parsers.parser import Reasoning, Start

_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# More calls at once than this are the babble of a model that does not find its end.
_MOST_CALLS = 16
_ANY_TEXT = "/(?s:.*)/"
_NO_OBJECT = "/([^{](?s:.*))?/"
_LINE_BREAKS = r"/\n{0,2}/"
_LINE = '"\\n"'


class Rules:
    """The rules of one grammar. `ids`: the ids of marker texts that are tokens."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = ids
        self._lines: list[str] = []

    def add(self, body: str, options: str = "") -> str:
        """Add a rule and return its name."""
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{options}: {body}")
        return name

    def choice(self, bodies: Iterable[str]) -> str:
        """Add a rule for one of several bodies and return its name."""
        return self.add(" | ".join([self.add(body) for body in bodies]))

    def is_token(self, marker: str) -> bool:
        return marker in self._ids

    def marker(self, text: str) -> str:
        """Return the expression for a marker."""
        return f"<[{self._ids[text]}]>" if text in self._ids else literal(text)

    def until(self, marker: str) -> str:
        """Return the expression for any text and the marker after it."""
        if marker in self._ids:
            return f"{self.add(_ANY_TEXT)} {self.marker(marker)}"
        return self.add(_ANY_TEXT, f"[suffix={literal(marker)}]")

    def source(self, start: str) -> str:
        """Return the text of the grammar."""
        return "\n".join([f"start: {start}", *self._lines]) + "\n"


def literal(text: str) -> str:
    """Return the expression for a text."""
    return json.dumps(text, ensure_ascii=False)


def json_value(schema: Mapping[str, Any], *, strict: bool) -> str:
    """Return the expression for JSON of a schema. Unless it is strict, words that llguidance lacks are passed over."""
    schema = enforceable(schema, "tools")
    return "%json " + json.dumps({**schema, "x-guidance": {**_SPACING, "lenient": not strict}}, ensure_ascii=False)


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

    family: of `FAMILIES`. start: where the prompt leaves off; `text` allows no reasoning. has_format: the text is what
    the grammar named `ANSWER` says, and any text otherwise. Without tools there are no calls.
    """
    rules = Rules(ids)
    text = f"@{ANSWER}" if has_format else ""
    if family == "harmony":
        return _harmony(rules, tools, forced, start, text)
    calls = FAMILIES[family](rules, tools, parallel) if tools else None
    whole = "" if calls is None else f"{rules.marker(calls.opening)} {calls.rest}" if calls.opening else calls.rest
    if forced or not text:
        body = whole if forced or calls is None else _text_or(rules, calls)
    else:
        body = f"{whole} | {text}" if whole else text
    before = _reasoning(rules, start, reasoning)
    return rules.source(f"{before} {rules.add(body)}")


def _reasoning(rules: Rules, start: Start, reasoning: Reasoning | None) -> str:
    if reasoning is None or start == "text":
        return ""
    rest = f"{rules.until(reasoning.end)} {rules.add(_LINE_BREAKS)}"
    return rest if start == "reasoning" else f"({rules.marker(reasoning.begin)} {rest})?"


def _text_or(rules: Rules, calls: Calls) -> str:
    """Return the expression for text with calls behind it or without."""
    if not calls.opening:
        # Nothing but the first character tells a call from text.
        return f"{calls.rest} | {rules.add(_NO_OBJECT)}"
    if rules.is_token(calls.opening):
        return f"{rules.add(_ANY_TEXT)} ({rules.marker(calls.opening)} {calls.rest})?"
    # The lexeme that ends with the marker wins over the one of any text as soon as the marker is there.
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


def _deepseek(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    open_, separator, close = map(rules.marker, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
    call = rules.choice(f"{open_} {literal(t.name)} {separator} {_arguments(t)} {close}" for t in tools)
    return Calls("<｜tool▁calls▁begin｜>", f"{_several(call, '', parallel)} {rules.marker('<｜tool▁calls▁end｜>')}")


def _deepseek_fenced(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    open_, separator, close = map(rules.marker, ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"))
    head, end = f'{open_} "function" {separator}', f'"\\n```" {close}'
    fence = literal("\n```json\n")
    call = rules.choice(f"{head} {literal(t.name)} {fence} {_arguments(t)} {end}" for t in tools)
    rest = f"{_several(call, _LINE, parallel)} {rules.marker('<｜tool▁calls▁end｜>')}"
    return Calls("<｜tool▁calls▁begin｜>", rest)


def _kimi(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    separator, close = rules.marker("<|tool_call_argument_begin|>"), rules.marker("<|tool_call_end|>")
    head = rules.marker("<|tool_call_begin|>")
    call = rules.choice(
        f"{head} {literal(f'functions.{tool.name}:')} /[0-9]+/ {separator} {_arguments(tool)} {close}" for tool in tools
    )
    end = rules.marker("<|tool_calls_section_end|>")
    return Calls("<|tool_calls_section_begin|>", f"{_several(call, '', parallel)} {end}")


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


FAMILIES: Mapping[str, CallRules] = {
    "hermes": _hermes,
    "qwen3-coder": _qwen3_coder,
    "mistral": _mistral,
    "deepseek": _deepseek,
    "deepseek-fenced": _deepseek_fenced,
    "glm": _glm,
    "kimi": _kimi,
    "minimax": _minimax,
    "llama3": _llama3,
    "granite": _granite,
}
