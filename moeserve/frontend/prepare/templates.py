"""Chat messages to the text of a prompt, by the checkpoint's own template in a sandbox.

The environment has the options and helpers of transformers' `apply_chat_template`, for which templates on the hub are
written; the golden test compares the two.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, takewhile
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from moeserve.frontend import limits
from moeserve.frontend.dialects.internal import ChatPrompt, Tool
from moeserve.frontend.errors import chat_template_failed, invalid
from moeserve.frontend.text import CUT_MARKS, TextTokenizer
from moeserve.model.files import read_json, read_text
from moeserve.model.spec import ModelError

_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_EXPLANATION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

Message = dict[str, Any]


class TemplateError(ModelError):
    """The checkpoint's template cannot be used."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; serving needs its body alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template, perhaps with a second one for conversations with tools.

    `special_tokens` (`bos_token`, ...) are variables in it; `now` gives the date.
    """

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
        *,
        tool_source: str | None = None,
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self._plain = _Compiled(environment, source)
        self._with_tools = self._plain if tool_source is None else _Compiled(environment, tool_source)
        self._special_tokens = dict(special_tokens or {})
        self._sources = "\n".join([source, tool_source or "", *self._special_tokens.values()])
        self._words = frozenset(re.findall(r"\w+", f"{source} {tool_source}"))

    def may_write(self, text: str) -> bool:
        """Return whether the source or the variables of the template spell out a text."""
        return text in self._sources

    def may_read(self, variable: str) -> bool:
        """Return whether the source has a variable's name in it."""
        return variable in self._words

    def render(
        self,
        messages: list[dict[str, Any]],
        /,
        *,
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt's text. Raise ApiError (400) if the template refuses the messages in every form.

        `developer` is a later name of `system`; a template that does not know it gets `system`. One that does not know
        tools gets them explained in the system message. One that refuses the messages as they are gets them in the
        plainer forms of `plainer_forms`.
        """
        has_calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
        compiled = self._with_tools if tools or has_calls else self._plain
        if not compiled.knows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        if (tools or has_calls) and not compiled.knows_tools:
            messages, tools = explain_tools(messages, tools or []), None
        if compiled.wants_short_ids:
            messages = with_short_ids(messages)
        given = {
            **self._special_tokens,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **variables,
        }
        try:
            text = compiled.render({**given, "messages": messages})
        except Exception as error:  # Any error that a template raises, or causes in a library, is its refusal.
            text = _render_plainer(compiled, messages, given, error)
        if len(text) > limits.MAX_RENDERED_CHARS:
            raise chat_template_failed("The rendered messages are too long")
        return text


class _Compiled:
    """One template and what its source shows of it."""

    def __init__(self, environment: jinja2.Environment, source: str) -> None:
        if len(source) > limits.MAX_TEMPLATE_CHARS:
            raise TemplateError(
                f"The chat template has {len(source)} characters; at most {limits.MAX_TEMPLATE_CHARS} are read."
            )
        try:
            self.render = environment.from_string(source).render
        except Exception as error:  # jinja2 computes constants, and Python's compiler has limits of its own.
            reason = " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__
            raise TemplateError(f"The chat template does not compile: {reason}.") from None
        self.knows_developer = "developer" in source
        self.knows_tools = "tools" in source
        # Mistral's templates refuse ids of calls unless they are nine letters and digits.
        self.wants_short_ids = "length != 9" in source or "length 9" in source


def _render_plainer(
    compiled: _Compiled, messages: list[dict[str, Any]], given: dict[str, Any], refusal: Exception
) -> str:
    """Return the text of the first plainer form that the template takes. Raise ApiError with the first refusal."""
    for form in plainer_forms(messages):
        try:
            return compiled.render({**given, "messages": form})
        except Exception:
            continue
    reason = str(refusal) if isinstance(refusal, jinja2.TemplateError) else type(refusal).__name__
    raise chat_template_failed(f"The chat template refuses these messages: {reason[:300]}") from refusal


@dataclass(frozen=True, slots=True)
class GuardedPrompt:
    """A prompt for a template, in which every special token that the client spelled out is cut.

    arguments: of `ChatTemplate.render`, beside the messages. mark: in the special tokens. end: behind a message that is
    continued.
    """

    messages: list[dict[str, Any]]
    arguments: dict[str, Any]
    mark: str
    end: str | None

    def cut(self, text: str) -> str:
        """Return a rendered text up to the end of a message that is continued. Raise ApiError if it is not there."""
        if self.end is None:
            return text
        if self.end not in text:
            raise chat_template_failed("The chat template does not show the last message, so it cannot be continued")
        return text[: text.rindex(self.end)]


def guard_prompt(tokenizer: TextTokenizer, prompt: ChatPrompt) -> GuardedPrompt:
    """Return the prompt as a template gets it.

    Special tokens are cut in everything that comes from a client: texts, names, tools and arguments at any depth. In
    the texts of assistants only tokens that a model cannot have written are.
    """
    tools = [template_tool(tool) for tool in prompt.tools]
    spoken = "\n".join([*_texts(prompt.messages), *_texts(tools), *_texts(prompt.variables)])
    marks = list(islice((mark for mark in CUT_MARKS if mark not in spoken), 2))
    if len(marks) < 2:
        raise invalid("The messages use every Unicode noncharacter", "messages")
    mark, end = marks
    messages, variables = prompt.messages, prompt.variables
    if tokenizer.spells_special(spoken):
        messages = [_guard_message(message, tokenizer, mark) for message in messages]
        tools = [_guard(tool, tokenizer, mark) for tool in tools]
        variables = _guard(variables, tokenizer, mark)
    if prompt.continued is not None:
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + end}]
    arguments = {**variables, "add_generation_prompt": prompt.add_generation_prompt, "tools": tools or None}
    return GuardedPrompt(messages, arguments, mark, None if prompt.continued is None else end)


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield key
            yield from _texts(part)
    elif isinstance(value, list):
        for part in value:
            yield from _texts(part)


def _guard_message(message: dict[str, Any], tokenizer: TextTokenizer, mark: str) -> dict[str, Any]:
    guarded: dict[str, Any] = {**_guard(message, tokenizer, mark), "role": message["role"]}
    if message["role"] == "assistant":
        for name in ("content", "reasoning_content"):
            if name in message:
                guarded[name] = tokenizer.protect(message[name], mark, of_model=True)
    return guarded


def _guard(value: Any, tokenizer: TextTokenizer, mark: str) -> Any:
    """Return a copy of a value with `mark` in every special token that is spelled out in it."""
    if isinstance(value, str):
        return tokenizer.protect(value, mark)
    if isinstance(value, dict):
        return {tokenizer.protect(key, mark): _guard(part, tokenizer, mark) for key, part in value.items()}
    if isinstance(value, list):
        return [_guard(part, tokenizer, mark) for part in value]
    return value


def load_chat_template(model_dir: str | Path) -> ChatTemplate | None:
    """Return the template that `read_sources` finds, compiled; None without one. Raise ModelError."""
    folder = Path(model_dir)
    sources = read_sources(folder)
    if not sources:
        return None
    tool_source = sources[1] if len(sources) > 1 else None
    return ChatTemplate(sources[0], _special_tokens(_read_config(folder)), tool_source=tool_source)


def read_sources(folder: Path) -> tuple[str, ...]:
    """Return the template in `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, and one for tools.

    Nothing is compiled, which runs a part of a template. Empty without a template. Raise ModelError for files that
    cannot be read.
    """
    config = _read_config(folder)
    template_path = folder / "chat_template.jinja"
    source = read_text(template_path) if template_path.exists() else _named(config, "default")
    if not isinstance(source, str):
        return ()
    tool_path = folder / "additional_chat_templates" / "tool_use.jinja"
    tool_source = read_text(tool_path) if tool_path.exists() else _named(config, "tool_use")
    return (source, tool_source) if isinstance(tool_source, str) else (source,)


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def _named(config: Mapping[str, Any], name: str) -> Any:
    """Return the template of a name in a list of them; a single template is called `default`."""
    source = config.get("chat_template")
    if isinstance(source, list):
        named = (entry for entry in source if isinstance(entry, dict) and entry.get("name") == name)
        return next((entry.get("template") for entry in named), None)
    return source if name == "default" else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in config.items():
        if name.endswith("_token"):
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                tokens[name] = content
    return tokens


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the HTML escapes that jinja2's own filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def template_tool(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form, as templates take it."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = {"type": "object", "properties": {}} if tool.parameters is None else tool.parameters
    return {"type": "function", "function": function}


def explain_tools(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """Write the tools of a conversation as text, for templates that know no tools.

    The tools are in the system message, calls in the assistants' texts and results in users' texts, in hermes' form.
    """
    written = [_written(message) for message in messages]
    if tools:
        lines = "\n".join(_json(tool) for tool in tools)
        first = written[0] if written and written[0]["role"] == "system" else None
        text = _EXPLANATION.format(tools=lines)
        if first is not None:
            text = f"{first['content']}\n\n{text}"
        written = [{"role": "system", "content": text}, *(written if first is None else written[1:])]
    return list(_joined(written, "user", "\n"))


def _written(message: Message) -> Message:
    """Return a message with its calls, or its result, written out."""
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    if "tool_calls" not in message:
        return message
    calls = [f"<tool_call>\n{_json(_named_call(call))}\n</tool_call>" for call in message["tool_calls"]]
    text = "\n".join([message["content"], *calls] if message["content"] else calls)
    return {**{name: value for name, value in message.items() if name != "tool_calls"}, "content": text}


def _named_call(call: dict[str, Any]) -> dict[str, Any]:
    return {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def plainer_forms(messages: list[Message]) -> Iterator[list[Message]]:
    """Yield forms of a conversation for templates that refuse it, the closest to it first.

    In the first form each call of a message has a message of its own, with its results, for templates that take one
    call at a time. Then later system messages become user messages in their places, so the prompt before them stays a
    prefix; then messages of the same role are joined, for templates that want roles to alternate; then the first system
    message becomes the user's too.
    """
    if any(len(message.get("tool_calls", ())) > 1 for message in messages):
        messages = list(_one_call_each(messages))
        yield messages
    start = next((index for index, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    head = [{**messages[0], "content": _join([m["content"] for m in messages[:start]], "\n\n")}] if start else []
    rest = [_as_user(message) for message in messages[start:]]
    yield [*head, *rest]
    alternating = list(_joined(rest, "user", "\n\n"))
    yield [*head, *alternating]
    if head:
        yield list(_joined([_as_user(head[0]), *alternating], "user", "\n\n"))


def _one_call_each(messages: list[Message]) -> Iterator[Message]:
    """Yield the messages, those with several calls as several, each followed by the results of its call."""
    place = 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            yield message
            continue
        results = list(takewhile(lambda later: later["role"] == "tool", messages[place:]))
        place += len(results)
        for number, call in enumerate(calls):
            yield {**(message if number == 0 else {"role": message["role"], "content": ""}), "tool_calls": [call]}
            yield from (result for result in results if result.get("tool_call_id") == call["id"])
        ids = {call["id"] for call in calls}
        yield from (result for result in results if result.get("tool_call_id") not in ids)


_SYSTEM = ("system", "developer")


def _as_user(message: Message) -> Message:
    return {**message, "role": "user"} if message["role"] in _SYSTEM else message


def _joined(messages: list[Message], role: str, separator: str) -> Iterator[Message]:
    """Yield the messages; neighbours of `role` become one."""
    waiting: list[Message] = []
    for message in [*messages, None]:
        if message is not None and message["role"] == role:
            waiting.append(message)
            continue
        if waiting:
            yield {**waiting[0], "content": _join([said["content"] for said in waiting], separator)}
            waiting = []
        if message is not None:
            yield message


def _join(texts: list[str], separator: str) -> str:
    return separator.join(text for text in texts if text)


def with_short_ids(messages: list[Message]) -> list[Message]:
    """Return the messages with ids of calls that have nine letters and digits; ids of this form stay as they are."""
    short = []
    for message in messages:
        message = dict(message)
        if message.get("tool_call_id"):
            message["tool_call_id"] = short_id(message["tool_call_id"])
        if "tool_calls" in message:
            message["tool_calls"] = [{**call, "id": short_id(call["id"])} for call in message["tool_calls"]]
        short.append(message)
    return short


def short_id(call_id: str) -> str:
    """Return nine letters and digits that stand for an id."""
    if len(call_id) == 9 and call_id.isalnum() and call_id.isascii():
        return call_id
    number = int.from_bytes(hashlib.blake2b(call_id.encode(), digest_size=8).digest(), "big")
    return "".join(_ID_LETTERS[number // 62**place % 62] for place in range(9))
