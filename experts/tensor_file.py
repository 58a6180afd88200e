"""Named arrays on disk: one safetensors file of a known kind, replaced in one move and checked when read. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

Tensors = dict[str, NDArray[np.generic]]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TensorFileKind:
    """What files of one kind have in common.

    noun: what operators call such a file. marks: metadata that says what a file is, the same in all of the kind.
    error: what is raised, with one sentence for the operator. advice: the end of that sentence.
    """

    noun: str
    marks: Mapping[str, str]
    error: type[Exception]
    advice: str = ""

    def save(self, path: Path, tensors: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str]) -> None:
        """Replaces the file in one move, so that a reader never meets half of it. OSError where that fails."""
        partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
        try:
            with partial.open("wb") as file:
                file.write(save(dict(tensors), {**metadata, **self.marks}))
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    def load(self, path: Path, restore: Callable[[Tensors, dict[str, str]], T], model: str | None = None) -> T:
        """What `restore` makes of the file's tensors and metadata.

        model: the "model" that the metadata has to name, None for any. Raises `error` for a file that is missing, torn,
        of another kind or model, or of which `restore` raises KeyError, TypeError or ValueError.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise self.error(f"There is no {self.noun} {path}.") from None
        except (OSError, SafetensorError, ValueError) as error:
            raise self._refusal(f"The {self.noun} {path} is torn or is none: {error}") from error
        if any(metadata.get(name) != value for name, value in self.marks.items()):
            marks = ", ".join(f"{name} {value}" for name, value in self.marks.items())
            raise self._refusal(f"The file {path} is no {self.noun} that this version reads ({marks})")
        if model is not None and metadata.get("model") != model:
            raise self.error(f"The {self.noun} {path} belongs to another model; remove it or name another.")
        try:
            return restore(tensors, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise self._refusal(f"The {self.noun} {path} does not fit together: {error}") from error

    def _refusal(self, reason: str) -> Exception:
        return self.error(f"{reason}{self.advice}.")
