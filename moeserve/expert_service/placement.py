"""The placement that the settings ask for, decided by rank 0 before anybody loads."""

from __future__ import annotations

import json
from pathlib import Path

from experts.placement.choice import LEARNT, choose_placement
from experts.placement.placement import Placement, PlacementError
from experts.routing.statistics import RoutingStatistics
from experts.routing.statistics_file import StatisticsError, load_statistics, model_key
from moeserve.config import ConfigError, ServeConfig
from moeserve.models.spec import DecoderSpec


def plan_placement(directory: Path, spec: DecoderSpec, config: ServeConfig) -> Placement:
    """Which ranks hold which experts. Raises ConfigError, one sentence, if the settings cannot be met."""
    num_ranks = config.expert_parallel_size
    if spec.moe is None:
        raise ConfigError(f"--expert-parallel-size {num_ranks}: a {spec.model_type} model has no experts to share.")
    try:
        return choose_placement(
            config.placement,
            (len(spec.moe_layers), spec.moe.num_experts, num_ranks),
            num_redundant=config.num_redundant_experts,
            num_nodes=config.nnodes,
            num_groups=spec.moe.gate.num_groups,
            statistics=read_statistics(directory, config),
        )
    except PlacementError as error:
        raise ConfigError(str(error)) from None


def read_statistics(directory: Path, config: ServeConfig) -> RoutingStatistics | None:
    """What earlier runs of this model have seen, None where no file is named or none is there yet.

    A placement that is learnt needs the file. Raises ConfigError, one sentence, for a file that cannot serve.
    """
    if config.expert_statistics is None:
        if config.placement in LEARNT:
            raise ConfigError(f"--placement {config.placement} needs --expert-statistics with a file to learn from.")
        return None
    path = Path(config.expert_statistics)
    if config.placement not in LEARNT and not path.exists():
        return None
    try:
        return load_statistics(path, statistics_key(directory))
    except StatisticsError as error:
        raise ConfigError(str(error)) from None


def statistics_key(directory: Path) -> str:
    """Names the model in a statistics file: a hash of its config.json."""
    return model_key(json.loads((directory / "config.json").read_bytes()))
