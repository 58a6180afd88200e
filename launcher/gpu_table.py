"""GPUs that are elsewhere, by what their makers say of them (`gpus.json`)."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from moeserve.config import ConfigError
from moeserve.device import incapability
from moeserve.machine import Gpu

_TABLE = Path(__file__).with_name("gpus.json")
# KiB of shared memory that a program may have, by compute capability (CUDA C++ programming guide).
_SHARED_KIB = {(7, 0): 96, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
_CONTEXT_BYTES = 600 * 2**20  # that CUDA and its libraries take of a GPU before anything is loaded


def all_gpus() -> tuple[Gpu, ...]:
    """Return one GPU of each name."""
    return tuple(_gpu(name, facts) for name, facts in _table().items())


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs of `8xH100-80G`, `L4-24G` or `4x24GB`. Raise ConfigError, which names those of the table."""
    table = _table()
    found = re.fullmatch(r"(?:(\d{1,4})x)?(.+)", text.strip(), re.IGNORECASE)
    name = None if found is None else _named(found[2].lower(), table)
    if found is None or name is None or found[1] == "0":
        raise ConfigError(
            f"--gpus {text} is not NUMBERxNAME or NUMBERxMEMORY, as 8xH100-80G and 4x24GB; names are "
            f"{', '.join(table)}."
        )
    return (_gpu(name, table[name]),) * int(found[1] or 1)


def _named(wanted: str, table: dict[str, dict[str, Any]]) -> str | None:
    """Return the name of a card of the table. Of those with a memory, `24gb`, it is the middle one by bandwidth."""
    if (name := next((name for name in table if name.lower() == wanted), None)) is not None:
        return name
    ending = f"-{wanted.removesuffix('b')}"
    alike = [name for name in table if name.lower().endswith(ending)]
    alike.sort(key=lambda name: table[name]["gigabytes_per_second"])
    return alike[(len(alike) - 1) // 2] if alike else None


def _table() -> dict[str, dict[str, Any]]:
    table: dict[str, dict[str, Any]] = json.loads(_TABLE.read_text())
    return table


def _gpu(name: str, facts: dict[str, Any]) -> Gpu:
    major, minor = facts["capability"]
    capability, total = (major, minor), facts["mebibytes"] * 2**20
    return Gpu(
        name,
        total,
        total - _CONTEXT_BYTES,
        capability,
        _SHARED_KIB[capability] * 1024,
        facts["gigabytes_per_second"] * 1e9,
        incapability(capability, needs_fp8=False),
    )
