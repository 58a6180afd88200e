"""`moeserve serve`: from settings to a running service."""

from __future__ import annotations

import asyncio
import atexit
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO, cast

import click
from rich.console import Console
from rich.markup import escape

from launcher.console import ProgressDisplay, ready_banner
from launcher.gpu_choice import choose, run_probe
from launcher.gpu_table import with_step_budget
from launcher.gpus import gpu_names
from launcher.kv_disk import said_of_disk, with_kv_disk
from launcher.logs import LogStream
from launcher.node_supervisor import NodeSupervisor
from launcher.preflight import (
    LaunchError,
    check_all,
    check_machine,
    check_shares,
    frontends_for,
    is_loopback,
    odd_settings,
    open_listener,
    reachable_address,
    url,
    usable_cores,
)
from launcher.response_store import response_store
from launcher.run_directory import make_context, run_directory
from launcher.running import write_record
from launcher.settings_options import ServeCommand, settings_options
from launcher.socket_ranks import rank_per_node
from launcher.supervisor import UNENDING, Listeners, Supervisor, handled_signals
from moeserve.config import ConfigError, ServeConfig, load_config
from moeserve.engine.ranks.messages import RankError
from moeserve.machine import num_usable_nodes, numa_nodes
from moeserve.model.demo import demo_named
from moeserve.model.spec import ModelError
from moeserve.run_context import RunContext
from moeserve.statuses import Loading, Ready


@click.command(cls=ServeCommand)
@settings_options
def serve(config_file: Path | None, **flags: Any) -> None:
    """Serve MODEL over HTTP until stopped.

    MODEL is a folder, a GGUF file, a model of the hub (owner/name, or owner/name:Q4_K_M of a repository of GGUF files),
    `demo` or `demo-split`; without it the demo is served. Every option can also be set by the environment variable in
    brackets, or in a TOML file under its name without the dashes. A flag wins over the environment, that over the file.
    """
    errors = _error_console()
    with faults_in_words(errors, 1):
        check_machine()

        def read(given: dict[str, Any]) -> ServeConfig:
            return with_kv_disk(load_config(given, os.environ, config_file), partial(say, errors, "Notice"))

        config = read(flags)
        check_all(config)
        if config.node_rank:
            sys.exit(_run_other_node(config, errors))
        sys.exit(run_first_node(config, errors, lambda: read(flags | {"device": "cuda"})))


