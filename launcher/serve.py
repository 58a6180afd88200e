"""`moeserve serve`: from settings to a running service."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import click
from rich.console import Console
from rich.markup import escape

from launcher import systemd
from launcher.console import ProgressDisplay, ready_banner
from launcher.errors import LaunchError
from launcher.listener import is_loopback, open_listener, reachable_address, url
from launcher.machine import gpu_names
from launcher.model_hash import hash_model
from launcher.preflight import check_machine, check_packages, check_settings
from launcher.run_directory import run_directory
from launcher.serve_options import ServeCommand, settings_options
from launcher.status import Loading, Ready
from launcher.supervisor import Listeners, Supervisor
from moeserve.config import ConfigError, ServeConfig
from moeserve.models.errors import ModelError
from moeserve.run_context import RunContext
from moeserve.settings import load_config

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
        sys.exit(_run(config, errors))
    except ConfigError as error:
        _say(errors, "Error", str(error))
        sys.exit(2)
    except (LaunchError, ModelError) as error:
        _say(errors, "Error", str(error))
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(config: ServeConfig, errors: Console) -> int:
    # Until the supervisor owns the signals, SIGTERM must still remove what was made so far.
    signal.signal(signal.SIGTERM, _exit_on_signal)
    check_packages()
    if not is_loopback(config.host) and not (config.api_key or config.api_key_file):
        _say(errors, "Warning", f"{config.host} is reachable from other machines and no API key is set (--api-key).")
    with open_listener(config.host, config.port) as listener:
        address = reachable_address(listener)
        progress = ProgressDisplay(errors)
        try:
            model_dir = _resolve(config, progress)
        finally:
            progress.close()
        with run_directory(os.environ) as directory:
            context = _make_context(config, model_dir, directory)
            supervisor = Supervisor(context, listener, _listeners(context, url(address), progress, errors))
            try:
                return asyncio.run(supervisor.run())
            finally:
                progress.close()


def _resolve(config: ServeConfig, progress: ProgressDisplay) -> Path:
    from moeserve.models.source import resolve_model

    return resolve_model(
        config.model, revision=config.revision, offline=config.offline, progress=progress.update
    ).absolute()


def _make_context(config: ServeConfig, model_dir: Path, directory: Path) -> RunContext:
    return RunContext(
        config=config,
        model_dir=str(model_dir),
        model_hash=hash_model(model_dir),
        run_dir=str(directory),
        incarnation=1 + secrets.randbelow(2**31),
        secret=secrets.token_hex(32),
        served_model_names=config.served_model_name or (_default_name(config.model),),
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
        systemd.notify("READY=1")

    def stopping() -> None:
        progress.close()
        systemd.notify("STOPPING=1")

    def failed(sentence: str) -> None:
        progress.close()
        _say(errors, "Error", sentence)

    return Listeners(loading=loading, ready=ready, stopping=stopping, failed=failed)


def _say(console: Console, kind: str, sentence: str) -> None:
    colour = "red" if kind == "Error" else "yellow"
    console.print(f"[bold {colour}]{kind}:[/] {escape(sentence)}", highlight=False)


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
