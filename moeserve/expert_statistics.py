"""What is gathered of the experts while serving: how it begins, what it is kept in, where it is saved."""

from __future__ import annotations

from pathlib import Path

import structlog

from experts.recorder import RoutingRecorder
from experts.statistics import RoutingStatistics, StatisticsSpec
from experts.statistics_file import StatisticsError, load_statistics, save_statistics
from experts.step_routing import RoutingShape
from moeserve.config import ConfigError, ServeConfig
from moeserve.expert_placement import statistics_key
from moeserve.models.spec import DecoderSpec

log = structlog.get_logger(__name__)


class ExpertRecording:
    """The recorder of a service and the file it is saved to, if there is one."""

    def __init__(self, shape: RoutingShape, recorder: RoutingRecorder, path: Path | None, key: str) -> None:
        self.shape = shape
        self.recorder = recorder
        self.path = path
        self.key = key

    def save(self) -> None:
        """Writes the statistics to the file; does nothing without one. Raises OSError."""
        if self.path is not None:
            save_statistics(self.path, self.recorder.statistics(), self.key)
            log.info("expert_statistics_saved", file=str(self.path), tokens=self.recorder.num_tokens)


def open_recording(config: ServeConfig, model_dir: Path, spec: DecoderSpec) -> ExpertRecording | None:
    """Begins with what the file of `--expert-statistics` holds. None for a model without experts, or if switched off.

    Raises ConfigError for a file that cannot serve.
    """
    shape = routing_shape(spec)
    path = None if config.expert_statistics is None else Path(config.expert_statistics)
    if shape is None:
        if path is not None:
            raise ConfigError("--expert-statistics: this model has no experts.")
        return None
    if not config.record_experts:
        return None
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--expert-statistics {path}: there is no folder {path.parent}.")
    known = None if path is None or not path.exists() else _read(path, model_dir, shape)
    return ExpertRecording(shape, RoutingRecorder(known or _empty(shape)), path, statistics_key(model_dir))


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