@contextmanager
def faults_in_words(errors: Console, code: int) -> Iterator[None]:
    """End this process with one sentence, and code 2 for settings that cannot be used, `code` for other faults."""
    try:
        yield
    except ConfigError as error:
        say(errors, "Error", str(error))
        sys.exit(2)
    except (LaunchError, ModelError, RankError) as error:
        say(errors, "Error", str(error))
        sys.exit(code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def run_first_node(
    config: ServeConfig,
    errors: Console,
    on_gpu: Callable[[], ServeConfig] | None = None,
    *,
    worker_module: str | None = None,
    meets_in_store: bool = False,
) -> int:
    """Serve HTTP over an engine, with all ranks of this node unless `worker_module` names another worker.

    on_gpu: returns the settings for a GPU, which `--device auto` may take; without it `auto` is the CPU.

    Return the exit code. Raise LaunchError, ModelError or ConfigError if the service cannot start.
    """
    meets_in_store = meets_in_store or config.nnodes > 1
    if meets_in_store and config.sleep_after is not None:
        raise ConfigError("--sleep-after is for one node that starts its ranks itself: others could not be woken.")
    # Until the supervisor owns the signals, they must still remove the run directory.
    _exit_on_signals()
    if not is_loopback(config.host) and not (config.api_key or config.api_key_file):
        say(errors, "Warning", f"{config.host} is reachable from other machines and no API key is set (--api-key).")
    for sentence in odd_settings(config):
        say(errors, "Notice", sentence)
    with open_listener(config.host, config.port) as listener:
        address = reachable_address(listener)
        progress = progress_display(config, errors)
        with closing(progress):
            model_dir = resolve(config, progress.update)
            check_shares(model_dir, config)
            if config.device == "auto" and on_gpu is not None:
                config = _on_chosen_device(config, on_gpu, model_dir, progress, errors)
            if config.device == "auto" and on_gpu is not None:
                config = _on_each_node(config, model_dir, errors)
        config = with_step_budget(config, gpu_names())
        if not config.num_frontends:
            config = replace(config, num_frontends=frontends_for(usable_cores(), config.max_num_seqs))
        with run_directory(os.environ) as directory, closing(progress), ExitStack() as stack:
            context = make_context(config, model_dir, directory, meets_in_store=meets_in_store)
            store = stack.enter_context(response_store(context, partial(say, errors, "Notice")))
            context = replace(context, response_store=store)
            write_record(directory, url(address), context.served_model_names[0])
            listeners = _listeners(context, url(address), progress, errors)
            supervisor = Supervisor(context, listener, listeners, worker_module=worker_module)
            if config.nnodes > 1:
                click.echo(f"Node 0 of {config.nnodes}: waits for the others at {config.rdzv_endpoint}.", err=True)
            return asyncio.run(supervisor.run())


def _on_chosen_device(
    config: ServeConfig, on_gpu: Callable[[], ServeConfig], folder: Path, progress: ProgressDisplay, errors: Console
) -> ServeConfig:
    """Return the settings for the GPU if it is to be used, else `config`, and say why."""
    of_gpu = on_gpu()
    choice = choose(gpu_names(), folder, of_gpu, progress.update, run_probe)
    progress.close()
    if choice.sentence:
        say(errors, "Notice", choice.sentence)
    return config if choice.device == "cpu" else of_gpu


def _on_each_node(config: ServeConfig, folder: Path, errors: Console) -> ServeConfig:
    """Return the settings for a rank on each NUMA node of this machine, if there are several."""
    found = rank_per_node(config, folder, num_usable_nodes(numa_nodes()))
    if found is not config:
        count = found.num_ranks
        sentence = f"This machine has {count} NUMA nodes: a rank on each has a part of the layers"
        say(errors, "Notice", f"{sentence} (--pipeline-parallel-size {count}); --device cpu starts a single rank.")
    return found


def _run_other_node(config: ServeConfig, errors: Console) -> int:
    _exit_on_signals()
    per_node = config.num_ranks_here
    first = config.node_rank * per_node
    who = f"Node {config.node_rank} of {config.nnodes}, ranks {first} to {first + per_node - 1}"
    with closing(progress_display(config, errors)) as progress:
        model_dir = resolve(config, progress.update)
    with run_directory(os.environ) as directory:
        context = replace(make_context(config, model_dir, directory, meets_in_store=True), incarnation=0)
        click.echo(f"{who}: joins node 0 at {config.rdzv_endpoint}.", err=True)
        supervisor = NodeSupervisor(
            context,
            computing=lambda: click.echo(f"{who}: computes for node 0, which serves HTTP."),
            failed=lambda sentence: say(errors, "Error", sentence),
            notice=lambda sentence: say(errors, "Notice", sentence),
        )
        return asyncio.run(supervisor.run())


def resolve(config: ServeConfig, progress: Callable[[str, int, int], None]) -> Path:
    """Return the folder of the model that the settings name, fetched or built if need be."""
    from moeserve.model.source import resolve_model

    return resolve_model(config.model, revision=config.revision, offline=config.offline, progress=progress).absolute()


def _error_console() -> Console:
    """Return a console on standard error. One that nobody watches may not be read either, and must hold up nothing."""
    if sys.stderr is not sys.__stderr__ or sys.stderr is None or sys.stderr.isatty():
        return Console(stderr=True, soft_wrap=True)
    stream = LogStream(sys.stderr.fileno())
    atexit.register(stream.drain)
    return Console(file=cast("TextIO", stream), soft_wrap=True)


def progress_display(config: ServeConfig, errors: Console) -> ProgressDisplay:
    """Return the display of what is loaded: silent where the user wants lines of JSON on standard error."""
    return ProgressDisplay(Console(quiet=True, force_terminal=False) if config.log_format == "json" else errors)


def _listeners(context: RunContext, base_url: str, progress: ProgressDisplay, errors: Console) -> Listeners:
    def loading(status: Loading) -> None:
        progress.update(status.stage, status.done, status.total)

    def ready(status: Ready) -> None:
        progress.close()
        needs_key = bool(context.config.api_key or context.config.api_key_file)
        model = context.served_model_names[0]
        text = ready_banner(
            status,
            url=base_url,
            model=model,
            needs_key=needs_key,
            gpus=gpu_names(),
            is_demo=demo_named(context.config.model) is not None,
            disk=said_of_disk(context.config),
        )
        click.echo(text)
        notify_systemd("READY=1")

    def stopping() -> None:
        progress.close()
        notify_systemd("STOPPING=1")

    def failed(sentence: str) -> None:
        progress.close()
        say(errors, "Error", sentence)

    return Listeners(
        loading=loading,
        ready=ready,
        stopping=stopping,
        failed=failed,
        notice=lambda sentence: say(errors, "Notice", sentence),
        state=lambda sentence: say(errors, "State", sentence),
        beating=pat_watchdog,
    )


def say(console: Console, kind: str, sentence: str) -> None:
    """Print an `Error`, a `Warning`, a `Notice` or a `State`."""
    colour = {"Error": "red", "Warning": "yellow", "Notice": "yellow"}.get(kind, "green")
    console.print(f"[bold {colour}]{kind}:[/] {escape(sentence)}", highlight=False)


def _exit_on_signals() -> None:
    """Have every signal that ends a service end this process in an orderly way; the others mean nothing yet."""
    for number in handled_signals():
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_IGN if number in UNENDING else _exit_on_signal)


def _exit_on_signal(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def notify_systemd(state: str) -> None:
    """Send `READY=1` or `STOPPING=1` to the manager that NOTIFY_SOCKET names (`Type=notify`), if there is one."""
    _send_to_systemd(state, blocking=True)


def pat_watchdog() -> None:
    """Send `WATCHDOG=1` to the manager, if there is one. Never waits for it nor fails: the next beat tells it again."""
    with suppress(OSError):
        _send_to_systemd("WATCHDOG=1", blocking=False)


def _send_to_systemd(state: str, *, blocking: bool) -> None:
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.setblocking(blocking)
        manager.connect("\0" + address[1:] if address.startswith("@") else address)
        manager.sendall(state.encode())
