"""Routing statistics on disk: one safetensors file, tied to the model it was gathered from. Pure."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import numpy as np

from experts.routing.statistics import RoutingStatistics, StatisticsSpec
from experts.tensor_file import TensorFileKind, Tensors


class StatisticsError(Exception):
    """A statistics file that cannot serve; the message is one sentence for the operator."""


def model_key(config: Mapping[str, object]) -> str:
    """A hash of the model's configuration (JSON values), independent of the order of its fields."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_KIND = TensorFileKind("statistics file", {"format": "1"}, StatisticsError, "; remove it")


def save_statistics(path: Path, statistics: RoutingStatistics, key: str) -> None:
    """Replaces the file in one move. key: `model_key`."""
    tables = statistics.tables()
    metadata = {"model": key, "spec": json.dumps(asdict(statistics.spec)), "checksum": _checksum(tables)}
    _KIND.save(path, tables, metadata)


def load_statistics(path: Path, key: str) -> RoutingStatistics:
    """The statistics in the file. StatisticsError if it is missing, torn, of another model or of another format."""
    return _KIND.load(path, _restore, key)


def _restore(tables: Tensors, metadata: dict[str, str]) -> RoutingStatistics:
    if metadata.get("checksum") != _checksum(tables):
        raise ValueError("its checksum differs")
    return RoutingStatistics.restore(StatisticsSpec(**json.loads(metadata["spec"])), tables)


def _checksum(tables: Tensors) -> str:
    value = 0
    for name in sorted(tables):
        value = zlib.crc32(np.ascontiguousarray(tables[name]).tobytes(), zlib.crc32(name.encode(), value))
    return f"{value:08x}"
