"""Linear maps from the state at one layer to what the gate of a later one will say, learnt from text; and their file.

Pure. A map is as wide as the gate it stands for, so that a fitted preview costs what a plain one does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import Tap
from experts.tensor_file import TensorFileKind, Tensors


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


_KIND = TensorFileKind("file of fitted gates", {"kind": "fitted gates", "format": "1"}, FittedGatesError, "; remove it")


def save_fitted_gates(path: Path, fitted: FittedGates, key: str) -> None:
    """Replaces the file in one move. key: `experts.routing.statistics_file.model_key` of the model."""
    tensors: Tensors = {
        f"{tap.value}.{distance}": np.ascontiguousarray(maps, np.float16)
        for (tap, distance), maps in fitted.maps.items()
    }
    _KIND.save(path, tensors, {"model": key, "num_tokens": str(fitted.num_tokens)})


def load_fitted_gates(path: Path, key: str) -> FittedGates:
    """The maps in the file. FittedGatesError if it is missing, torn, of another model or of another format."""
    return _KIND.load(path, _restore, key)


def _restore(tensors: Tensors, metadata: dict[str, str]) -> FittedGates:
    maps = {_tap_and_distance(name): tensor for name, tensor in tensors.items()}
    return FittedGates(maps, int(metadata["num_tokens"]))  # type: ignore[arg-type]


def _tap_and_distance(name: str) -> tuple[Tap, int]:
    tap, distance = name.split(".")
    return Tap(tap), int(distance)
