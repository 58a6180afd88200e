"""`moeserve serve`: from settings to a running service."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, fields
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console
from rich.markup import escape

from launcher.console import ProgressDisplay, ready_banner
from launcher.node_supervisor import NodeSupervisor
from launcher.preflight import LaunchError, check_machine, check_nodes, check_packages, check_settings, gpu_names
from launcher.processes import Loading, Ready, is_loopback, open_listener, reachable_address, url
from launcher.supervisor import Listeners, Supervisor
from moeserve.config import ConfigError, ServeConfig, environment_name, flag_name, load_config, value_type
from moeserve.model.spec import ModelError
from moeserve.ranks.messages import RankError
from moeserve.wire import RunContext

# Names the content of a model folder, so that a frontend and an engine of different models refuse each other.


_SMALL = 16 * 2**20


def hash_model(folder: Path) -> str:
    """SHA-256 (hex) over every file's name and size, and the bytes of those below 16 MiB.

    Weights count by name and size alone: reading gigabytes would delay the start, and both sides read the same disk.
    """
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        if size < _SMALL:
            digest.update(path.read_bytes())
    return digest.hexdigest()


# The private directory of one running service: sockets and the run context, gone when the service is. A supervisor
# holds an exclusive lock on the file `lock` in its directory for as long as it lives, whatever ends it. So a
# directory whose lock can be taken belongs to nobody, and the next supervisor removes it.


_PREFIX = "moeserve-"
# sockaddr_un holds 108 bytes with the final NUL; the longest socket name is heartbeat.<incarnation>.
_LONGEST_PATH = 107 - len("/heartbeat.4294967295")


@contextmanager
def run_directory(environment: Mapping[str, str]) -> Iterator[Path]:
    """A new directory with mode 0700, locked by this process and removed at the end. Raises LaunchError."""
    base = _base(environment)
    remove_stale(base)
    path, lock = _create(base)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_stale(base: Path) -> None:
    """Removes this user's run directories in `base` whose supervisors are dead."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            if path.is_symlink() or path.stat().st_uid != os.getuid():
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            # Not a run directory, or removed meanwhile.
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            continue
        finally:
            os.close(lock)


