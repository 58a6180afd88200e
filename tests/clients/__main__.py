"""Runs the clients against the demo: `python -m tests.clients [--only NAME ...]`; see docs/clients.md."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

from moeserve.model.demo import ensure_demo
from tests.clients.environments import (
    HERE,
    Client,
    Environment,
    InstallError,
    cache_folder,
    ensure_environment,
    load_clients,
)
from tests.clients.service import ROOT, Service, lengthen, serve_demo
from tests.clients.table import Row, merge, render

PAGE = ROOT / "docs" / "clients.md"


def main(arguments: list[str] | None = None) -> int:
    """Install, serve, run and report; return 0 if every check passed."""
    # What was started is ended then too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    clients = load_clients()
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=list(clients), help="these clients alone")
    parser.add_argument("--jobs", type=int, default=2, help="how many clients run at once")
    parser.add_argument("--install", action="store_true", help="make the environments and stop")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--conformance", dest="group", action="store_const", const="conformance", default="client")
    group.add_argument("--benchmarks", dest="group", action="store_const", const="benchmark")
    options = parser.parse_args(arguments)
    chosen = [
        client
        for name, client in clients.items()
        if (name in options.only if options.only else client.group == options.group)
    ]
    environments, rows = _install(chosen)
    if options.install:
        return 1 if rows else 0
    with tempfile.TemporaryDirectory(prefix="moeserve-clients-") as scratch:
        folder = Path(scratch)
        for context in sorted({environment.client.context for environment in environments}):
            model = lengthen(ensure_demo(), folder / f"model-{context}", context) if context else None
            with serve_demo(cache_folder() / f"service-{context}.log", model) as service:
                served = [environment for environment in environments if environment.client.context == context]
                with ThreadPoolExecutor(options.jobs) as pool:
                    for of_client in pool.map(partial(run_client, service=service, folder=folder), served):
                        rows += of_client
    titles = {client.title: client.group for client in clients.values()}
    for group in dict.fromkeys(titles.values()):
        if of_group := [row for row in rows if titles[row.title] == group]:
            print(render(group, [row.cells(group) for row in of_group]))
            PAGE.write_text(merge(PAGE.read_text(), group, of_group, list(titles)))
    return 1 if any(row.failures for row in rows) else 0


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


def run_client(environment: Environment, service: Service, folder: Path) -> list[Row]:
    """Run a client's script and return what it reported, a row for each API."""
    client = environment.client
    home = folder / client.name
    home.mkdir()
    begin = time.monotonic()
    output, errors = folder / f"{client.name}.out", folder / f"{client.name}.err"
    with output.open("w") as out, errors.open("w") as err:
        process = subprocess.Popen(
            environment.command(HERE / "scripts" / client.script),
            cwd=home,
            env=_variables(environment, service, home),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(client.seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_session(process)
    rows = _read(client, output)
    if status != 0:
        why = f"no end within {client.seconds} s" if status is None else f"status {status}"
        failed = rows[-1] if rows else Row(client.title, client.version, "")
        failed.outcomes["script"] = False
        failed.details["script"] = f"{why}: {errors.read_text()[-2000:]}"
        rows = rows or [failed]
    for row in rows:
        for check in row.failures:
            print(f"FAILED {client.name} {row.api} {check}: {row.details.get(check, '')}", flush=True)
    print(
        f"-- {client.name}: {sum(len(row.outcomes) for row in rows)} checks, {time.monotonic() - begin:.0f} s",
        flush=True,
    )
    return rows


def _variables(environment: Environment, service: Service, home: Path) -> dict[str, str]:
    """Return the variables of a script's environment: nothing of the user's own settings of these clients."""
    kept = {name: os.environ[name] for name in ("LANG", "TERM", "TMPDIR") if name in os.environ}
    return {
        **kept,
        **service.variables,
        "PATH": os.pathsep.join([str(environment.programs), os.environ.get("PATH", "")]),
        "HOME": str(home),
        "PYTHONPATH": str(HERE / "helpers"),
        "PYTHONDONTWRITEBYTECODE": "",
        "NO_PROXY": "*",
        "DO_NOT_TRACK": "1",
    }


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what a script left running, itself with it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(client: Client, output: Path) -> list[Row]:
    rows: dict[str, Row] = {}
    for line in output.read_text().splitlines():
        if not line.startswith('{"api": '):
            continue
        said = json.loads(line)
        row = rows.setdefault(said["api"], Row(client.title, client.version, said["api"]))
        row.outcomes[said["check"]] = said["ok"]
        row.details[said["check"]] = said["detail"]
    return list(rows.values())


if __name__ == "__main__":
    sys.exit(main())
