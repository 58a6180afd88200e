"""Grammars that hold a model to its family's form of calls: forced ones, strict tools, and "a call or this format".

They write calls by the layouts of `families.py`. A value in tags whose type is text is any text up to its closing tag,
as the parser reads it; all other values are JSON of their schemas.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from moeserve.frontend.dialects.formats import ANSWER
from moeserve.frontend.dialects.internal import Tool
from moeserve.frontend.parsers.calls import CallShape, JsonCalls, JsonLayout, MarkedCalls
from moeserve.frontend.parsers.elements import MARK
from moeserve.frontend.parsers.families import CALLS, DEEPSEEK, KIMI, calls_of
from moeserve.frontend.parsers.literals import PythonCalls
from moeserve.frontend.parsers.message_form import MESSAGES, Start
from moeserve.frontend.parsers.nested_grammars import ElementValues, GemmaValues
from moeserve.frontend.parsers.reasoning import Reasoning
from moeserve.frontend.parsers.rules import ANY_TEXT, Rules, arguments_schema, definitions, escaped, json_value, literal
from moeserve.frontend.parsers.tagged import Layout, TaggedCalls
from moeserve.frontend.parsers.values import choices_of, types_of

_LINE_BREAKS = r"/\n{0,2}/"
_LINE = '"\\n"'
_FENCE = '"\\n```json\\n"'


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
    suffix: str = "",
    start: Start = "text",
    reasoning: Reasoning | None = None,
    has_format: bool = False,
) -> str:
    """Return the grammar of an answer: reasoning if the model reasons, then calls of `tools` or, unless `forced`, text.

    family: of `GRAMMARS`, or `harmony`. suffix: in the tags of the vocabulary. start: where the prompt leaves off;
    `text` allows no reasoning. has_format: the text is what the grammar named `ANSWER` says, and any text otherwise.
    Without tools there are no calls.
    """
    rules = Rules(ids)
    text = f"@{ANSWER}" if has_format else ""
    if family == "harmony":
        return _harmony(rules, tools, forced, start, text)
    shape = calls_of(family.removesuffix("-fenced"), suffix)
    calls = _rules_of(family, shape)(rules, tools, parallel) if tools and shape is not None else None
    whole = "" if calls is None else f"{rules.text(calls.opening)} {calls.rest}"
    if forced or not text:
        body = whole if forced or calls is None or shape is None else _text_or(rules, calls, shape.bare)
    else:
        body = f"{whole} | {text}" if whole else text
    before = _reasoning(rules, start, reasoning, shape.opens if tools and shape is not None else ())
    return rules.source(f"{before} {rules.add(body)}")


def _reasoning(rules: Rules, start: Start, reasoning: Reasoning | None, opens: Iterable[str]) -> str:
    """opens: markers that may begin a call inside reasoning, where no grammar would hold it."""
    if reasoning is None or start == "text":
        return ""
    rest = f"{rules.until(reasoning.end, opens)} {rules.add(_LINE_BREAKS)}"
    return rest if start == "reasoning" else f"({rules.text(reasoning.begin)} {rest})?"


def _text_or(rules: Rules, calls: Calls, bare: str) -> str:
    """Return the expression for text with calls behind it or without."""
    if not calls.opening:
        # Only the first character distinguishes a call from text.
        return f"{calls.rest} | {rules.add(f'/([^{escaped(bare)}](?s:.*))?/')}"
    # As soon as the marker is complete, the lexeme that ends with it wins over the lexeme of any text.
    return f"{rules.until(calls.opening)} {calls.rest} | {rules.add(ANY_TEXT)}"


def _arguments(tool: Tool) -> str:
    return json_value(arguments_schema(tool), strict=tool.strict)


def _json(layout: JsonLayout, opening: str, rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    objects = (f'{rules.text(layout.object.replace("NAME", tool.name))} {_arguments(tool)} "}}"' for tool in tools)
    calls = rules.several(rules.choice(objects), rules.text(layout.between), parallel)
    return Calls(opening, f"{rules.text(layout.before.removeprefix(opening))} {calls} {rules.text(layout.after)}")


def _mistral(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    opening = "[TOOL_CALLS]"
    if not rules.is_token("[ARGS]"):
        calls = _json(JsonLayout(f"{opening}[", between=", ", after="]"), opening, rules, tools, parallel)
        return Calls(opening, f'" "? {calls.rest}')
    after = rules.choice(f"{literal(tool.name)} {rules.text('[ARGS]')} {_arguments(tool)}" for tool in tools)
    return Calls(opening, rules.several(after, rules.text(opening), parallel))


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
    begin, separator, close = map(rules.text, (shape.call_open, shape.separator, shape.call_end))
    call = rules.choice(f"{begin} {head(tool, separator)} {_arguments(tool)} {end} {close}" for tool in tools)
    return Calls(shape.section_open, f"{rules.several(call, between, parallel)} {rules.text(shape.section_end)}")


def _tagged(layout: Layout, opening: str, rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    layout = _with_breaks_first(layout)
    before, behind, end = layout.call
    write = partial(_tags, rules, layout)
    calls = rules.choice(
        f"{literal(tool.name)} {write(behind)} {_parameters(rules, tool, layout)} {write(end)}" for tool in tools
    )
    several = rules.several(calls, write(layout.between + before), parallel)
    return Calls(
        opening, f"{write((layout.region[0] + before).removeprefix(opening))} {several} {write(layout.region[1])}"
    )


def _with_breaks_first(layout: Layout) -> Layout:
    """Return a layout whose line breaks behind values belong to the next tag: only the two together end a text."""
    (before, behind, end), (begin, middle, close) = layout.call, layout.argument
    if not (behind.endswith("\n") and close.endswith("\n")):
        return layout
    call, argument = (before, behind[:-1], f"\n{end}"), (f"\n{begin}", middle, close[:-1])
    return replace(layout, call=call, argument=argument)


def _tags(rules: Rules, layout: Layout, text: str) -> str:
    """Return the expression for a part of a layout. Models may leave out the line breaks of a loose one."""
    first, *lines = text.split("\n") if layout.is_loose else [text]
    return " ".join([rules.text(first), *map(rules.line, lines)])


def _parameters(rules: Rules, tool: Tool, layout: Layout) -> str:
    """Return the expression for a tool's arguments in tags, in the order of its schema."""
    schema = arguments_schema(tool)
    properties = schema.get("properties")
    begin = _tags(rules, layout, layout.argument[0])
    if not isinstance(properties, dict) or not properties:
        free = f"{begin} /[a-zA-Z0-9_.-]{{1,64}}/ {_value(rules, {}, schema, layout, tool)}"
        return "" if schema.get("additionalProperties") is False else f"({rules.add(free)}){{0,64}}"
    required = schema.get("required")
    parts = []
    for name, inner in properties.items():
        part = rules.add(f"{begin} {literal(name)} {_value(rules, inner, schema, layout, tool)}")
        parts.append(part if isinstance(required, list) and name in required else f"{part}?")
    return " ".join(parts)


