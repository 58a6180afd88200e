"""Recorded routing: traces, the recorder of a running service, and the files of traces and statistics. Torch-free."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from experts.routing.choices import RoutingShape, RoutingStatistics, StatisticsSpec

Tensors = dict[str, NDArray[np.generic]]
T = TypeVar("T")

# In place of a token id that a trace leaves out.
UNKNOWN_TOKEN = -1

_COLUMNS = {"ids": np.uint16, "requests": np.int32, "token_ids": np.int32}


class Tap(Enum):
    """The place of the state from which a later layer's gate is computed ahead of time.

    EARLY: the input of this layer's gate; the experts of this layer and the attention of the next are still to come.
    SHARED: the residual after this layer's attention and its shared expert, if it has one; the chosen experts are still
    to come. Nearer to the truth by the shared expert, and later by the time that it takes.
    """

    EARLY = "early"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class RoutingTrace:
    """The routing of every token, in the order in which tokens were computed.

    ids: [L, T, k] uint16, distinct experts of a token, the gate's first choice first. requests: [T] int32.
    token_ids: [T] int32.
    """

    num_experts: int
    ids: NDArray[np.uint16]
    requests: NDArray[np.int32]
    token_ids: NDArray[np.int32]

    def __post_init__(self) -> None:
        num_tokens = self.ids.shape[1] if self.ids.ndim == 3 else -1
        for name in ("requests", "token_ids"):
            if getattr(self, name).shape != (num_tokens,):
                raise ValueError(f"ids are {list(self.ids.shape)}, {name} {list(getattr(self, name).shape)}")


class TraceRecorder:
    """Records a trace while a model serves: the first `max_tokens` tokens, with their ids if `with_token_ids`.

    The model's last layer computes only sampled rows, so a trace ends with the layer before it.
    """

    def __init__(self, shape: RoutingShape, max_tokens: int, *, with_token_ids: bool) -> None:
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._shape = shape
        self._with_token_ids = with_token_ids
        self._ids: list[NDArray[np.uint16]] = []
        self._token_ids: list[NDArray[np.int32]] = []
        self._requests: list[NDArray[np.int32]] = []
        self._number_of: dict[str, int] = {}

    @property
    def is_full(self) -> bool:
        return self.num_tokens == self.max_tokens

    def add(self, ids: NDArray[np.int16], token_ids: Sequence[int], rows: Sequence[tuple[str, int]]) -> None:
        """Add one rank's step: ids [L, T, k], token_ids [T], and the requests with their numbers of rows, in order."""
        room = self.max_tokens - self.num_tokens
        if not room:
            return
        num_layers = self._shape.num_layers - self._shape.last_is_sparse
        self._ids.append(ids[:num_layers, :room].astype(np.uint16))
        known = np.asarray(token_ids, np.int32) if self._with_token_ids else np.full(len(token_ids), UNKNOWN_TOKEN)
        self._token_ids.append(known[:room].astype(np.int32))
        numbers = [self._number_of.setdefault(request, len(self._number_of)) for request, _ in rows]
        self._requests.append(np.repeat(np.asarray(numbers, np.int32), [count for _, count in rows])[:room])
        self.num_tokens += len(self._requests[-1])

    def trace(self) -> RoutingTrace | None:
        """Return the recorded tokens, in the order in which they were computed; None if there are none."""
        if not self.num_tokens or not self._ids[0].shape[0]:
            return None
        return RoutingTrace(
            self._shape.num_experts,
            np.concatenate(self._ids, axis=1),
            np.concatenate(self._requests),
            np.concatenate(self._token_ids),
        )


