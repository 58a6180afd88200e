"""GPUs by the data of their makers (`gpus.json`), to plan for other machines and to choose the budget of steps."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from moeserve.config import ConfigError, ServeConfig
from moeserve.device import incapability, step_budget
from moeserve.machine import Gpu

_TABLE = Path(__file__).with_name("gpus.json")
# KiB of shared memory that a program may have, by compute capability (CUDA C++ programming guide).
_SHARED_KIB = {(7, 0): 96, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
_CONTEXT_BYTES = 600 * 2**20  # that CUDA and its libraries take of a GPU before anything is loaded


def all_gpus() -> tuple[Gpu, ...]:
    """Return one GPU of each name."""
    return tuple(_gpu(name, facts) for name, facts in _table().items())


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs of `8xH100-80G`, `L4-24G` or `4x24GB`. Raise ConfigError, which lists the table."""
    table = _table()
    found = re.fullmatch(r"(?:(\d{1,4})x)?(.+)", text.strip(), re.IGNORECASE)
    name = None if found is None else _named(found[2].lower(), table)
    if found is None or name is None or found[1] == "0":
        raise ConfigError(
            f"--gpus {text} is not NUMBERxNAME or NUMBERxMEMORY, as 8xH100-80G and 4x24GB; names are "
            f"{', '.join(table)}."
        )
    return (_gpu(name, table[name]),) * int(found[1] or 1)


def gpu_of(name: str) -> Gpu | None:
    """Return the GPU that a driver calls so (`NVIDIA A100-SXM4-80GB`); None if the table does not have it.

    Where the name does not say which of several memories it has, it is the smallest.
    """
    words = re.findall(r"[a-z0-9]+", name.lower())
    if {"laptop", "mig"} & set(words):  # slower than the card of this name, or a part of it
        return None
    said = {"".join(words[first:end]) for first in range(len(words)) for end in range(first + 1, len(words) + 1)}
    found = [gpu for gpu in all_gpus() if gpu.name.lower().rpartition("-")[0] in said]
    exact = [gpu for gpu in found if f"{gpu.name.lower().rpartition('-')[2]}b" in said]
    return min(exact or found, key=lambda gpu: gpu.total_bytes, default=None)


def with_step_budget(config: ServeConfig, names: Sequence[str]) -> ServeConfig:
    """Return the settings of a service on GPUs with the budget of steps of the first. names: as the driver calls them.

    Nodes, whose GPUs may differ, keep the budget of a GPU that is not known.
    """
    gpu = gpu_of(names[0]) if names else None
    if gpu is None or config.device != "cuda" or config.nnodes > 1:
        return config
    return replace(config, max_num_batched_tokens=step_budget(config, "cuda", gpu))


def _named(wanted: str, table: dict[str, dict[str, Any]]) -> str | None:
    """Return the name of a card of the table. `24gb` is the middle one, by bandwidth, of all cards with that memory."""
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
        facts["teraflops"] * 1e12,
    )
