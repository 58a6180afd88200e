"""`moeserve ps` and `moeserve stop`: the services that this user runs on this machine."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path

import click
import msgspec

from launcher.run_directory import base_directory, is_alive, run_directories
from launcher.server_client import ServerError, open_url
from moeserve.settings.quantities import show_size

_RECORD = "service.json"
_LOOK_S = 2.0  # seconds that a service gets to say how it is
_PATIENCE_S = 120.0  # seconds that a service gets to end, above the default of --shutdown-timeout


class Record(msgspec.Struct, frozen=True):
    """A service's description of itself, in its run directory. started: seconds since the epoch."""

    pid: int
    url: str
    model: str
    started: float


@dataclass(frozen=True, slots=True)
class Running:
    """A service that runs, and its run directory."""

    record: Record
    directory: Path

    def is_meant_by(self, word: str) -> bool:
        """Return whether a user means this service by a process id, a port, a URL or a model."""
        record = self.record
        url = word if "://" in word else f"http://{word}"
        return word in (str(record.pid), record.model, record.url.rpartition(":")[2]) or url.rstrip("/") == record.url


def write_record(directory: Path, url: str, model: str) -> None:
    """Note in the run directory which service this process runs."""
    record = Record(os.getpid(), url, model, time.time())
    descriptor = os.open(directory / _RECORD, os.O_WRONLY | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(record))


def find_running(base: Path) -> list[Running]:
    """Return this user's services, the oldest first. base: of run directories."""
    found = []
    for directory in run_directories(base):
        with suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode((directory / _RECORD).read_bytes(), type=Record)
            if is_alive(directory):
                found.append(Running(record, directory))
    return sorted(found, key=lambda service: service.record.started)


@click.command()
def ps() -> None:
    """List the services that this user runs on this machine."""
    services = find_running(base_directory(os.environ))
    if not services:
        click.echo("No service runs: `moeserve serve MODEL` starts one.")
        return
    rows = [("PID", "URL", "STATE", "MEMORY", "UP", "MODEL"), *map(_row, services)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    for row in rows:
        click.echo("  ".join([*(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False)), row[-1]]))


def _row(service: Running) -> tuple[str, ...]:
    record = service.record
    minutes = int(time.time() - record.started) // 60
    up = f"{minutes // 60}h {minutes % 60}m" if minutes >= 60 else f"{minutes}m"
    return str(record.pid), record.url, _state(record.url), show_size(_memory(record.pid)), up, record.model


def _state(url: str) -> str:
    try:
        with open_url(f"{url}/ready", None, None, _LOOK_S) as response:
            return str(msgspec.json.decode(response.read())["status"])
    except ServerError as error:
        return "not ready" if error.status == HTTPStatus.SERVICE_UNAVAILABLE else "silent"


def _memory(pid: int) -> int:
    """Return the bytes of memory of a process and its descendants; a page that several share counts once."""
    num_bytes = 0
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        num_bytes = 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return num_bytes + sum(map(_memory, _children(pid)))


def _children(pid: int) -> Iterator[int]:
    with suppress(OSError):
        yield from map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())


@click.command()
@click.argument("service", required=False)
@click.option("--all", "all_of_them", is_flag=True, help="Stop all of them.")
def stop(service: str | None, all_of_them: bool) -> None:
    """Stop SERVICE: a process id, a port, a URL or a model of `moeserve ps`; without it the only one that runs.

    Requests under way are answered first, as after Ctrl-C (--shutdown-timeout of serve).
    """
    services = find_running(base_directory(os.environ))
    meant = [one for one in services if all_of_them or service is None or one.is_meant_by(service)]
    if not meant:
        what = "No service runs" if service is None or not services else f"No service {service} runs"
        raise click.ClickException(f"{what}; `moeserve ps` lists them.")
    if len(meant) > 1 and not all_of_them:
        named = ", ".join(f"{one.record.pid} ({one.record.model})" for one in meant)
        raise click.ClickException(f"{len(meant)} services run, name one or give --all: {named}.")
    for one in meant:
        _stop(one)
        click.echo(f"{one.record.url} has ended ({one.record.model}).")


def _stop(service: Running) -> None:
    """End a service and wait for it. Raise ClickException if it does not end."""
    try:
        process = os.pidfd_open(service.record.pid)
    except ProcessLookupError:
        return
    try:
        # The number cannot become another process's from here on.
        if not is_alive(service.directory):
            return
        signal.pidfd_send_signal(process, signal.SIGTERM)
        if not select.select([process], [], [], _PATIENCE_S)[0]:
            raise click.ClickException(
                f"The service at {service.record.url} still answers requests: a second `moeserve stop` ends it at once."
            )
    finally:
        os.close(process)
