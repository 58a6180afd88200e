"""Routing statistics on disk: one safetensors file, tied to the model it was gathered from. Pure."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from experts.routing.statistics import RoutingStatistics, StatisticsSpec

FORMAT = "1"


class StatisticsError(Exception):
    """A statistics file that cannot serve; the message is one sentence for the operator."""


def model_key(config: Mapping[str, object]) -> str:
    """A hash of the model's configuration (JSON values), independent of the order of its fields."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def save_statistics(path: Path, statistics: RoutingStatistics, key: str) -> None:
    """Replaces the file in one move, so that a reader never meets half of it. key: `model_key`."""
    tables = statistics.tables()
    metadata = {
        "format": FORMAT,
        "model": key,
        "spec": json.dumps(asdict(statistics.spec)),
        "checksum": _checksum(tables),
    }
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            file.write(save(tables, metadata))
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_statistics(path: Path, key: str) -> RoutingStatistics:
    """The statistics in the file. StatisticsError if it is missing, torn, of another model or of another format."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tables: dict[str, NDArray[np.generic]] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise StatisticsError(f"There is no statistics file {path}.") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise StatisticsError(f"The statistics file {path} is torn or is none: {error}; remove it.") from error
    if metadata.get("format") != FORMAT:
        found = metadata.get("format", "unknown")
        raise StatisticsError(f"The statistics file {path} has format {found}, this version reads {FORMAT}; remove it.")
    if metadata.get("model") != key:
        raise StatisticsError(f"The statistics file {path} was gathered from another model; remove it or name another.")
    if metadata.get("checksum") != _checksum(tables):
        raise StatisticsError(f"The statistics file {path} is damaged: its checksum differs; remove it.")
    try:
        return RoutingStatistics.restore(StatisticsSpec(**json.loads(metadata["spec"])), tables)
    except (KeyError, TypeError, ValueError) as error:
        raise StatisticsError(f"The statistics file {path} does not fit together: {error}; remove it.") from error


def _checksum(tables: dict[str, NDArray[np.generic]]) -> str:
    value = 0
    for name in sorted(tables):
        value = zlib.crc32(np.ascontiguousarray(tables[name]).tobytes(), zlib.crc32(name.encode(), value))
    return f"{value:08x}"
