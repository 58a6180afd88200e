"""`moeserve launch AGENT`: a terminal agent over moeserve, with settings for this session alone."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import FrameType
from typing import Any

import click

from launcher.agents import AGENTS, Agent, Server, Settings
from launcher.auto_model import TOKENS_OF_AGENTS, candidates
from launcher.own_service import ServiceNotStarted, own_service
from launcher.preflight import usable_cores
from launcher.savings import savings_told
from launcher.server_client import ServerError, open_url, optional_server_option
from launcher.settings_options import serve_arguments, set_option
from moeserve.config import ConfigError, ServeConfig, cache_root, load_config
from moeserve.listeners import USUAL_URL, why_not_own
from moeserve.model.demo import demo_named
from moeserve.settings.quantities import show_size

_PASSED_ON = (signal.SIGTERM, signal.SIGHUP)
_LOOK_S = 2.0  # how long a server at the usual address may take to answer before one is started
_LOADING_LOOK_S = 0.5  # between two looks whether a server has loaded its model
_AUTO = "auto"
_NO_SERVER = (
    "No server answers at {url}, and no model is named for one: --serve auto takes one that fits this machine, "
    "--serve MODEL another one, --serve demo the small demo, whose answers are not to be trusted."
)


class _AgentName(click.Choice[str]):
    """The name of an agent; an option in its place is taken for a setting of `moeserve serve`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and value.startswith("--"):
            name = value.partition("=")[0].removeprefix("--")
            self.fail(f"{value} is no option here: --set {name}=VALUE gives a setting to a service that is started.")
        return super().convert(value, param, ctx)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@optional_server_option
@click.option("--serve", "model", metavar="MODEL|auto|demo", help="Model of a service that is started here.")
@set_option
@click.option("--config", type=click.Path(path_type=Path), metavar="FILE", help="TOML file with such settings.")
@click.option("--yes", is_flag=True, help="Fetch the model of `--serve auto` without asking.")
@click.option("--print", "prints", is_flag=True, help="Print the environment, for a shell's `eval`; start nothing.")
@click.option("--config-only", is_flag=True, help="Print command and environment as JSON; start nothing.")
@click.option("--api-key", envvar="MOESERVE_API_KEY", help="Key of the server. [MOESERVE_API_KEY]")
@click.argument("agent", metavar="AGENT", type=_AgentName(list(AGENTS)))
@click.argument("arguments", metavar="[ARGUMENTS OF THE AGENT]...", nargs=-1, type=click.UNPROCESSED)
def launch(
    url: str | None,
    model: str | None,
    settings: dict[str, Any],
    config: Path | None,
    yes: bool,
    prints: bool,
    config_only: bool,
    api_key: str | None,
    agent: str,
    arguments: tuple[str, ...],
) -> None:
    """Start AGENT with this server as its model.

    AGENT is codex, claude, opencode, qwen, pi, cline, continue, crush, goose, gptme, mini or aider. The server is the
    one at --url, or else one of this user that answers at port 8000, or else one that is started here on a free port
    with the model of --serve, and ends with the agent. The agent's own configuration stays as it is. Options for
    moeserve come before AGENT; all arguments after it are the agent's.
    """
    chosen = AGENTS[agent]
    key = None if api_key is None else api_key.split(",")[0]
    asked = Asked(model, settings, config, yes)
    if url is not None and asked.names_a_service:
        raise click.UsageError("--serve, --set and --config are for a service that is started here, without --url.")
    if prints or config_only:
        if asked.names_a_service:
            raise click.UsageError("--print and --config-only are for a server that runs: name it with --url.")
        if url is None and not _usual_answers(key):
            raise ServerError(f"No server answers at {USUAL_URL}: start one with `moeserve serve`, or give --url.")
        show = environment_lines if prints else as_json
        click.echo(show(chosen, _lasting_settings(chosen, describe(url or USUAL_URL, key)), arguments))
        return
    program = shutil.which(chosen.program)
    if program is None:
        raise click.ClickException(f"{chosen.title} is not installed; `{chosen.install}` installs it.")
    try:
        with _server(url, key, asked) as address:
            server = describe(address, key)
            if server.context < TOKENS_OF_AGENTS:
                click.echo(_too_small(server.context, asked), err=True)
            with savings_told(address, key):
                code = run_agent(chosen, program, server, arguments)
    except (ServiceNotStarted, ConfigError) as error:
        raise click.ClickException(str(error)) from None
    sys.exit(code)


@dataclass(frozen=True, slots=True)
class Asked:
    """The service that the user wants to be started. settings: flags. yes: fetch a model without a question."""

    model: str | None
    settings: Mapping[str, Any]
    config: Path | None
    yes: bool = False

    @property
    def names_a_service(self) -> bool:
        return bool(self.model or self.settings or self.config)

    def arguments(self) -> list[str]:
        """Return the arguments of `moeserve serve`. Raise ConfigError, and ServerError where no model is named."""
        model = None if self.model == _AUTO else self.model
        read = load_config({"model": model, **self.settings}, os.environ, self.config)
        if self.model == _AUTO:
            model = _choose(read, asks=not self.yes)
        elif read.model is None:
            raise ServerError(_NO_SERVER.format(url=USUAL_URL))
        file = () if self.config is None else ("--config", str(self.config))
        settings = dict(self.settings)
        if read.model is not None and demo_named(read.model) is not None and read.max_model_len is None:
            settings["max_model_len"] = TOKENS_OF_AGENTS  # The demo was trained with fewer, and is stretched to these.
        return [*(() if model is None else (model,)), *file, *serve_arguments(settings, read)]


