"""Routing traces on disk: one safetensors file each. Pure."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import Tap
from experts.routing.traces import GateGuesses, RoutingTrace
from experts.tensor_file import TensorFileKind, Tensors

_COLUMNS = {"ids": np.uint16, "requests": np.int32, "token_ids": np.int32, "families": np.int32}


class TraceError(Exception):
    """A trace file that cannot be read; the message is one sentence for the operator."""


_KIND = TensorFileKind("trace file", {"kind": "routing trace", "format": "1"}, TraceError)


def save_trace(path: Path, trace: RoutingTrace, model: str = "") -> None:
    """Replaces the file in one move. model: `statistics_file.model_key` of the model, if it is known."""
    tensors: Tensors = {name: np.ascontiguousarray(getattr(trace, name), dtype) for name, dtype in _COLUMNS.items()}
    for guesses in trace.guesses:
        tensors[f"gate.{guesses.tap.value}.{guesses.distance}"] = np.ascontiguousarray(guesses.logits, np.float16)
    _KIND.save(path, tensors, {"model": model, "num_experts": str(trace.num_experts)})


def load_trace(path: Path) -> RoutingTrace:
    """The trace in a file. TraceError if it is missing, torn, something else or of another format."""
    return _KIND.load(path, _restore)


def _restore(tensors: Tensors, metadata: dict[str, str]) -> RoutingTrace:
    columns = {name: tensors.pop(name) for name in _COLUMNS}
    if any(columns[name].dtype != dtype for name, dtype in _COLUMNS.items()):
        raise ValueError("a column has another type")
    guesses = tuple(_guesses(name, tensor) for name, tensor in sorted(tensors.items()))
    trace = RoutingTrace(int(metadata["num_experts"]), **columns, guesses=guesses)  # type: ignore[arg-type]
    _check(trace)
    return trace


def _guesses(name: str, tensor: NDArray[np.generic]) -> GateGuesses:
    kind, tap, distance = name.split(".")
    if kind != "gate" or tensor.dtype.kind != "f":
        raise ValueError(f"{name} is unknown")
    return GateGuesses(Tap(tap), int(distance), tensor)  # type: ignore[arg-type]


def _check(trace: RoutingTrace) -> None:
    if not trace.ids.size:
        raise ValueError("it is empty")
    if int(trace.ids.max()) >= trace.num_experts:
        raise ValueError(f"it names an expert outside 0 … {trace.num_experts - 1}")
    ordered = np.sort(trace.ids, axis=2)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("a token chooses an expert twice")
