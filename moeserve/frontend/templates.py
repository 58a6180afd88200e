"""Chat messages to the text of a prompt, by the checkpoint's own template in a sandbox.

The environment has the options and helpers of transformers' `apply_chat_template`, for which templates on the hub are
written; the golden test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from moeserve.frontend import limits
from moeserve.frontend.http import invalid
from moeserve.frontend.text import CUT_MARKS, TextTokenizer

ALLOWED_TEMPLATE_KWARGS = frozenset({"enable_thinking", "thinking", "reasoning_effort", "thinking_budget"})


class TemplateError(ValueError):
    """The checkpoint's template cannot be used."""


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks training targets; serving needs its body alone."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it as an instance attribute

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template. `special_tokens` (`bos_token`, ...) are variables in it; `now` gives the date."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > limits.MAX_TEMPLATE_CHARS:
            raise TemplateError(f"chat template of {len(source)} characters exceeds {limits.MAX_TEMPLATE_CHARS}")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"chat template does not compile: {error}") from None
        self._special_tokens = dict(special_tokens or {})
        self._knows_developer = "developer" in source

    def render(self, messages: list[dict[str, Any]], *, add_generation_prompt: bool, **variables: Any) -> str:
        """Return the prompt's text. Raises ApiError (400) if the template refuses the messages.

        `developer` is a later name of `system`; a template that does not know it gets `system`.
        """
        if not self._knows_developer:
            messages = [
                {**message, "role": "system"} if message["role"] == "developer" else message for message in messages
            ]
        try:
            text = self._template.render(
                **{
                    **self._special_tokens,
                    "messages": messages,
                    "tools": None,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                    **variables,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            reason = str(error) if isinstance(error, jinja2.TemplateError) else type(error).__name__
            raise invalid(f"The chat template refuses these messages: {reason[:300]}", "messages") from None
        if len(text) > limits.MAX_RENDERED_CHARS:
            raise invalid("The rendered messages are too long", "messages")
        return text


def render_prompt(
    template: ChatTemplate,
    tokenizer: TextTokenizer,
    messages: list[dict[str, Any]],
    *,
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> tuple[str, str]:
    """Return the rendered prompt and the cut mark in it, both for `TextTokenizer.encode_rendered`."""
    spoken = [value for message in messages for value in message.values() if isinstance(value, str)]
    mark = next((mark for mark in CUT_MARKS if not any(mark in text for text in spoken)), None)
    if mark is None:
        raise invalid("The messages use every Unicode noncharacter", "messages")
    guarded = [
        {
            name: tokenizer.protect(value, mark) if name != "role" and isinstance(value, str) else value
            for name, value in message.items()
        }
        for message in messages
    ]
    text = template.render(guarded, add_generation_prompt=add_generation_prompt, **variables)
    return text, mark


def load_chat_template(model_dir: str | Path) -> ChatTemplate | None:
    """Return the template in `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, else None."""
    folder = Path(model_dir)
    config_path = folder / "tokenizer_config.json"
    config = msgspec.json.decode(config_path.read_bytes()) if config_path.is_file() else {}
    template_path = folder / "chat_template.jinja"
    source = template_path.read_text("utf-8") if template_path.is_file() else _named_default(config)
    if not isinstance(source, str):
        return None
    return ChatTemplate(source, _special_tokens(config))


def _named_default(config: Mapping[str, Any]) -> Any:
    """Return the template; of a list of named templates the one called `default`, which is for plain chat."""
    source = config.get("chat_template")
    if isinstance(source, list):
        return next((entry.get("template") for entry in source if entry.get("name") == "default"), None)
    return source


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
