"""`moeserve experts trace`: has a running server record its routing, and fetches the file."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click

from launcher.server_option import server_option

_TIMEOUT = 60.0
_POLL_SECONDS = 1.0


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@server_option
@click.option("--api-key", envvar="MOESERVE_ADMIN_KEY", help="A key with the role admin. [MOESERVE_ADMIN_KEY]")
@click.option("--seconds", type=click.FloatRange(min=0), help="How long to record; until Ctrl-C unless given.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Stop after so many tokens; bounded by the server too.")
@click.option("--token-ids", is_flag=True, help="Keep which tokens they are, and with that the texts themselves.")
def trace(
    file: Path, url: str, api_key: str | None, seconds: float | None, max_tokens: int | None, token_ids: bool
) -> None:
    """Record a routing trace of the server at --url into FILE.

    The trace holds which experts each token of each request chose in each layer. What the texts were is left out
    unless --token-ids is given.
    """
    if not file.parent.is_dir():
        raise click.ClickException(f"{file}: there is no folder {file.parent}.")
    server = _Server(url, api_key)
    started = server.post({"action": "start", "max_tokens": max_tokens, "token_ids": token_ids})
    click.echo(f"recording up to {json.loads(started)['max_tokens']} tokens; Ctrl-C ends it", err=True)
    try:
        _wait(server, seconds)
    except KeyboardInterrupt:
        click.echo("", err=True)
    content = server.post({"action": "stop"})
    try:
        file.write_bytes(content)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written ({error.strerror or error}).") from None
    click.echo(f"{file}: {len(content)} bytes")


def _wait(server: _Server, seconds: float | None) -> None:
    """Until the time is over or the trace is full."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        trace = json.loads(server.get())["recording"]["trace"]
        if trace is None or trace["tokens"] >= trace["max_tokens"]:
            return
        left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(_POLL_SECONDS, left)))


class _Server:
    """The two routes that are needed. Whatever goes wrong becomes a click.ClickException of one sentence."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._headers = {"content-type": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    def get(self) -> bytes:
        return self._ask(urllib.request.Request(f"{self._url}/v1/experts", headers=self._headers))

    def post(self, body: dict[str, Any]) -> bytes:
        data = json.dumps(body).encode()
        return self._ask(urllib.request.Request(f"{self._url}/v1/experts/trace", data, self._headers))

    def _ask(self, request: urllib.request.Request) -> bytes:
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
                content: bytes = response.read()
                return content
        except urllib.error.HTTPError as error:
            raise click.ClickException(_sentence(error)) from None
        except OSError as error:
            raise click.ClickException(f"{self._url} does not answer: {getattr(error, 'reason', error)}.") from None


def _sentence(error: urllib.error.HTTPError) -> str:
    try:
        message: str = json.loads(error.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = "the answer is not that of a moeserve server"
    return f"{error.code}: {message}"
