"""The demo as a user starts it, with a key, for the clients; with the scripted model's answers on its path."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from moeserve.model.demo import ensure_demo

ROOT = Path(__file__).resolve().parents[2]
MODEL = "moeserve-demo"
_END_S = 20


class Prompt(NamedTuple):
    """A request's prompt: the route, the number of its tokens, and how many of them were cached."""

    route: str
    num_tokens: int
    num_cached: int


@dataclass(frozen=True, slots=True)
class Service:
    """Where the demo is served, the keys for it, by clients' names, and the file of its log."""

    url: str
    keys: Mapping[str, str]
    admin_key: str
    folder: Path
    log: Path

    def variables(self, client: str) -> dict[str, str]:
        """Return the environment variables that scripts read. TOKENIZER: a folder with the model's tokenizer."""
        return {
            "CLIENT": client,
            "BASE_URL": self.url,
            "API_KEY": self.keys[client],
            "ADMIN_KEY": self.admin_key,
            "MODEL": MODEL,
            "TOKENIZER": str(self.folder),
        }

    def prompts(self, client: str) -> list[Prompt]:
        """Return the prompts that a client's requests had, in the order of their ends."""
        caller = hashlib.sha256(self.keys[client].encode()).hexdigest()
        found = []
        for line in self.log.read_text().splitlines():
            if caller in line:
                entry = json.loads(line)
                if entry.get("prompt_tokens"):
                    found.append(Prompt(entry["route"], entry["prompt_tokens"], entry["cached_tokens"]))
        return found


def lengthen(demo: Path, folder: Path, context: int) -> Path:
    """Put a model into `folder` that is the demo, said to have a longer context than it was trained with."""
    folder.mkdir()
    for file in demo.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file)
    config = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": context}))
    return folder


@contextmanager
def serve_demo(log: Path, clients: Iterable[str], model: Path | None = None, *settings: str) -> Iterator[Service]:
    """Serve a model as long as the context lasts, the demo unless one is given, with a key for each client.

    log: file for what the service says. Raise RuntimeError with the end of it if the service does not start.
    """
    own_keys = {client: f"sk-{secrets.token_hex(12)}" for client in clients}
    admin_key = f"sk-{secrets.token_hex(12)}"
    scripted = ROOT / "tests" / "clients" / "scripted"
    path = os.pathsep.join([str(scripted), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    log.parent.mkdir(parents=True, exist_ok=True)
    # Several runs may be under way, and a service reads keys again when their file changes.
    keys = log.with_suffix(f".{os.getpid()}.keys")
    keys.touch(0o600)
    keys.write_text("\n".join([*own_keys.values(), f"admin:{admin_key}", ""]))
    options = ["--port", "0", "--served-model-name", MODEL, "--api-key-file", str(keys), "--kv-disk-path", "none"]
    command = [
        sys.executable,
        "-m",
        "launcher.cli",
        "serve",
        *([] if model is None else [str(model)]),
        *options,
        *settings,
    ]
    with log.open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, "MOESERVE_LOG_FORMAT": "json"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            address = _address(process, log)
            if "Error in sitecustomize" in log.read_text():
                raise RuntimeError("the answers are not scripted: a function that sitecustomize replaces has gone")
            yield Service(address, own_keys, admin_key, model or ensure_demo(), log)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
            keys.unlink(missing_ok=True)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"ready on (http://\S+)", line):
            return found[1]
    raise RuntimeError(f"the service did not start:\n{log.read_text()[-3000:]}")
