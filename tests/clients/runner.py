"""Runs the scripts of clients against a service and reads what they report."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from tests.clients.environments import HERE, Client, Environment
from tests.clients.service import Service
from tests.clients.table import Row


class ScriptsRunner:
    """Runs scripts against one service; `folder` is for their homes and outputs."""

    def __init__(self, service: Service, folder: Path) -> None:
        self._service = service
        self._folder = folder
        self._running: set[subprocess.Popen[bytes]] = set()

    def run_all(self, environments: Iterable[Environment], jobs: int) -> Iterator[Row]:
        """Yield what the scripts of environments report, `jobs` of them at once, in the order of the environments."""
        with ThreadPoolExecutor(jobs) as pool:
            try:
                for rows in pool.map(self._run, environments):
                    yield from rows
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _end_session(process)

    def _run(self, environment: Environment) -> list[Row]:
        """Run one script; return a row for each API that it reports of, or one that says how it ended."""
        client = environment.client
        home = self._folder / client.name
        home.mkdir()
        begin = time.monotonic()
        output, errors = self._folder / f"{client.name}.out", self._folder / f"{client.name}.err"
        with output.open("w") as out, errors.open("w") as err:
            process = subprocess.Popen(
                environment.command(HERE / "scripts" / client.script),
                cwd=home,
                env=self._variables(environment, home),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                status: int | None = process.wait(client.seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end_session(process)
                self._running.discard(process)
        rows = _read(client, output)
        if status != 0:
            why = f"no end within {client.seconds} s" if status is None else f"status {status}"
            rows = rows or [Row(client.title, client.version, "")]
            rows[-1].outcomes["script"] = False
            rows[-1].details["script"] = f"{why}: {errors.read_text()[-2000:]}"
        if client.group == "client":
            for row in rows:
                row.note_prompts(self._service.prompts(client.name))
        _tell(client, rows, time.monotonic() - begin)
        return rows

    def _variables(self, environment: Environment, home: Path) -> dict[str, str]:
        """Return the variables of a script's environment: nothing of the user's own settings of these clients."""
        kept = {name: os.environ[name] for name in ("LANG", "TERM", "TMPDIR", "EXAMPLES") if name in os.environ}
        return {
            **kept,
            **self._service.variables(environment.client.name),
            "PATH": os.pathsep.join([str(environment.programs), os.environ.get("PATH", "")]),
            "HOME": str(home),
            "PYTHONPATH": str(HERE / "helpers"),
            "NO_PROXY": "*",
            "DO_NOT_TRACK": "1",
        }


def _tell(client: Client, rows: list[Row], seconds: float) -> None:
    for row in rows:
        for check in row.failures:
            print(f"FAILED {client.name} {row.api} {check}: {row.details.get(check, '')}", flush=True)
    print(f"-- {client.name}: {sum(len(row.outcomes) for row in rows)} checks, {seconds:.0f} s", flush=True)


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
