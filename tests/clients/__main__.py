"""Runs the clients against the demo: `python -m tests.clients [--only NAME ...]`; see docs/clients.md."""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from moeserve.model.demo import ensure_demo
from tests.clients.environments import (
    Client,
    Environment,
    InstallError,
    cache_folder,
    ensure_environment,
    load_clients,
)
from tests.clients.runner import ScriptsRunner
from tests.clients.service import ROOT, lengthen, serve_demo
from tests.clients.table import Row, merge, render
from tests.support.tiny_checkpoint import write_tiny_checkpoint

PAGE = ROOT / "docs" / "clients.md"


def main(arguments: list[str] | None = None) -> int:
    """Install, serve, run and report; return 0 if every check passed."""
    # Started processes are ended then too, and the results so far are written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    clients = load_clients()
    options = _options(list(clients), arguments)
    chosen = [
        client
        for name, client in clients.items()
        if (name in options.only if options.only else client.group == options.group)
    ]
    environments, rows = _install(chosen)
    if options.install:
        return 1 if rows else 0
    try:
        with tempfile.TemporaryDirectory(prefix="moeserve-clients-") as scratch:
            for row in _run(environments, Path(scratch), options.jobs):
                rows.append(row)
    finally:
        _report(clients.values(), rows)
    return 1 if any(row.failures for row in rows) else 0


def _options(names: list[str], arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=names, help="these clients alone")
    parser.add_argument("--jobs", type=int, default=2, help="how many clients run at once")
    parser.add_argument("--install", action="store_true", help="make the environments and stop")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--conformance", dest="group", action="store_const", const="conformance", default="client")
    group.add_argument("--benchmarks", dest="group", action="store_const", const="benchmark")
    return parser.parse_args(arguments)


def _run(environments: list[Environment], folder: Path, jobs: int) -> Iterator[Row]:
    """Yield what the scripts report, with one service after the other for the models that they need."""
    needs = {(environment.client.tiny, environment.client.context) for environment in environments}
    for tiny, context in sorted(needs):
        own = folder / f"model-{context}"
        model = write_tiny_checkpoint(own) if tiny else lengthen(ensure_demo(), own, context) if context else None
        # Long prompts would hold up the others, which are then refused for the time that they would wait.
        # On a busy machine too none of the many short requests of others is refused for the time that it would wait.
        settings = (
            ("--max-model-len", "512", "--slo", "ttft:600s") if tiny else ("--max-model-len", str(context or 32768))
        )
        served = [one for one in environments if (one.client.tiny, one.client.context) == (tiny, context)]
        log = cache_folder() / f"service-{'tiny' if tiny else context}.log"
        with serve_demo(log, [one.client.name for one in served], model, *settings) as service:
            yield from ScriptsRunner(service, folder).run_all(served, jobs)


def _report(clients: Iterable[Client], rows: list[Row]) -> None:
    """Print the tables of what ran, and write them into the page."""
    groups = {client.title: client.group for client in clients}
    for group in dict.fromkeys(groups.values()):
        if of_group := [row for row in rows if groups[row.title] == group]:
            print(render(group, [row.cells(group) for row in of_group]))
            PAGE.write_text(merge(PAGE.read_text(), group, of_group, list(groups)))


def _install(clients: list[Client]) -> tuple[list[Environment], list[Row]]:
    """Return the clients' environments, and a failed row for each that could not be made."""
    environments, rows = [], []
    for client in clients:
        print(f"-- environment of {client.name}", flush=True)
        try:
            environments.append(ensure_environment(client, cache_folder()))
        except InstallError as error:
            print(error)
            rows.append(Row(client.title, client.version, "", {"install": False}))
    return environments, rows


if __name__ == "__main__":
    sys.exit(main())
