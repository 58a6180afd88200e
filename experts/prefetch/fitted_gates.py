"""Linear maps from the state at one layer to what the gate of a later one will say, learnt from text; and their file.

Pure. A map is as wide as the gate it stands for, so that a fitted preview costs what a plain one does.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from experts.prediction.predictor import Tap

FORMAT = "1"
_KIND = "fitted gates"


class FittedGatesError(Exception):
    """A file of fitted gates that cannot serve; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class FittedGates:
    """maps[tap, distance]: [L - distance, E, H + 1] float; those of l give the scores of layer l + distance, the last
    column is the constant. num_tokens: learnt from."""

    maps: Mapping[tuple[Tap, int], NDArray[np.floating]]
    num_tokens: int

    def max_distance(self, tap: Tap) -> int:
        """How far ahead there are maps of this tap, without a gap from 1 on; 0 for none."""
        distance = 0
        while (tap, distance + 1) in self.maps:
            distance += 1
        return distance


def save_fitted_gates(path: Path, fitted: FittedGates, key: str) -> None:
    """Replaces the file in one move. key: `experts.routing.statistics_file.model_key` of the model."""
    tensors = {
        f"{tap.value}.{distance}": np.ascontiguousarray(maps, np.float16)
        for (tap, distance), maps in fitted.maps.items()
    }
    metadata = {"format": FORMAT, "kind": _KIND, "model": key, "num_tokens": str(fitted.num_tokens)}
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_bytes(save(tensors, metadata))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load_fitted_gates(path: Path, key: str) -> FittedGates:
    """The maps in the file. FittedGatesError if it is missing, torn, of another model or of another format."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise FittedGatesError(f"There is no file of fitted gates {path}.") from None
    except (OSError, SafetensorError, ValueError) as error:
        raise FittedGatesError(f"The file of fitted gates {path} is torn or is none: {error}; remove it.") from error
    if metadata.get("kind") != _KIND or metadata.get("format") != FORMAT:
        raise FittedGatesError(f"The file {path} holds no fitted gates of format {FORMAT}; remove it.")
    if metadata.get("model") != key:
        raise FittedGatesError(f"The gates of {path} were fitted for another model; remove it or name another.")
    try:
        maps = {_tap_and_distance(name): tensor for name, tensor in tensors.items()}
        return FittedGates(maps, int(metadata["num_tokens"]))
    except (KeyError, ValueError) as error:
        raise FittedGatesError(f"The file of fitted gates {path} does not fit together: {error}; remove it.") from error


def _tap_and_distance(name: str) -> tuple[Tap, int]:
    tap, distance = name.split(".")
    return Tap(tap), int(distance)
