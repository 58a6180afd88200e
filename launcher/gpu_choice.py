"""`--device auto`: the GPU, if it passes its checks and the model fits it, else the CPU.

The checks run in a process of their own (`launcher.gpu_probe`), once for each card, driver and version of moeserve,
torch and Triton.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from launcher.gpu_probe import Fit, Found, Line
from launcher.gpus import driver_version
from launcher.processes import child_environment
from moeserve.config import VERSION, ServeConfig, cache_root
from moeserve.engine.gpu_check.checked import Checked

_REMEMBERED = "gpu-checks.json"
# Seconds after which a GPU that has told nothing new is taken for hung: compiling the kernels of one check takes some.
_SILENT_SECONDS = 180.0
_ERROR = re.compile(r"[\w.]+(Error|Exception): ")  # as Python names one behind a traceback

Progress = Callable[[str, int, int], None]
Probe = Callable[[list[str]], Iterator[Line]]


class GpuHangs(Exception):
    """A GPU did not end a check, or its process crashed; the message is a clause."""


@dataclass(frozen=True, slots=True)
class Choice:
    """device: `cpu` or `cuda`. sentence: why, for the user; empty where there is nothing to tell."""

    device: str
    sentence: str = ""


def choose(names: list[str], folder: Path, on_gpu: ServeConfig, progress: Progress, probe: Probe) -> Choice:
    """Choose the device for a model. names: of the GPUs that the driver lists. on_gpu: the settings for a GPU."""
    if not names or on_gpu.num_ranks > 1:
        return Choice("cpu")
    faults = remembered(names)
    arguments = ["--model", str(folder), "--settings", msgspec.json.encode(on_gpu).decode()]
    told: list[Checked] = []
    found, num_checks = "", 0
    try:
        for line in probe(arguments if faults is not None else ["--check", *arguments]):
            match line:
                case Found():
                    found, num_checks = line.absence, line.num_checks
                case Checked():
                    told.append(line)
                    progress(f"checking {names[0]}, once", len(told), num_checks)
                case Fit():
                    found = line.obstacle
    except GpuHangs as error:
        found = str(error)
    else:
        if told:
            faults = [f"{check.name}: {check.fault}" for check in told if check.fault]
            remember(names, faults)
    if faults:
        found = f"it failed {len(faults)} checks, the first of {faults[0]} (moeserve doctor --gpu shows all)"
    if found:
        return Choice("cpu", f"{names[0]} is not used: {found.rstrip('.')}.")
    passed = f"{names[0]} passed its {len(told)} checks in {sum(check.seconds for check in told):.0f} s."
    return Choice("cuda", passed if told else "")


def run_probe(arguments: list[str]) -> Iterator[Line]:
    """Run `launcher.gpu_probe` and yield its lines. Raise GpuHangs if none come for long, or if it crashes."""
    command = [sys.executable, "-P", "-m", "launcher.gpu_probe", *arguments]
    environment = child_environment(os.environ, 1)
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        complaints: list[str] = []
        reader = threading.Thread(target=lambda: complaints.extend(process.stderr or ()), daemon=True)
        reader.start()
        hung = threading.Event()

        def end() -> None:
            hung.set()
            process.kill()

        while True:
            timer = threading.Timer(_SILENT_SECONDS, end)
            timer.start()
            text = process.stdout.readline()
            timer.cancel()
            if not text:
                break
            yield msgspec.json.decode(text, type=Line)
        reader.join(1.0)
    if hung.is_set():
        raise GpuHangs(f"it told nothing for {_SILENT_SECONDS:.0f} s while it was checked")
    if process.returncode:
        raise GpuHangs(f"the process that checked it ended with {_last(complaints, process.returncode)}")


def _last(complaints: list[str], code: int) -> str:
    """Return the last error that a process wrote, without advice behind it, else its last line."""
    lines = [line.strip() for line in complaints if line.strip()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or [f"code {code}"])[-1]


def remembered(names: list[str]) -> list[str] | None:
    """Return the faults that a check of these GPUs found with the versions of now; None where none was made."""
    return _read().get(_key(names))


def remember(names: list[str], faults: list[str]) -> None:
    """Keep the faults of a check. A cache that cannot be written means that the next start checks again."""
    file = cache_root() / _REMEMBERED
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = file.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(_read() | {_key(names): faults}))
        new.replace(file)
    except OSError:
        return


def _read() -> dict[str, list[str]]:
    try:
        found = json.loads((cache_root() / _REMEMBERED).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _key(names: list[str]) -> str:
    facts = [*names, driver_version(), VERSION, _version("torch"), _version("triton")]
    return sha256("\n".join(facts).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
