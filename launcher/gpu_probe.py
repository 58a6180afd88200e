"""Looks at this machine's GPU: `python -m launcher.gpu_probe [--check] [--model FOLDER --settings JSON]`.

It prints lines of JSON: a `Found`, a `Checked` for each check, and for a model a `Fit`. A GPU that hangs or crashes
takes no other process with it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.gpu_check.checked import Checked


class Found(msgspec.Struct, tag=True):
    """absence: why no GPU can be used, empty if one can. num_checks: of the checks that follow."""

    absence: str
    num_checks: int


class Fit(msgspec.Struct, tag=True):
    """obstacle: why the model cannot be served on the GPU, empty if it can."""

    obstacle: str


Line = Found | Checked | Fit


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--settings")
    arguments = parser.parse_args()
    from moeserve.device import cuda_absence

    absence = cuda_absence(False) or ""
    names: list[str] = []
    if arguments.check and not absence:
        from moeserve.engine.gpu_check.check import check_names, run_checks

        names = check_names()
    _tell(Found(absence, len(names)))
    if absence:
        return
    if names:
        for check in run_checks():
            _tell(check)
    if arguments.model is not None:
        _tell(Fit(_obstacle(arguments.model, msgspec.json.decode(arguments.settings, type=ServeConfig))))


def _obstacle(folder: Path, config: ServeConfig) -> str:
    from moeserve.device import current_gpu
    from moeserve.engine.doctor import gpu_obstacle
    from moeserve.machine import find_gpus
    from moeserve.model.spec import ModelError

    try:
        return gpu_obstacle(folder, config, find_gpus()[current_gpu().index]) or ""
    except (ConfigError, ModelError) as error:
        return str(error)


def _tell(line: Any) -> None:
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
