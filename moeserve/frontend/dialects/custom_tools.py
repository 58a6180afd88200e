"""Custom tools: the model knows one as a function with one text, `input`, which may be held to a grammar."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.chat_parts import CUSTOM_INPUT, make_tool
from moeserve.frontend.dialects.internal import InputForm, Tool
from moeserve.frontend.errors import invalid, too_long, unsupported
from moeserve.grammars.regular import IrregularError, pattern_of

_TEXT_FORMAT = {"type": "text"}
_SYNTAXES = {"lark": "Lark grammar", "regex": "regular expression"}


def make_custom_tool(name: str | None, description: str | None, form: Any, where: str, longest_name: int) -> Tool:
    """Return the function of a custom tool. Raise ApiError.

    form: its `format`, as the Responses API or as the chat API has it. where: the field that holds the tool.
    """
    described, held = _read_format(form, f"{where}.format")
    parameters = {
        "type": "object",
        "properties": {CUSTOM_INPUT: {"type": "string", **described}},
        "required": [CUSTOM_INPUT],
        "additionalProperties": False,
    }
    return replace(make_tool(name, description, parameters, held is not None, where, longest_name), input_form=held)


def repeated_format(form: Any) -> dict[str, Any]:
    """Return a format that `make_custom_tool` took as answers repeat it."""
    return form or _TEXT_FORMAT


def _read_format(form: Any, where: str) -> tuple[dict[str, str], InputForm | None]:
    """Return the words of the input's schema that tell the model its form, and the form."""
    if not isinstance(form, dict | None):
        raise invalid(f"`{where}` must be an object", where)
    kind = None if form is None else form.get("type")
    if form is None or kind == "text":
        return {}, None
    if kind != "grammar":
        raise unsupported(f"{where}.type", str(kind)[:40])
    if isinstance(form.get("grammar"), dict):
        form, where = form["grammar"], f"{where}.grammar"
    syntax, definition = form.get("syntax"), form.get("definition")
    if syntax not in _SYNTAXES:
        raise invalid(f"`{where}.syntax` must be lark or regex", f"{where}.syntax")
    where = f"{where}.definition"
    if not isinstance(definition, str) or not definition.strip():
        raise invalid(f"`{where}` must be a string that is not empty", where)
    if len(definition.encode("utf-8", "surrogatepass")) > limits.MAX_GRAMMAR_BYTES:
        raise too_long(where, limits.MAX_GRAMMAR_BYTES, "bytes")
    try:
        pattern = _whole(definition) if syntax == "regex" else pattern_of(definition, limits.MAX_GRAMMAR_BYTES)
    except IrregularError as error:
        raise invalid(f"Invalid value for `{where}`: {error}", where) from None
    return {"description": f"Text of this {_SYNTAXES[syntax]}:\n{definition}"}, InputForm(pattern, where)


def _whole(pattern: str) -> str:
    """Return a pattern that matches whole texts without the anchors around it, which llguidance lacks."""
    pattern = pattern.removeprefix("^")
    body = pattern.removesuffix("$")
    is_escaped = (len(body) - len(body.rstrip("\\"))) % 2 == 1
    return pattern if is_escaped else body


def custom_input(arguments: str) -> str:
    """Return the text of a custom tool's arguments; the arguments themselves if they were cut off."""
    try:
        decoded = msgspec.json.decode(arguments)
    except msgspec.DecodeError:
        return arguments
    text = decoded.get(CUSTOM_INPUT) if isinstance(decoded, dict) else None
    return text if isinstance(text, str) else arguments
