"""Routers of others in environments of their own, over services."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx2

from moeserve.engine.curve import create_keys
from tests.clients.environments import Client, cache_folder, ensure_environment
from tests.support.service import Service, service, wait_until


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def program(
    client: Client, folder: Path, *command: str, path: str, variables: Mapping[str, str] | None = None
) -> Iterator[httpx2.Client]:
    """Run a program of an environment, with {port} in its command, until it answers at `path`.

    variables: further ones of its environment.
    """
    environment, port = ensure_environment(client, cache_folder()), free_port()
    arguments = [part.format(port=port) for part in command]
    log = folder / f"{client.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(environment.programs / arguments[0]), *arguments[1:]],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(variables or {})},
        )
    try:
        with httpx2.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            wait_until(lambda: _answers(http, path, process, log), 120)
            yield http
    finally:
        process.kill()
        process.wait()


def _answers(http: httpx2.Client, path: str, process: subprocess.Popen[bytes], log: Path) -> bool:
    assert process.poll() is None, log.read_text()[-3000:]
    try:
        return bool(http.get(path).status_code == 200)
    except httpx2.TransportError:
        return False


def transfer_settings(folder: Path) -> tuple[str, ...]:
    """Return the settings of two services: one computes prompts for the other."""
    create_keys(folder / "kv.key")
    return "--kv-transfer-config", json.dumps({"key_file": str(folder / "kv.key")})


def start(stack: ExitStack, model: Path, folder: Path, *settings: str) -> Service:
    folder.mkdir()
    return stack.enter_context(service(model, folder, *settings))


def address(running: Service) -> str:
    return str(running.http.base_url).rstrip("/")


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
