"""`moeserve experts`: record a trace of a server, fit gates to a model, draw a file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from launcher.server_client import open_url, server_option
from moeserve.engine.experts.report import ReportError, draw_report, read_report_source

_TIMEOUT = 60.0  # seconds for each request to the server
_POLL_SECONDS = 1.0  # between two looks whether the trace is full


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
    route = f"{url}/v1/experts/trace"
    started = _ask(route, {"action": "start", "max_tokens": max_tokens, "token_ids": token_ids}, api_key)
    click.echo(f"recording up to {json.loads(started)['max_tokens']} tokens; Ctrl-C ends it", err=True)
    try:
        _wait(f"{url}/v1/experts", api_key, seconds)
    except KeyboardInterrupt:
        click.echo("", err=True)
    content = _ask(route, {"action": "stop"}, api_key)
    try:
        file.write_bytes(content)
    except OSError as error:
        raise click.ClickException(f"{file} cannot be written ({error.strerror or error}).") from None
    click.echo(f"{file}: {len(content)} bytes")


def _wait(url: str, api_key: str | None, seconds: float | None) -> None:
    """Return when the time is over or the trace is full."""
    deadline = None if seconds is None else time.monotonic() + seconds
    while deadline is None or time.monotonic() < deadline:
        trace = json.loads(_ask(url, None, api_key))["recording"]["trace"]
        if trace is None or trace["tokens"] >= trace["max_tokens"]:
            return
        left = _POLL_SECONDS if deadline is None else deadline - time.monotonic()
        time.sleep(max(0.0, min(_POLL_SECONDS, left)))


def _ask(url: str, body: dict[str, Any] | None, api_key: str | None) -> bytes:
    """Return the answer to a GET, or to a POST where there is a body. Raise ClickException, one sentence."""
    try:
        with open_url(url, body, api_key, _TIMEOUT) as response:
            content: bytes = response.read()
            return content
    except OSError as error:
        raise click.ClickException(str(error)) from None


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

    For one to three layers ahead a linear map is fitted from the input of a gate, and from the state after its layer,
    to the scores of the later gate. It costs no more than that gate, and recalls more of its choices. The maps are kept
    in the cache, where --expert-prefetch finds them.
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
