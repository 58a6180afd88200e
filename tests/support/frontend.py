"""A frontend process as the supervisor starts it, over a scripted engine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2

from moeserve.config import ServeConfig
from moeserve.run_context import RunContext
from tests.support.fake_engine import FakeEngine
from tests.support.forking import popen
from tests.support.tiny_model import TEMPLATE, write_model_dir

ROOT = Path(__file__).parents[2]


class Frontend:
    """A running frontend. `http` talks to it, `engine` is the other side."""

    def __init__(
        self, process: subprocess.Popen[bytes], port: int, engine: FakeEngine, log_path: Path, run: RunContext
    ) -> None:
        self.run = run
        self.process = process
        self.port = port
        self.engine = engine
        self.log_path = log_path
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx2.Client(base_url=self.url, timeout=60)

    def wait(self, path: str, status: int, reason: str = "", timeout: float = 60.0) -> Any:
        """Asks until the route has that status, and `reason` in its body."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                response = self.http.get(path)
                if response.status_code == status and reason in response.text:
                    return response
            except httpx2.TransportError:
                response = None
            assert time.monotonic() < deadline, f"{path} did not become {status}"
            assert self.process.poll() is None, "the frontend ended"
            time.sleep(0.01)  # another process's state can only be polled


def run_context(folder: Path, *, template: str | None = TEMPLATE, **settings: Any) -> RunContext:
    run_dir = folder / "run"
    run_dir.mkdir(mode=0o700, exist_ok=True)
    return RunContext(
        config=replace(ServeConfig(log_level="debug"), **settings),
        model_dir=str(write_model_dir(folder / "model", template)),
        model_hash="0123456789abcdef",
        run_dir=str(run_dir),
        incarnation=7,
        secret="5e" * 32,
        served_model_names=("tiny", "alias"),
    )


@contextmanager
def frontend(
    folder: Path,
    *,
    wait_ready: bool = True,
    engine: dict[str, Any] | None = None,
    program: str = "launcher.frontend_main",
    **settings: Any,
) -> Iterator[Frontend]:
    """Starts a scripted engine and a frontend over it; both are gone afterwards. program: the frontend's module."""
    run = run_context(folder, **settings)
    context_file = run.save()
    log_path = folder / "frontend.log"
    with socket.create_server(("127.0.0.1", 0)) as listener, FakeEngine(run, **(engine or {})) as fake:
        command = [sys.executable, "-m", program, str(context_file), "--fd", str(listener.fileno())]
        with log_path.open("wb") as output:
            process = popen(command, cwd=ROOT, pass_fds=[listener.fileno()], stderr=output)
        running = Frontend(process, listener.getsockname()[1], fake, log_path, run)
        listener.close()
        try:
            running.wait("/ready" if wait_ready else "/health", 200)
            yield running
        finally:
            running.http.close()
            process.kill()
            process.wait()