@dataclass(frozen=True, slots=True)
class TensorFileKind:
    """Safetensors files of one kind, replaced in one move and checked when read.

    noun: what operators call such a file. marks: metadata that identifies the kind. error: raised with one sentence for
    the operator. advice: the end of that sentence. torn: raised for a file that is damaged, `error` unless given.
    """

    noun: str
    marks: Mapping[str, str]
    error: type[Exception]
    advice: str = ""
    torn: type[Exception] | None = None

    def save(self, path: Path, tensors: Mapping[str, NDArray[np.generic]], metadata: Mapping[str, str]) -> None:
        """Replace the file in one move, so that a reader never sees half of it. Raise OSError."""
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
        """Return what `restore` makes of the file's tensors and metadata.

        model: the "model" that the metadata has to name, None for any. Raise `error` if the file is missing, torn, of
        another kind or model, or if `restore` raises KeyError, TypeError or ValueError.
        """
        try:
            with safe_open(path, framework="numpy") as file:
                metadata: dict[str, str] = file.metadata() or {}
                tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            raise self.error(f"There is no {self.noun} {path}.") from None
        except OSError as error:
            raise self._refusal(f"The {self.noun} {path} cannot be read: {error}") from error
        except (SafetensorError, ValueError) as error:
            raise self._damage(f"The {self.noun} {path} is torn or is none: {error}") from error
        if any(metadata.get(name) != value for name, value in self.marks.items()):
            marks = ", ".join(f"{name} {value}" for name, value in self.marks.items())
            raise self._refusal(f"The file {path} is no {self.noun} that this version reads ({marks})")
        if model is not None and metadata.get("model") != model:
            raise self.error(f"The {self.noun} {path} belongs to another model; remove it or name another.")
        try:
            return restore(tensors, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise self._damage(f"The {self.noun} {path} does not fit together: {error}") from error

    def _damage(self, reason: str) -> Exception:
        return (self.torn or self.error)(f"{reason}{self.advice}.")

    def _refusal(self, reason: str) -> Exception:
        return self.error(f"{reason}{self.advice}.")


class TraceError(Exception):
    """A trace file that cannot be read; the message is one sentence for the operator."""


_TRACE_FILE = TensorFileKind("trace file", {"kind": "routing trace", "format": "2"}, TraceError)


def save_trace(path: Path, trace: RoutingTrace, model: str = "") -> None:
    """Replace the file in one move. model: `model_key` of the model, if it is known."""
    tensors: Tensors = {name: np.ascontiguousarray(getattr(trace, name), dtype) for name, dtype in _COLUMNS.items()}
    _TRACE_FILE.save(path, tensors, {"model": model, "num_experts": str(trace.num_experts)})


def load_trace(path: Path) -> RoutingTrace:
    """Return the trace in a file. TraceError if it is missing, torn, something else or of another format."""
    return _TRACE_FILE.load(path, _restored_trace)


def _restored_trace(tensors: Tensors, metadata: dict[str, str]) -> RoutingTrace:
    columns = {name: tensors[name] for name in _COLUMNS}
    if any(columns[name].dtype != dtype for name, dtype in _COLUMNS.items()):
        raise ValueError("a column has another type")
    trace = RoutingTrace(int(metadata["num_experts"]), **columns)  # type: ignore[arg-type]
    _check(trace)
    return trace


def _check(trace: RoutingTrace) -> None:
    if not trace.ids.size:
        raise ValueError("it is empty")
    if int(trace.ids.max()) >= trace.num_experts:
        raise ValueError(f"it names an expert outside 0 … {trace.num_experts - 1}")
    ordered = np.sort(trace.ids, axis=2)
    if (ordered[..., 1:] == ordered[..., :-1]).any():
        raise ValueError("a token chooses an expert twice")


class StatisticsError(Exception):
    """A statistics file that cannot be used; the message is one sentence for the operator."""


class TornStatisticsError(StatisticsError):
    """A statistics file that is damaged, or none."""


def model_key(config: Mapping[str, object]) -> str:
    """Return a hash of the model's configuration (JSON values), independent of the order of its fields."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


_STATISTICS_FILE = TensorFileKind(
    "statistics file", {"format": "2"}, StatisticsError, "; remove it", TornStatisticsError
)


def save_statistics(path: Path, statistics: RoutingStatistics, key: str) -> None:
    """Replace the file in one move. key: `model_key`, which ties the file to its model."""
    tables = statistics.tables()
    metadata = {"model": key, "spec": json.dumps(asdict(statistics.spec)), "checksum": _checksum(tables)}
    _STATISTICS_FILE.save(path, tables, metadata)


def load_statistics(path: Path, key: str) -> RoutingStatistics:
    """Return the statistics in the file. StatisticsError if it is missing, torn (TornStatisticsError), of another model
    or format."""
    return _STATISTICS_FILE.load(path, _restored_statistics, key)


def _restored_statistics(tables: Tensors, metadata: dict[str, str]) -> RoutingStatistics:
    if metadata.get("checksum") != _checksum(tables):
        raise ValueError("its checksum differs")
    return RoutingStatistics.restore(StatisticsSpec(**json.loads(metadata["spec"])), tables)


def _checksum(tables: Tensors) -> str:
    value = 0
    for name in sorted(tables):
        value = zlib.crc32(np.ascontiguousarray(tables[name]).tobytes(), zlib.crc32(name.encode(), value))
    return f"{value:08x}"
