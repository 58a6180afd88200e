"""`moeserve experts`: record a trace of a running server, fit gates to a model, draw what a file holds."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from launcher.server_client import server_option
from moeserve.engine.experts.report import ReportError, draw_report, read_report_source

_TIMEOUT = 60.0
_POLL_SECONDS = 1.0


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@server_option
@click.option("--api-key", envvar="MOESERVE_ADMIN_KEY", help="A key with the role admin. [MOESERVE_ADMIN_KEY]")
@click.option("--seconds", type=click.FloatRange(min=0), help="How long to record; until Ctrl-C unless given.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Tokens to record at most; bounded by the server too.")
@click.option("--token-ids", is_flag=True, help="Keep which tokens they are, and with that the texts themselves.")
def trace(
    file: Path, url: str, api_key: str | None, seconds: float | None, max_tokens: int | None, token_ids: bool
) -> None:
    """Record a routing trace of the server at --url into FILE.

    The trace holds which experts each token of each request chose in each layer. The texts are left out
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
    """Return when the time is over or the trace is full."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        trace = json.loads(server.get())["recording"]["trace"]
        if trace is None or trace["tokens"] >= trace["max_tokens"]:
            return
        left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(_POLL_SECONDS, left)))


class _Server:
    """Requests to a server's routes about experts. Every failure is a click.ClickException of one sentence."""

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


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="What the model will read, in UTF-8; may be given several times. Half of Python's documentation otherwise.",
)
@click.option("--max-tokens", type=click.IntRange(256), default=8192, show_default=True, help="To learn from.")
def fit(model: Path, texts: tuple[Path, ...], max_tokens: int) -> None:
    """Fit gates to the MODEL in a folder, for --expert-prefetch: the model reads text, with all experts in memory.

    For one to three layers ahead a linear map is fitted from what a gate sees, and from the state after its layer, to
    what the later gate said. It costs no more than that gate, and recalls more of what it will choose. The maps are
    kept in the cache, where --expert-prefetch finds them.
    """
    from moeserve.engine.experts.fit import TextReader, fit_gates, half_of_topics, pieces
    from moeserve.engine.experts.prefetch import keep_fitted_gates
    from moeserve.model.spec import ModelError

    contents = [_read(path) for path in texts] or half_of_topics(0)
    try:
        reader = TextReader(model)
    except ModelError as error:
        raise click.ClickException(str(error)) from None
    if not reader.num_gates:
        raise click.ClickException(f"The model in {model} has no experts.")
    read = list(pieces(reader, contents, max_tokens))
    if not read:
        raise click.ClickException("There is no text to learn from.")
    with Console(stderr=True).status("reading"):
        fitted = fit_gates(reader, read)
    click.echo(f"{keep_fitted_gates(model, fitted)}: fitted to {fitted.num_tokens} tokens")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise click.ClickException(f"{path} is no text in UTF-8.") from None


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder for the pictures; the working directory unless given.",
)
def report(file: Path, out: Path) -> None:
    """Draw FILE, which --expert-statistics or a trace wrote, as PNG.

    experts-load.png is a heat map of layers and experts, experts-affinity.png shows which expert follows which,
    experts-balance.png how evenly load lies on experts and on ranks.
    """
    try:
        statistics = read_report_source(file)
        out.mkdir(parents=True, exist_ok=True)
        paths = draw_report(statistics, out)
    except ReportError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or out} cannot be written ({error.strerror or error}).") from None
    for path in paths:
        click.echo(str(path))
