"""A service takes the memory that `moeserve doctor` says it will, and says at its start what the model is."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from moeserve.settings.quantities import show_size
from tests.support.forking import ROOT, popen
from tests.support.service import Service, service
from tests.support.tiny_checkpoint import write_tiny_checkpoint


def test_a_service_takes_what_the_doctor_says(tmp_path: Path) -> None:
    model = write_tiny_checkpoint(tmp_path / "model")
    (tmp_path / "bare").mkdir()
    shutil.copy(model / "config.json", tmp_path / "bare")
    options = ("--kv-cache-memory", "3MiB", "--json")
    folders = (model, tmp_path / "bare")
    (setup,), (without_weights,) = (doctor(folder, *options)["setups"] for folder in folders)
    for found in (setup, without_weights):
        assert found.pop("tokens_per_second") > 0
    assert setup == without_weights
    with service(model, tmp_path, "--kv-cache-memory", "3MiB") as running:
        said = banner(running)
    assert said["weights"] == show_size(setup["weights_bytes"])
    assert said["KV"].startswith(f"{show_size(setup['kv_bytes'])} = {setup['kv_tokens']:,} tokens in ")
    assert said["context"].startswith(f"{setup['max_model_len']:,} tokens")
    assert said["model"].startswith("mixtral (native), ")


def doctor(*arguments: object) -> Any:
    """Return the JSON of `moeserve doctor --json`."""
    command = [sys.executable, "-m", "launcher.cli", "doctor", *map(str, arguments)]
    with popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as program:
        said, _ = program.communicate()
    assert program.returncode == 0
    return json.loads(said)


def banner(running: Service) -> dict[str, str]:
    """The lines that a service prints when it is ready, by their first words."""
    said: dict[str, str] = {}
    assert running.process.stdout is not None
    while "context" not in said:
        name, _, rest = running.process.stdout.readline().strip().partition(" ")
        said[name] = rest.strip()
    return said
