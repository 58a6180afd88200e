"""Requests of the commands to a running server: its address, its refusals in one sentence, its streams as events."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from typing import Any

import click
from click.core import ParameterSource

from moeserve.listeners import USUAL_URL, why_not_own

_TIMEOUT = 600.0  # seconds of silence after which a connection fails


class ServerError(click.ClickException):
    """The server cannot be reached, or it refused; the message is one sentence, with which a command ends.

    status: of the answer that refused, None without one.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def _base_url(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Complete an address as people write it: a scheme may be missing, and `/v1` may be there.

    Raise ServerError where none is given and another user's server, or none, is at the usual address.
    """
    if text is None:
        return None
    is_usual = context.get_parameter_source(parameter.name or "") is ParameterSource.DEFAULT
    if is_usual and (reason := why_not_own()) is not None:
        raise ServerError(reason)
    return (text if "://" in text else f"http://{text}").rstrip("/").removesuffix("/v1")


server_option = click.option(
    "--url", default=USUAL_URL, show_default=True, callback=_base_url, help="Address of the server."
)
optional_server_option = click.option(
    "--url", callback=_base_url, help="Address of the server; without it one is started for the run."
)

named_server_option = click.option("--url", callback=_base_url, help="Look at the service that runs there.")


def open_url(url: str, body: dict[str, Any] | None, api_key: str | None, timeout: float = _TIMEOUT) -> Any:
    """Return the open response of a GET, or of a POST where there is a body. Raise ServerError."""
    headers = {"Content-Type": "application/json"}
    if api_key:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        raise ServerError(_refusal(error), error.code) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerError(f"No server answers at {url} ({reason}): start one with `moeserve serve`.") from None


def read_events(response: Iterable[bytes]) -> Iterator[tuple[str, str]]:
    """Yield (name, data) of each server-sent event. Raise ServerError when the connection breaks."""
    name = "message"
    try:
        for line in response:
            text = line.decode().rstrip("\r\n")
            if text.startswith("event: "):
                name = text.removeprefix("event: ")
            elif text.startswith("data: "):
                yield name, text.removeprefix("data: ")
            elif not text:
                name = "message"
    except OSError as error:
        raise ServerError(f"The connection to the server broke ({error}).") from None


def _refusal(error: urllib.error.HTTPError) -> str:
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered {error.code} {error.reason}."
