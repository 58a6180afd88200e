"""A service as a user starts it, and requests to it by the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

# Called with a command and keywords as `subprocess.Popen` is.
Popen = Callable[..., "subprocess.Popen[str]"]

ROOT = Path(__file__).resolve().parents[2]
NAME = "m"
_READY = re.compile(r"ready on (http://\S+)")
# Seconds that a service gets to end after SIGTERM.
_END_SECONDS = 8.0


class NotStarted(Exception):
    """A service ended, or took too long, before it was ready; the message is the end of its log."""


class Service:
    """A running `moeserve serve`. startup_s: from the start of its process until it was ready."""

    def __init__(
        self,
        folder: Path,
        log: Path,
        *arguments: str,
        environment: Mapping[str, str],
        ready_within: float,
        popen: Popen = subprocess.Popen,
    ) -> None:
        """log: the file that receives its standard error. popen: starts its process. Raise NotStarted."""
        self._log = log
        began = time.monotonic()
        with log.open("w") as errors:
            self.process = popen(
                [
                    sys.executable,
                    "-m",
                    "launcher.cli",
                    "serve",
                    str(folder),
                    "--served-model-name",
                    NAME,
                    *arguments,
                    "--port",
                    "0",
                ],
                cwd=ROOT,
                env=dict(environment),
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        timer = threading.Timer(ready_within, self.process.kill)
        timer.start()
        try:
            self.url = self._wait_until_ready()
        finally:
            timer.cancel()
        self.startup_s = time.monotonic() - began

    def _wait_until_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if (found := _READY.search(line)) is not None:
                return found[1]
        self.process.wait()
        raise NotStarted(self.log_end())

    def log_end(self, num_chars: int = 2000) -> str:
        return self._log.read_text(errors="replace")[-num_chars:]

    def stop(self) -> int:
        """End it as a user does; return its exit code, of SIGKILL if it does not end in time."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def kill_worker(self) -> None:
        """Kill the model process as a crash would."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        worker = next(pid for pid in children if b"launcher.worker" in Path(f"/proc/{pid}/cmdline").read_bytes())
        os.kill(int(worker), signal.SIGKILL)

    def ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Return the decoded answer. Raise RuntimeError for another status than 200."""
        connection = self._connection()
        try:
            method, data = ("GET", None) if body is None else ("POST", json.dumps(dict(body)))
            connection.request(method, path, data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        if response.status != 200:
            raise RuntimeError(f"{path}: {response.status} {text[:300]}")
        return text if path == "/metrics" else json.loads(text)

    def complete(self, prompt: str | list[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """Return a completion's answer; greedy unless `fields` say otherwise."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        found: dict[str, Any] = self.ask("/v1/completions", {**body, **fields})
        return found

    def together(self, prompts: list[str], max_tokens: int, **fields: Any) -> list[str]:
        """Return the texts of completions that are asked for at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            answers = threads.map(lambda prompt: self.complete(prompt, max_tokens, **fields), prompts)
            return [answer["choices"][0]["text"] for answer in answers]

    def stream(
        self, prompt: str | list[int], max_tokens: int, **fields: Any
    ) -> Generator[tuple[float, str], None, None]:
        """Yield the seconds since the request, and the text of each event. The connection ends with the generator."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": max_tokens, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        connection, began = self._connection(), time.monotonic()
        try:
            data = json.dumps({**body, **fields})
            connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(f"{response.status} {response.read()[:300]!r}")
            for line in response:
                if line.startswith(b"data: {"):
                    event = json.loads(line.removeprefix(b"data: "))
                    if "error" in event:
                        raise RuntimeError(str(event["error"]))
                    for choice in event["choices"]:
                        yield time.monotonic() - began, choice["text"]
        finally:
            connection.close()

    def metric(self, name: str) -> float:
        """Return a figure of /metrics, 0.0 where it is missing."""
        found = re.search(rf"^{re.escape(name)} (\S+)", self.ask("/metrics"), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def _connection(self) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        assert address.hostname is not None
        return http.client.HTTPConnection(address.hostname, address.port, timeout=300)