def _value(rules: Rules, inner: Any, schema: Mapping[str, Any], layout: Layout, tool: Tool) -> str:
    """Return the expression for an argument behind its name: its value and the tags around it."""
    types = types_of(inner, schema)
    is_text = not types or "string" in types
    head = _tags(rules, layout, layout.argument[1].replace("STRING", "true" if is_text else "false"))
    close = layout.argument[2]
    if tool.input_form is not None:
        value = rules.matching(tool.input_form.pattern, close, _tags_behind(layout))
    elif not is_text:
        value = f"{json_value({**inner, **definitions(schema)}, strict=tool.strict)} {rules.text(close)}"
    elif (choices := choices_of(inner, schema)) is not None:
        value = f"({' | '.join(map(literal, choices))}) {rules.text(close)}"
    else:
        value = rules.value(close, _tags_behind(layout))
    return f"{head} {value}"


def _tags_behind(layout: Layout) -> list[str]:
    """Return the tags that may follow a value that has ended."""
    parts = (layout.argument[0], *layout.region, layout.call[0], layout.call[2])
    return [part.strip().rstrip('"') for part in parts if part.strip()]


def _gemma(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    opening, end = "<|tool_call>", rules.text("<tool_call|>")
    calls = rules.choice(
        f"{literal(f'call:{tool.name}')} {GemmaValues(rules, tool).arguments()} {end}" for tool in tools
    )
    return Calls(opening, rules.several(calls, rules.text(opening), parallel))


def _elements(rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    calls = rules.choice(
        f"{rules.text(f'{MARK}<invoke name=')} {literal(json.dumps(tool.name))} {literal('>')}"
        f" {ElementValues(rules, tool).arguments(f'{MARK}</invoke>')} {_LINE}"
        for tool in tools
    )
    rest = f"{_LINE} {rules.several(calls, '', parallel)} {rules.text(f'{MARK}</tool_call>')}"
    return Calls(f"{MARK}<tool_call>", rest)


def _python(layout: JsonLayout, opening: str, rules: Rules, tools: Sequence[Tool], parallel: bool) -> Calls:
    calls = rules.choice(f"{literal(tool.name + '(')} {_keywords(rules, tool)} {literal(')')}" for tool in tools)
    several = rules.several(calls, rules.text(layout.between), parallel)
    return Calls(opening, f"{rules.text(layout.before.removeprefix(opening))} {several} {rules.text(layout.after)}")


def _keywords(rules: Rules, tool: Tool) -> str:
    """Return the expression for a tool's arguments as Python's keywords with JSON, in the order of its schema."""
    schema = arguments_schema(tool)
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return ""
    required, shared = schema.get("required"), definitions(schema)
    parts = []
    for name, inner in properties.items():
        value = json_value({**(inner if isinstance(inner, dict) else {}), **shared}, strict=tool.strict)
        is_needed = isinstance(required, list) and name in required
        parts.append((rules.add(f"{literal(f'{name}=')} {value}"), is_needed))
    return rules.listed(parts, literal(", "))


def _harmony(rules: Rules, tools: Sequence[Tool], forced: bool, start: Start, text: str) -> str:
    """Return the grammar of harmony's messages: reasoning, then one call or the final message."""
    mark = rules.text
    header = mark("<|channel|>commentary to=functions.")
    tail = mark(" <|constrain|>json<|message|>")
    messages = [f"{header} {literal(t.name)} {tail} {_arguments(t)} {mark('<|call|>')}?" for t in tools]
    said = text or rules.add(ANY_TEXT)
    if start == "text" and not forced:
        return rules.source(f"{said} {mark('<|return|>')}?")
    if start == "text":
        return rules.source(f"{rules.until('<|end|>')} {mark('<|start|>assistant')} {rules.choice(messages)}")
    if not forced:
        messages.append(f"{mark('<|channel|>final<|message|>')} {said} {mark('<|return|>')}?")
    thought = f"{mark('<|channel|>analysis<|message|>')} {rules.until('<|end|>')}"
    return rules.source(f"({thought} {mark('<|start|>assistant')})? {rules.choice(messages)}")


def _rules_of(family: str, shape: CallShape) -> CallRules:
    match shape:
        case JsonCalls():
            return partial(_json, shape.layout, shape.opens[0] if shape.layout.before else "")
        case TaggedCalls():
            return partial(_tagged, shape.layout, shape.opens[0])
        case PythonCalls():
            return partial(_python, shape.layout, "" if shape.bare else shape.opens[0])
        case _:
            return _OTHERS[family]


_OTHERS: Mapping[str, CallRules] = {
    "gemma4": _gemma,
    "minimax-m3": _elements,
    "mistral": _mistral,
    "deepseek": partial(_in_section, DEEPSEEK, lambda tool, separator: f"{literal(tool.name)} {separator}"),
    "deepseek-fenced": partial(
        _in_section,
        DEEPSEEK,
        lambda tool, separator: f'"function" {separator} {literal(tool.name)} {_FENCE}',
        end='"\\n```"',
        between=_LINE,
    ),
    "kimi": partial(
        _in_section, KIMI, lambda tool, separator: f"{literal(f'functions.{tool.name}:')} /[0-9]+/ {separator}"
    ),
}
# Families to whose calls no grammar holds a model: older ones, and answers that are messages.
_FREE = frozenset({*MESSAGES, "kimi-k3", "step3"})
GRAMMARS = tuple(name for name in (*CALLS, "deepseek-fenced") if name not in _FREE)
