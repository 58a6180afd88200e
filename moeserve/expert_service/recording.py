"""What is gathered of the experts while serving: how it begins, what it is kept in, where it is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from experts.placement.placement import Placement
from experts.placement.remote_ranks import RemoteRanks
from experts.routing.recorder import RoutingRecorder
from experts.routing.statistics import RoutingStatistics, StatisticsSpec
from experts.routing.statistics_file import StatisticsError, load_statistics, save_statistics
from experts.routing.step_routing import RoutingShape
from experts.routing.trace_file import save_trace
from experts.routing.trace_recorder import TraceRecorder
from moeserve.config import ConfigError, ServeConfig
from moeserve.expert_service.placement import goes_by_statistics, statistics_key
from moeserve.models.spec import DecoderSpec

MAX_TRACE_BYTES = 64 * 2**20


class RoutingListener(Protocol):
    """Is told of each rank's step: expert ids [L, T, k], NOT_COMPUTED where a layer left a row out, and token ids [T].

    `experts.routing.recorder.RoutingRecorder` is one.
    """

    def add(self, ids: NDArray[np.int16], token_ids: Sequence[int]) -> None: ...


class ExpertRecording:
    """What is gathered of a service's routing.

    path: the file the statistics are saved to, if there is one. key: `model_key` of the model. placement: where the
    experts are, asked in every step; None of one rank. trace: what a trace is recorded into, None while none is.
    listeners: who hears of every step, the recorder first, some steps late. gather: tells them of all steps so far.
    """

    def __init__(
        self,
        shape: RoutingShape,
        recorder: RoutingRecorder,
        key: str,
        path: Path | None = None,
        trace_path: Path | None = None,
    ) -> None:
        self.shape = shape
        self.recorder = recorder
        self.key = key
        self.path = path
        self.trace_path = trace_path
        self.placement: Callable[[], Placement | None] = lambda: None
        self.remote_ranks = RemoteRanks()
        self.listeners: list[RoutingListener] = [recorder]
        self.gather: Callable[[], None] = lambda: None
        self.trace: TraceRecorder | None = None
        if trace_path is not None:
            self.start_trace(with_token_ids=False)

    def add(
        self, rank: int, ids: NDArray[np.int16], token_ids: Sequence[int], placement: Placement | None = None
    ) -> None:
        """Takes the routing of a rank's rows in one step: ids [L, T, k], token_ids [T], and where experts were."""
        for listener in self.listeners:
            listener.add(ids, token_ids)
        if placement is not None:
            self.remote_ranks.add(ids, rank, placement)

    def statistics(self) -> RoutingStatistics:
        """Of all steps so far."""
        self.gather()
        return self.recorder.statistics()

    def start_trace(self, *, with_token_ids: bool, max_tokens: int | None = None) -> TraceRecorder:
        """Begins a trace; one that was being recorded is lost. It has room for MAX_TRACE_BYTES at most."""
        room = MAX_TRACE_BYTES // (2 * self.shape.num_layers * self.shape.top_k + 12)
        self.trace = TraceRecorder(self.shape, min(max_tokens or room, room), with_token_ids=with_token_ids)
        return self.trace

    def end_trace(self, path: Path) -> int:
        """Ends the trace and writes it. Returns how many tokens it has; nothing is written for 0. Raises OSError."""
        recorder, self.trace = self.trace, None
        trace = None if recorder is None else recorder.trace()
        if trace is None:
            return 0
        save_trace(path, trace, self.key)
        return len(trace.requests)

    def save(self) -> None:
        """Writes the statistics to their file; does nothing without one. Raises OSError."""
        if self.path is not None:
            save_statistics(self.path, self.statistics(), self.key)

    def close(self) -> dict[str, int]:
        """Writes what the settings want written at the end. Returns how many tokens each file has. Raises OSError."""
        written = {}
        if self.path is not None:
            self.save()
            written[str(self.path)] = self.recorder.num_tokens
        if self.trace_path is not None and self.trace is not None and (tokens := self.end_trace(self.trace_path)):
            written[str(self.trace_path)] = tokens
        return written


def open_recording(config: ServeConfig, model_dir: Path, spec: DecoderSpec) -> ExpertRecording | None:
    """Begins with what the file of `--expert-statistics` holds. None for a model without experts, or if switched off.

    Raises ConfigError for a file that cannot serve.
    """
    shape = routing_shape(spec)
    path = None if config.expert_statistics is None else Path(config.expert_statistics)
    if shape is None:
        if path is not None or config.expert_trace is not None:
            flag = "--expert-trace" if path is None else "--expert-statistics"
            raise ConfigError(f"{flag}: this model has no experts.")
        return None
    if not config.record_experts:
        if config.expert_trace is not None:
            raise ConfigError("--expert-trace needs --record-experts.")
        if path is not None and not goes_by_statistics(config):
            raise ConfigError("--expert-statistics needs --record-experts, or a setting that goes by the file.")
        return None
    trace_path = None if config.expert_trace is None else Path(config.expert_trace)
    for flag, file in (("--expert-statistics", path), ("--expert-trace", trace_path)):
        if file is not None and not file.parent.is_dir():
            raise ConfigError(f"{flag} {file}: there is no folder {file.parent}.")
    known = None if path is None or not path.exists() else _read(path, model_dir, shape)
    recorder = RoutingRecorder(known or _empty(shape))
    return ExpertRecording(shape, recorder, statistics_key(model_dir), path, trace_path)


def _read(path: Path, model_dir: Path, shape: RoutingShape) -> RoutingStatistics:
    try:
        statistics = load_statistics(path, statistics_key(model_dir))
    except StatisticsError as error:
        raise ConfigError(str(error)) from None
    spec = statistics.spec
    if (spec.num_layers, spec.num_experts, spec.top_k) != (shape.num_layers, shape.num_experts, shape.top_k):
        raise ConfigError(f"The statistics file {path} is of another shape than the model; remove it or name another.")
    return statistics


def routing_shape(spec: DecoderSpec) -> RoutingShape | None:
    """What a step's routing looks like; None for a model without experts."""
    if spec.moe is None or not spec.moe_layers:
        return None
    return RoutingShape(len(spec.moe_layers), spec.moe.num_experts, spec.moe.gate.top_k, spec.sparse_layers[-1])


def _empty(shape: RoutingShape) -> RoutingStatistics:
    return RoutingStatistics(StatisticsSpec(shape.num_layers, shape.num_experts, shape.top_k))
