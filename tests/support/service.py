"""A whole service as a user starts it: `moeserve serve` with real processes."""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2

from tests.support.forking import popen

_LISTEN = "0A"  # A state in /proc/net/tcp.
ROOT = Path(__file__).resolve().parents[2]


class Service:
    """A running `moeserve serve`; `http` talks to it, `pids` are the worker's and the frontend's once it is ready."""

    def __init__(
        self, model: Path, run_root: Path, *arguments: str, forked: bool = True, most_files: int | None = None
    ) -> None:
        """forked: whether its processes are forked from one that has imported everything (`tests.support.forking`).
        most_files: the limit of open files of each process, which takes `forked=False`."""
        self.run_root = run_root
        self.errors = run_root.parent / "stderr.txt"
        self._scratch = run_root.parent / "scratch"
        self._scratch.mkdir()
        self.pids: dict[str, int] = {}
        with self.errors.open("w") as errors:
            start = popen if forked else partial(subprocess.Popen, preexec_fn=partial(_limit_files, most_files))
            self.process: subprocess.Popen[str] = start(
                [sys.executable, "-m", "launcher.cli", "serve", str(model), "--port", "0", *arguments],
                cwd=ROOT,
                env={
                    **os.environ,
                    "XDG_RUNTIME_DIR": str(run_root),
                    "TMPDIR": str(self._scratch),
                    # A tiny model's step is over before a second thread has begun.
                    **({"MOESERVE_THREADS": "1"} if forked else {}),
                },
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.http = httpx2.Client(timeout=60)

    def wait_until_ready(self) -> None:
        """Read the banner. Raise AssertionError, with the service's output, if it ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if found := re.search(r"ready on (http://\S+)", line):
                self.http.base_url = found[1]
                self.pids = children_of(self.process.pid)
                return
        raise AssertionError(self.errors.read_text())

    def figure(self, name: str, key: str | None = None) -> float:
        """Return the metric of a name with its labels; 0 where it is not there yet. key: of a service with keys."""
        text = self.http.get("/metrics", headers={} if key is None else {"authorization": f"Bearer {key}"}).text
        found = re.search(rf"^{re.escape(name)} (\S+)", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def stream(self, max_tokens: int, *, tells_resumed: bool = False, **fields: Any) -> Iterator[dict[str, Any]]:
        """Events of a streamed completion as they arrive; an error event too. Raise at a stream that is cut off.

        tells_resumed: `{"resumed": True}` comes where another engine goes on with the answer.
        """
        body = {"model": "m", "prompt": "hello", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        body |= fields
        with self.http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            begun = b""
            # `iter_lines` would end lines at characters of the answer's text too.
            for data in response.iter_bytes():
                *lines, begun = (begun + data).split(b"\n")
                for line in lines:
                    if line == b"data: [DONE]":
                        return
                    if tells_resumed and line == b": resumed":
                        yield {"resumed": True}
                    if line.startswith(b"data: "):
                        yield json.loads(line.removeprefix(b"data: "))

    def end(self, timeout: float = 60) -> int:
        return self.process.wait(timeout)

    def leaves_nothing(self) -> bool:
        """Whether every process, the run directory and temporary files are gone."""
        folders = (self.run_root, self._scratch)
        return not any(is_alive(pid) for pid in self.pids.values()) and not any(
            list(path.iterdir()) for path in folders
        )


@contextmanager
def service(
    model: Path, folder: Path, *arguments: str, forked: bool = True, ready: bool = True, most_files: int | None = None
) -> Iterator[Service]:
    """A service, by default a ready one; killed at the end if it still runs, its children with it."""
    run_root = folder / "run"
    run_root.mkdir(parents=True)
    settings = ("--served-model-name", "m", "--kv-cache-memory", "64MiB", *arguments)
    running = Service(model, run_root, *settings, forked=forked, most_files=most_files)
    try:
        if ready:
            running.wait_until_ready()
        yield running
    finally:
        running.process.kill()
        running.process.wait()
        running.http.close()
        assert running.process.stdout is not None
        running.process.stdout.close()


def is_ready(running: Service) -> bool:
    """Return whether a service answers, and admits generations."""
    try:
        return running.http.get("/ready").status_code == 200
    except httpx2.TransportError:
        return False


def settle(*services: Service) -> None:
    """Wait until the figures count all answers: an engine sends them when it falls idle, before the next list."""
    for running in services:
        for _ in range(2):
            assert running.http.get("/v1/cache").status_code == 200


def _limit_files(most: int | None) -> None:
    if most is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def children_of(pid: int) -> dict[str, int]:
    """Pids of a supervisor's children by what they run: `worker`, `frontend`, `frontend 1` and so on.

    A child that has ended, or ends meanwhile, is not among them.
    """
    pids = {}
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        command = read_of_process(int(child), "cmdline").split("\0")
        if "launcher.worker" in command or "launcher.rank_group" in command:
            pids["worker"] = int(child)
        elif "launcher.frontend_main" in command:
            number = command[command.index("--number") + 1]
            pids["frontend" if number == "0" else f"frontend {number}"] = int(child)
    return pids


def descendants(pid: int) -> set[int]:
    """Pids of all that a process has started, directly or not, by its main threads."""
    children = [int(child) for child in read_of_process(pid, f"task/{pid}/children").split()]
    return set(children).union(*map(descendants, children))


def read_of_process(pid: int, file: str) -> str:
    """Return the text of a file in /proc, "" once the process has ended, which may be while the file is read."""
    try:
        return Path(f"/proc/{pid}/{file}").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def listening_addresses(pids: Iterable[int]) -> dict[str, int]:
    """How many TCP sockets of these processes listen, by address; processes may share one."""
    addresses = {}
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTEN:
                words = bytes.fromhex(local.partition(":")[0])
                network_order = b"".join(words[start : start + 4][::-1] for start in range(0, len(words), 4))
                addresses[f"socket:[{inode}]"] = socket.inet_ntop(family, network_order)
    held = {os.readlink(link) for pid in pids for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
    return Counter(addresses[link] for link in held & addresses.keys())


def is_alive(pid: int) -> bool:
    fields = read_of_process(pid, "stat").rpartition(")")[2].split()
    return fields != [] and fields[0] != "Z"


def wait_until(condition: Any, timeout: float = 120) -> None:
    """Polls another process's state; there is nothing to wait on. timeout: of a machine that does many other things."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)
