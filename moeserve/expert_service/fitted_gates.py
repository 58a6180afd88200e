"""Where the gates fitted to a model are kept: in the cache, by the checkpoint's folder and configuration."""

from __future__ import annotations

from pathlib import Path

import structlog

from experts.prefetch.fitted_gates import FittedGates, FittedGatesError, load_fitted_gates, save_fitted_gates
from moeserve.expert_service.placement import statistics_key
from moeserve.models.cache_folder import cache_root

log = structlog.get_logger(__name__)


def fitted_gates_path(directory: Path) -> Path:
    """Of the checkpoint in `directory`, whether there is a file or not."""
    return cache_root() / "gates" / f"{directory.resolve().name}-{statistics_key(directory)[:16]}.safetensors"


def find_fitted_gates(directory: Path) -> FittedGates | None:
    """Those of the checkpoint in `directory`; None, and a warning, for a file that cannot be used."""
    path = fitted_gates_path(directory)
    if not path.exists():
        return None
    try:
        return load_fitted_gates(path, statistics_key(directory))
    except FittedGatesError as error:
        log.warning("fitted_gates_unusable", reason=str(error), consequence="the plain gates predict")
        return None


def keep_fitted_gates(directory: Path, fitted: FittedGates) -> Path:
    """Has `find_fitted_gates` find them from now on; returns the file."""
    path = fitted_gates_path(directory)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_fitted_gates(path, fitted, statistics_key(directory))
    return path
