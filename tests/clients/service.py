"""The demo as a user starts it, with a key, for the clients; with the scripted model's answers on its path."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moeserve.model.demo import ensure_demo

ROOT = Path(__file__).resolve().parents[2]
MODEL = "moeserve-demo"
_END_S = 20


@dataclass(frozen=True, slots=True)
class Service:
    """Where the demo is served, and the keys for it."""

    url: str
    key: str
    admin_key: str
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that scripts read. TOKENIZER: a folder with the model's tokenizer."""
        return {
            "BASE_URL": self.url,
            "API_KEY": self.key,
            "ADMIN_KEY": self.admin_key,
            "MODEL": MODEL,
            "TOKENIZER": str(self.folder),
        }


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
def serve_demo(log: Path, model: Path | None = None, *settings: str) -> Iterator[Service]:
    """Serve a model as long as the context lasts, the demo unless one is given.

    log: file for what the service says. Raises RuntimeError with the end of it if the service does not start.
    """
    key, admin_key = (f"sk-{secrets.token_hex(12)}" for _ in range(2))
    scripted = ROOT / "tests" / "clients" / "scripted"
    path = os.pathsep.join([str(scripted), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    log.parent.mkdir(parents=True, exist_ok=True)
    keys = log.with_suffix(".keys")
    keys.touch(0o600)
    keys.write_text(f"{key}\nadmin:{admin_key}\n")
    options = ["--port", "0", "--served-model-name", MODEL, "--api-key-file", str(keys)]
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
            yield Service(_address(process, log), key, admin_key, model or ensure_demo())
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
