"""`moeserve chat` and `moeserve run`: a conversation in the terminal, with a server that runs or one of its own."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from launcher.own_service import ServiceNotStarted, own_service
from launcher.savings import period
from launcher.server_client import ServerError, open_url, read_events, server_option
from launcher.settings_options import serve_arguments, set_option
from moeserve.config import ConfigError, load_config

_COMMANDS = "/reset forgets the conversation, /exit ends."


_system_option = click.option("--system", help="System prompt.")
_length_option = click.option("--max-tokens", type=click.IntRange(min=1), help="Longest answer, in tokens.")


@click.command()
@server_option
@click.option("--model", help="Model to ask for; the first one served when left out.")
@_system_option
@_length_option
@click.option("--api-key", envvar="MOESERVE_API_KEY", help="Key of the server. [MOESERVE_API_KEY]")
def chat(url: str, model: str | None, system: str | None, max_tokens: int | None, api_key: str | None) -> None:
    """Talk to a running server from the terminal."""
    _talk(Conversation(url, model or first_model(url, api_key), api_key, system, max_tokens))


@click.command()
@click.argument("model", default="demo")
@set_option
@_system_option
@_length_option
def run(model: str, settings: dict[str, Any], system: str | None, max_tokens: int | None) -> None:
    """Serve MODEL, the demo unless given, and talk to it; the service ends with the conversation."""
    try:
        config = load_config({"model": model, **settings}, os.environ)
        key = config.api_key[0].rpartition(":")[2] if config.api_key else None
        with own_service([model, *serve_arguments(settings, config)]) as url:
            _talk(Conversation(url, first_model(url, key), key, system, max_tokens))
    except (ConfigError, ServiceNotStarted) as error:
        raise click.ClickException(str(error)) from None


def _talk(conversation: Conversation) -> None:
    """Hold a conversation until its end."""
    console = Console(highlight=False, soft_wrap=True)
    if sys.stdin.isatty():
        console.print(f"[dim]{escape(conversation.model)} at {escape(conversation.url)}. {_COMMANDS}[/]")
    while (text := _read_line()) not in (None, "/exit"):
        if text == "/reset":
            conversation.reset()
        elif text:
            _answer(console, conversation, text)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except (EOFError, KeyboardInterrupt):
        return None


def _answer(console: Console, conversation: Conversation, text: str) -> None:
    """Print the answer, and until it comes how far the prompt is.

    An error ends a script with an exit code; a person may try again.
    """
    waiting = Console(stderr=True, highlight=False).status("") if sys.stdin.isatty() else None
    try:
        for piece in conversation.say(text):
            if isinstance(piece, str):
                if waiting is not None:
                    waiting.stop()
                console.out(piece, end="", highlight=False)
            elif waiting is not None:
                waiting.update(f"[dim]{prompt_line(piece)}[/]")
                waiting.start()
    except ServerError as error:
        if not sys.stdin.isatty():
            raise
        console.print(f"[red]{escape(str(error))}[/]", end="")
    except KeyboardInterrupt:
        console.print("[dim] (stopped)[/]", end="")
    finally:
        if waiting is not None:
            waiting.stop()
    console.print()


def prompt_line(progress: dict[str, int]) -> str:
    """Return how far a prompt is: `8,192 of 21,034 (6,016 cached) · 41 s left`."""
    done = f"{progress['processed']:,} of {progress['total']:,} ({progress['cache']:,} cached)"
    return f"{done} · {period(progress['left_ms'] / 1000)} left" if "left_ms" in progress else done


@dataclass
class Conversation:
    """The messages so far, and the server that answers them."""

    url: str
    model: str
    api_key: str | None = None
    system: str | None = None
    max_tokens: int | None = None
    messages: list[dict[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all messages but the system prompt."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def say(self, text: str) -> Iterator[str | dict[str, int]]:
        """Yield the progress of the prompt (`prompt_progress`) and the answer in pieces, then remember question and
        answer. Raise ServerError, and remember nothing."""
        question = {"role": "user", "content": text}
        body: dict[str, Any] = {"model": self.model, "messages": [*self.messages, question], "stream": True}
        body["return_progress"] = True
        if self.max_tokens is not None:
            body["max_tokens"] = self.max_tokens
        pieces = []
        for event in _stream(f"{self.url}/v1/chat/completions", body, self.api_key):
            if progress := event.get("prompt_progress"):
                yield progress
            piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
            if piece:
                pieces.append(piece)
                yield piece
        self.messages += [question, {"role": "assistant", "content": "".join(pieces)}]


def first_model(url: str, api_key: str | None) -> str:
    """Return the name of the model that the server serves. Raise ServerError."""
    with open_url(f"{url}/v1/models", None, api_key) as response:
        return str(json.load(response)["data"][0]["id"])


def _stream(url: str, body: dict[str, Any], api_key: str | None) -> Iterator[dict[str, Any]]:
    with open_url(url, body, api_key) as response:
        for _, data in read_events(response):
            if data != "[DONE]":
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise ServerError(str(event["error"].get("message", event["error"])))
                yield event
