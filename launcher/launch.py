"""`moeserve launch AGENT`: a terminal agent over moeserve, with settings for this session alone."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from types import FrameType
from typing import Any

import click

from launcher.agents import AGENTS, Agent, Server
from launcher.own_service import ServiceNotStarted, own_service
from launcher.server_client import ServerError, open_url, optional_server_option
from moeserve.listeners import USUAL_URL, why_not_own

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 2.0  # how long a server at the usual address may take to answer before one is started
_LOADING_LOOK_S = 0.5  # between two looks whether a server has loaded its model


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@optional_server_option
@click.option(
    "--serve", "model", metavar="MODEL", help="Model to serve where a service is started; the demo unless given."
)
@click.option("--config", metavar="FILE", help="TOML file with settings of `moeserve serve` for that service.")
@click.option("--api-key", envvar="MOESERVE_API_KEY", help="Key of the server. [MOESERVE_API_KEY]")
@click.argument("agent", metavar="AGENT", type=click.Choice(list(AGENTS)))
@click.argument("arguments", metavar="[ARGUMENTS OF THE AGENT]...", nargs=-1, type=click.UNPROCESSED)
def launch(
    url: str | None, model: str | None, config: str | None, api_key: str | None, agent: str, arguments: tuple[str, ...]
) -> None:
    """Start AGENT (codex, claude, opencode or qwen) with this server as its model.

    The server is the one at --url, or else one of this user that answers at port 8000, or else one that is started
    here on a free port and ends with the agent. The agent's own configuration stays as it is. Options for moeserve
    come before AGENT; all arguments after it are the agent's.
    """
    chosen = AGENTS[agent]
    program = shutil.which(chosen.program)
    if program is None:
        raise click.ClickException(f"{chosen.title} is not installed; `{chosen.install}` installs it.")
    if url is not None and (model or config):
        raise click.UsageError("--serve and --config are for a service that is started here, without --url.")
    settings = [*((model,) if model else ()), *(("--config", config) if config else ())]
    key = None if api_key is None else api_key.split(",")[0]
    try:
        with _server(url, key, settings) as address:
            code = run_agent(chosen, program, describe(address, key), arguments)
    except ServiceNotStarted as error:
        raise click.ClickException(str(error)) from None
    sys.exit(code)


@contextmanager
def _server(url: str | None, key: str | None, settings: Sequence[str]) -> Iterator[str]:
    """Yield the address of a server, which ends with the block if it was started here."""
    if url is None and not settings and _usual_answers(key):
        url = USUAL_URL
    if url is not None:
        click.echo(f"moeserve: asks the server at {url}.", err=True)
        yield url
        return
    click.echo("moeserve: starts a service; it ends with the agent.", err=True)
    with own_service(settings) as address:
        yield address


def _usual_answers(key: str | None) -> bool:
    """Return whether a server of moeserve answers at the usual address and takes the key.

    Raise ServerError for another user's: it would get key and prompts, and an agent runs the commands that it answers.
    """
    reason = why_not_own()
    try:
        with open_url(f"{USUAL_URL}/v1/models", None, key if reason is None else None, _LOOK_S) as response:
            answers = bool(json.load(response)["data"][0]["owned_by"] == "moeserve")
    except ServerError as error:
        answers = reason is not None and error.status == HTTPStatus.UNAUTHORIZED
    except (ValueError, KeyError, IndexError, TypeError):
        return False
    if answers and reason is not None:
        raise ServerError(reason)
    return answers


def describe(url: str, key: str | None) -> Server:
    """Return the facts of the server at `url` that agents need, once its model is loaded. Raise ServerError."""
    model = _model_at(url, key)
    if model.get("owned_by") == "moeserve" and model.get("max_model_len") is None:
        click.echo("moeserve: waits until the model is loaded.", err=True)
        while model.get("max_model_len") is None:
            time.sleep(_LOADING_LOOK_S)
            model = _model_at(url, key)
    context = int(model.get("max_model_len") or 0)
    if not context:
        raise ServerError(f"The server at {url} does not say how long its context is (`max_model_len`).")
    # An answer of the whole context would leave no room for another turn.
    bounds = [int(model[name]) for name in ("max_tokens", "default_max_tokens") if model.get(name)]
    return Server(url, str(model["id"]), context, min([context // 4, *bounds]), key or "none")


def _model_at(url: str, key: str | None) -> dict[str, Any]:
    """Return what the server says of its first model. Raise ServerError."""
    with open_url(f"{url}/v1/models", None, key) as response:
        found: dict[str, Any] = json.load(response)["data"][0]
    return found


def run_agent(agent: Agent, program: str, server: Server, arguments: Sequence[str]) -> int:
    """Run the agent in this terminal and return its exit code, as a shell tells it.

    Ctrl-C is the agent's affair. SIGTERM and SIGHUP are passed on to it.
    """
    settings = agent.settings(server)
    environment = {name: value for name, value in os.environ.items() if name not in settings.removed}
    command = [program, *settings.arguments, *arguments]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A signal that comes while the agent starts waits until it can be passed on.
    signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        process = subprocess.Popen(command, env=environment | dict(settings.variables), preexec_fn=_take_signals)

        def pass_on(number: int, _: FrameType | None) -> None:
            process.send_signal(number)

        for number in _PASSED_ON:
            signal.signal(number, pass_on)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        code = process.wait()
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _take_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