def _base(environment: Mapping[str, str]) -> Path:
    for candidate in (environment.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp"):
        usable = os.path.isabs(candidate) and os.access(candidate, os.W_OK | os.X_OK)
        if usable and len(os.fsencode(candidate)) + len(f"/{_PREFIX}12345678") <= _LONGEST_PATH:
            return Path(candidate)
    raise LaunchError("No directory for sockets is writable and short enough: set XDG_RUNTIME_DIR to one that is.")


def _create(base: Path) -> tuple[Path, int]:
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another supervisor may have taken the lock, and removed the directory, before this one had it.
        if os.fstat(lock).st_nlink:
            return path, lock
        os.close(lock)


# Makes the options of `moeserve serve` out of the fields of `ServeConfig`.


_F = TypeVar("_F", bound=Callable[..., Any])
_ARGUMENT = "model"


class ServeCommand(click.Command):
    """A command whose help lists the options under the headings of the settings."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        options = [parameter for parameter in self.get_params(ctx) if isinstance(parameter, click.Option)]
        by_name = {option.name: option for option in options}
        settings = [setting for setting in fields(ServeConfig) if setting.name != _ARGUMENT]
        for heading, group in groupby(settings, key=lambda setting: str(setting.metadata["group"])):
            _write_section(heading, [by_name.pop(setting.name) for setting in group], ctx, formatter)
        _write_section("Other", list(by_name.values()), ctx, formatter)


def settings_options(command: _F) -> _F:
    """Adds the MODEL argument, one option per setting and `--config FILE`.

    Values stay text (switches: bool): `settings.load_config` gives them types, the same way for every source.
    """
    command = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="TOML file with these settings.",
    )(command)
    for setting in reversed(fields(ServeConfig)):
        if setting.name != _ARGUMENT:
            command = _option(setting)(command)
    return click.argument(_ARGUMENT, required=False)(command)


def _option(setting: Field[Any]) -> Callable[[_F], _F]:
    flag, kind, metadata = flag_name(setting), value_type(setting), setting.metadata
    text = f"{metadata['help']}{_default_note(setting)} [{environment_name(setting)}]"
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", setting.name, default=None, help=text)
    if "choices" in metadata:
        metavar = "|".join(metadata["choices"])
    elif metadata.get("kind") == "size":
        metavar = "SIZE"
    else:
        metavar = metadata.get("metavar") or {int: "N", float: "SECONDS", str: "TEXT"}[kind]
    multiple = bool(metadata.get("multiple"))
    return click.option(flag, setting.name, default=None, multiple=multiple, metavar=metavar, help=text)


def _default_note(setting: Field[Any]) -> str:
    if setting.metadata.get("multiple"):
        return " May be given several times."
    if setting.default is None:
        return ""
    shown = {True: "on", False: "off"}.get(setting.default) if isinstance(setting.default, bool) else setting.default
    return f" (default: {shown})"


def _write_section(
    heading: str, options: list[click.Option], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(heading):
            formatter.write_dl(records)


_DEMO_NAME = "demo"


@click.command(cls=ServeCommand)
@settings_options
def serve(config_file: Path | None, **flags: Any) -> None:
    """Serve MODEL over HTTP until stopped.

    MODEL is a local directory or a hub id; without it the demo model is served. Every option can also be set by the
    environment variable in brackets, or in a TOML file under its name without the dashes. A flag wins over the
    environment, that over the file.
    """
    errors = Console(stderr=True, soft_wrap=True)
    try:
        check_machine()
        config = load_config(flags, os.environ, config_file)
        check_settings(config)
        check_nodes(config)
        check_packages()
        sys.exit(run_first_node(config, errors) if config.node_rank == 0 else _run_other_node(config, errors))
    except ConfigError as error:
        say(errors, "Error", str(error))
        sys.exit(2)
    except (LaunchError, ModelError, RankError) as error:
        say(errors, "Error", str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def run_first_node(
    config: ServeConfig, errors: Console, *, worker_module: str | None = None, meets_in_store: bool = False
) -> int:
    """Serves HTTP over an engine, and over all ranks of this node unless the worker is to be another module.

    Raises LaunchError, ModelError or ConfigError for what keeps it from starting; returns the exit code.
    """
    # Until the supervisor owns the signals, SIGTERM must still remove what was made so far.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    if not is_loopback(config.host) and not (config.api_key or config.api_key_file):
        say(errors, "Warning", f"{config.host} is reachable from other machines and no API key is set (--api-key).")
    with open_listener(config.host, config.port) as listener:
        address = reachable_address(listener)
        progress = ProgressDisplay(errors)
        try:
            model_dir = resolve(config, progress.update)
        finally:
            progress.close()
        with run_directory(os.environ) as directory:
            context = make_context(config, model_dir, directory, meets_in_store=meets_in_store or config.nnodes > 1)
            listeners = _listeners(context, url(address), progress, errors)
            supervisor = Supervisor(context, listener, listeners, worker_module=worker_module)
            if config.nnodes > 1:
                click.echo(f"Node 0 of {config.nnodes}: waits for the others at {config.rdzv_endpoint}.", err=True)
            try:
                return asyncio.run(supervisor.run())
            finally:
                progress.close()


def _run_other_node(config: ServeConfig, errors: Console) -> int:
    signal.signal(signal.SIGTERM, _exit_on_signal)
    per_node = config.expert_parallel_size // config.nnodes
    first = config.node_rank * per_node
    who = f"Node {config.node_rank} of {config.nnodes}, ranks {first} to {first + per_node - 1}"
    progress = ProgressDisplay(errors)
    try:
        model_dir = resolve(config, progress.update)
    finally:
        progress.close()
    with run_directory(os.environ) as directory:
        context = make_context(config, model_dir, directory, meets_in_store=True)
        click.echo(f"{who}: joins node 0 at {config.rdzv_endpoint}.", err=True)
        supervisor = NodeSupervisor(
            context,
            computing=lambda: click.echo(f"{who}: computes for node 0, which serves HTTP."),
            failed=lambda sentence: say(errors, "Error", sentence),
        )
        return asyncio.run(supervisor.run())


def resolve(config: ServeConfig, progress: Callable[[str, int, int], None]) -> Path:
    """The folder of the model that the settings name, fetched or built if need be."""
    from moeserve.model.source import resolve_model

    return resolve_model(config.model, revision=config.revision, offline=config.offline, progress=progress).absolute()


def make_context(config: ServeConfig, model_dir: Path, directory: Path, *, meets_in_store: bool) -> RunContext:
    """One life of one service, with its sockets in `directory`."""
    return RunContext(
        config=config,
        model_dir=str(model_dir),
        model_hash=hash_model(model_dir),
        run_dir=str(directory),
        incarnation=1 + secrets.randbelow(2**31),
        secret=secrets.token_hex(32),
        served_model_names=config.served_model_name or (_default_name(config.model),),
        meets_in_store=meets_in_store,
    )


def _default_name(model: str | None) -> str:
    """A hub id as it is, a directory's last part, or the demo's name."""
    if model is None:
        return _DEMO_NAME
    path = Path(model).expanduser()
    return path.resolve().name if path.exists() else model


def _listeners(context: RunContext, base_url: str, progress: ProgressDisplay, errors: Console) -> Listeners:
    def loading(status: Loading) -> None:
        progress.update(status.stage, status.done, status.total)

    def ready(status: Ready) -> None:
        progress.close()
        needs_key = bool(context.config.api_key or context.config.api_key_file)
        model = context.served_model_names[0]
        click.echo(ready_banner(status, url=base_url, model=model, needs_key=needs_key, gpus=gpu_names()))
        notify("READY=1")

    def stopping() -> None:
        progress.close()
        notify("STOPPING=1")

    def failed(sentence: str) -> None:
        progress.close()
        say(errors, "Error", sentence)

    return Listeners(loading=loading, ready=ready, stopping=stopping, failed=failed)


def say(console: Console, kind: str, sentence: str) -> None:
    """Prints an `Error` or a `Warning`."""
    colour = "red" if kind == "Error" else "yellow"
    console.print(f"[bold {colour}]{kind}:[/] {escape(sentence)}", highlight=False)


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


# Tells systemd (`Type=notify`) how the service stands.


def notify(state: str) -> None:
    """Sends `READY=1` or `STOPPING=1` to the manager named by NOTIFY_SOCKET; without one there is nothing to do."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.connect("\0" + address[1:] if address.startswith("@") else address)
        manager.sendall(state.encode())