def _choose(config: ServeConfig, *, asks: bool) -> str:
    """Return the best model of the list that fits this machine; ask before a download. Raise ServerError."""
    from moeserve.machine import read_machine

    found = candidates(read_machine(usable_cores()), config)
    best = next((candidate for candidate in found if candidate.fits), None)
    if best is None:
        least = found[-1].choice
        raise ServerError(
            f"No model of the list fits with {TOKENS_OF_AGENTS:,} tokens of context; the smallest is {least.name} "
            f"with {show_size(least.num_bytes)}. `moeserve doctor MODEL` says what fits of another one."
        )
    click.echo(f"moeserve: takes {best.in_words()}.", err=True)
    if asks and not best.is_here and sys.stdin.isatty():
        click.confirm("Fetch and serve it?", default=True, abort=True, err=True)
    return best.choice.name


@contextmanager
def _server(url: str | None, key: str | None, asked: Asked) -> Iterator[str]:
    """Yield the address of a server, which ends with the block if it was started here."""
    if url is None and not asked.names_a_service and _usual_answers(key):
        url = USUAL_URL
    if url is not None:
        click.echo(f"moeserve: asks the server at {url}.", err=True)
        yield url
        return
    arguments = asked.arguments()
    click.echo("moeserve: starts a service; it ends with the agent.", err=True)
    with own_service(arguments) as address:
        yield address


def _usual_answers(key: str | None) -> bool:
    """Return whether a server of moeserve answers at the usual address.

    Raise ServerError for one that does not take the key, and for another user's: it would get key and prompts, and an
    agent runs the commands that it answers.
    """
    reason = why_not_own()
    try:
        with open_url(f"{USUAL_URL}/v1/models", None, key if reason is None else None, _LOOK_S) as response:
            answers = bool(json.load(response)["data"][0]["owned_by"] == "moeserve")
    except ServerError as error:
        if error.status != HTTPStatus.UNAUTHORIZED:
            return False
        if reason is None and key is None:
            reason = f"The server at {USUAL_URL} wants a key: give --api-key KEY, or set MOESERVE_API_KEY."
        raise ServerError(reason or f"The server at {USUAL_URL} does not take this key: {error}") from None
    except (ValueError, KeyError, IndexError, TypeError):
        return False
    if answers and reason is not None:
        raise ServerError(reason)
    return answers


def _too_small(context: int, asked: Asked) -> str:
    """Return the warning for a context that is less than an agent's first prompts need."""
    how = "--set " if asked.names_a_service else "a start of the service with --"
    flags = f"{how}max-model-len={TOKENS_OF_AGENTS}, with kv-cache-memory=SIZE or kv-cache-dtype=int8 if need be,"
    if "max_model_len" in asked.settings:
        flags = "a larger --set max-model-len"
    return (
        f"moeserve: the context has {context:,} tokens, and terminal agents need {TOKENS_OF_AGENTS:,}: {flags} helps "
        "where the model allows more."
    )


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
    """Return the first entry of the server's `/v1/models`. Raise ServerError."""
    with open_url(f"{url}/v1/models", None, key) as response:
        found: dict[str, Any] = json.load(response)["data"][0]
    return found


def environment_lines(agent: Agent, settings: Settings, arguments: Sequence[str]) -> str:
    """Return lines for `eval` in a shell: variables, and a function that adds arguments to the program."""
    lines = [f"unset {name}" for name in settings.removed]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in settings.variables.items()]
    if words := [*settings.arguments, *arguments]:
        lines.append(f'{agent.program}() {{ command {shlex.join([agent.program, *words])} "$@"; }}')
    return "\n".join(lines)


def as_json(agent: Agent, settings: Settings, arguments: Sequence[str]) -> str:
    """Return command and environment for programs, such as an IDE, that start the agent themselves."""
    command = [agent.program, *settings.arguments, *arguments]
    files = [str(file) for file in settings.files]
    shown = {"command": command, "environment": dict(settings.variables), "unset": settings.removed, "files": files}
    return json.dumps(shown, indent=2)


def _lasting_settings(agent: Agent, server: Server) -> Settings:
    """Return the agent's settings, with its files in a folder of the cache that is this agent's and server's."""
    name = hashlib.sha256(f"{server.url} {server.model}".encode()).hexdigest()[:12]
    folder = cache_root() / "agents" / f"{agent.program}-{name}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return prepare(agent, server, folder)


def prepare(agent: Agent, server: Server, folder: Path) -> Settings:
    """Return the agent's settings, with its files written into the folder."""
    settings = agent.settings(server, folder)
    for file, text in settings.files.items():
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(text)
        file.chmod(0o600)
    if settings.setup:
        command = [agent.program, *settings.setup]
        try:
            subprocess.run(command, env=_environment(settings), capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = str(getattr(error, "stderr", None) or error).strip()[-300:]
            raise ServerError(f"`{agent.program} {settings.setup[0]}` has failed: {said}") from None
    return settings


def _environment(settings: Settings) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in settings.removed}
    return kept | dict(settings.variables)


def run_agent(agent: Agent, program: str, server: Server, arguments: Sequence[str]) -> int:
    """Run the agent in this terminal and return its exit code, as a shell tells it.

    Ctrl-C is the agent's affair. SIGTERM and SIGHUP are passed on to it.
    """
    with tempfile.TemporaryDirectory(prefix="moeserve-agent-") as folder:
        settings = prepare(agent, server, Path(folder))
        return _run([program, *settings.arguments, *arguments], _environment(settings))


def _run(command: Sequence[str], environment: Mapping[str, str]) -> int:
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that came before the agent could get them

    def pass_on(number: int, _: FrameType | None) -> None:
        if process is None:
            early.append(number)
        else:
            process.send_signal(number)

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    try:
        process = subprocess.Popen(command, env=environment, preexec_fn=_take_signals)
        for came in early:
            process.send_signal(came)
        code = process.wait()
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def _take_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
