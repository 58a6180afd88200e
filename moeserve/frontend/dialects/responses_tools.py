"""Tools and the choice among them, as `/v1/responses` writes them: flat functions, namespaces of them, custom tools.

A model knows tools by one name each. A function `f` of namespace `n` is `n__f` for it; a custom tool is a function with
one text, `input`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from moeserve.frontend import limits
from moeserve.frontend.dialects.internal import Tool, ToolChoice
from moeserve.frontend.dialects.tools import check_choice, check_tool_name, check_tools, make_tool
from moeserve.frontend.http import ApiError, invalid, unsupported

CUSTOM_INPUT = "input"

_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class ClientName:
    """The names by which the client knows a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(slots=True)
class ToolSet:
    """The tools of a request: for the model, how the client knows them, as the answer repeats them, those dropped.

    names: by the names that the model knows. paths: the field of each tool's name.
    """

    tools: list[Tool] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    names: dict[str, ClientName] = field(default_factory=dict)
    repeated: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


def model_name(name: str, namespace: str | None) -> str:
    """Return the name by which the model knows a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def read_tools(tools: list[dict[str, Any]] | None) -> ToolSet:
    """Return the tools of a body. Built-in ones, which this server does not have, are dropped. Raises ApiError."""
    found = ToolSet()
    for index, tool in enumerate(tools or ()):
        where = f"tools[{index}]"
        match tool.get("type"):
            case "namespace":
                found.repeated.append(_namespace(found, tool, where))
            case "function" | "custom":
                found.repeated.append(_callable(found, tool, where, None))
            case str(kind):
                found.dropped.append(kind[:60])
            case _:
                raise invalid(f"`{where}.type` is required", f"{where}.type")
    check_tools(list(zip(found.tools, found.paths, strict=True)))
    return found


def _namespace(found: ToolSet, tool: dict[str, Any], where: str) -> dict[str, Any]:
    name = _read_name(tool, where)
    nested = tool.get("tools")
    if not isinstance(nested, list) or not all(isinstance(one, dict) for one in nested):
        raise invalid(f"`{where}.tools` must be a list of tools", f"{where}.tools")
    kept = []
    for index, one in enumerate(nested):
        if one.get("type") in ("function", "custom"):
            kept.append(_callable(found, one, f"{where}.tools[{index}]", name))
        else:
            found.dropped.append(str(one.get("type"))[:60])
    description = _text(tool, "description", where) or ""
    return {"type": "namespace", "name": name, "description": description, "tools": kept}


def _callable(found: ToolSet, tool: dict[str, Any], where: str, namespace: str | None) -> dict[str, Any]:
    """Add a function or a custom tool; return it as the answer repeats it."""
    description, strict = _text(tool, "description", where), tool.get("strict")
    is_custom = tool["type"] == "custom"
    parameters = _CUSTOM_PARAMETERS if is_custom else tool.get("parameters")
    if is_custom:
        _check_format(tool, where)
    if not isinstance(parameters, dict | None):
        raise invalid(f"`{where}.parameters` must be an object", f"{where}.parameters")
    if not isinstance(strict, bool | None):
        raise invalid(f"`{where}.strict` must be a boolean", f"{where}.strict")
    made = make_tool(_read_name(tool, where), description, parameters, strict, where, limits.MAX_TOOL_NAME_CHARS)
    known_as = model_name(made.name, namespace)
    found.tools.append(replace(made, name=known_as))
    found.paths.append(f"{where}.name")
    found.names[known_as] = ClientName(made.name, namespace, is_custom)
    if is_custom:
        return {"type": "custom", "name": made.name, "description": description or "", "format": {"type": "text"}}
    return {
        "type": "function",
        "name": made.name,
        "description": description,
        "parameters": parameters,
        "strict": made.strict,
    }


def _check_format(tool: dict[str, Any], where: str) -> None:
    form = tool.get("format")
    if form is None or (isinstance(form, dict) and form.get("type") == "text"):
        return
    kind = form.get("type") if isinstance(form, dict) else form
    raise unsupported(f"{where}.format.type", str(kind)[:40])


def _read_name(entry: dict[str, Any], where: str) -> str:
    return check_tool_name(_text(entry, "name", where), f"{where}.name", limits.MAX_TOOL_NAME_CHARS)


def _text(entry: dict[str, Any], key: str, where: str) -> str | None:
    value = entry.get(key)
    if not isinstance(value, str | None):
        raise invalid(f"`{where}.{key}` must be a string", f"{where}.{key}")
    return value


def read_tool_choice(choice: str | dict[str, Any] | None, found: ToolSet) -> ToolChoice:
    """Return which tools may or must be called. Raises ApiError: 400 for tools that the body does not define."""
    match choice:
        case None | "auto":
            return ToolChoice("auto")
        case "none":
            return ToolChoice("none")
        case "required":
            return _required(found)
        case dict() if choice.get("type") in ("function", "custom"):
            return ToolChoice("required", (_chosen(choice, found, "tool_choice"),))
        case dict() if choice.get("type") == "allowed_tools":
            return _allowed(choice, found)
        case {"type": str(kind)}:
            raise unsupported("tool_choice.type", kind[:40])
        case _:
            raise invalid("`tool_choice` must be none, auto, required, or an object that names tools", "tool_choice")


def _allowed(choice: dict[str, Any], found: ToolSet) -> ToolChoice:
    mode, entries = choice.get("mode", "auto"), choice.get("tools")
    if mode not in ("auto", "required"):
        raise invalid("`tool_choice.mode` must be auto or required", "tool_choice.mode")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise invalid("`tool_choice.tools` must be a list of objects", "tool_choice.tools")
    names = [
        _chosen(entry, found, f"tool_choice.tools[{index}]")
        for index, entry in enumerate(entries)
        if entry.get("type") in ("function", "custom")
    ]
    if names:
        return ToolChoice("required" if mode == "required" else "auto", tuple(dict.fromkeys(names)))
    # Tools of other types are built-in ones, which were dropped.
    return _required(ToolSet(dropped=found.dropped)) if mode == "required" else ToolChoice("none")


def _chosen(entry: dict[str, Any], found: ToolSet, where: str) -> str:
    namespace = _text(entry, "namespace", where)
    name = model_name(_read_name(entry, where), namespace)
    check_choice(ToolChoice("auto", (name,)), found.names, f"{where}.name")
    return name


def _required(found: ToolSet) -> ToolChoice:
    if found.tools or not found.dropped:
        return check_choice(ToolChoice("required"), found.names)
    kinds = ", ".join(dict.fromkeys(found.dropped))
    raise ApiError(
        400,
        f"`tool_choice` asks for a call of a built-in tool ({kinds}), which this server does not have",
        param="tool_choice",
        code="unsupported_parameter",
    )
