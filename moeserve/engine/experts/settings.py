"""The settings of the experts: check them, read the statistics and choose the placement that they ask for."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from experts.placement.placement import Placement, PlacementError, contiguous
from experts.placement.search import LEARNT, choose_placement
from experts.routing.choices import RoutingStatistics
from experts.routing.files import StatisticsError, TornStatisticsError, load_statistics, model_key
from moeserve.config import ConfigError, ServeConfig
from moeserve.model.spec import ModelSpec


def check_experts(config: ServeConfig) -> None:
    """Raise ConfigError, one sentence, for settings of the experts that contradict each other."""
    if config.expert_statistics is None:
        for setting, values in (("placement", LEARNT), ("expert_policy", ("static",))):
            if (value := getattr(config, setting)) in values:
                flag = "--" + setting.replace("_", "-")
                raise ConfigError(f"{flag} {value} needs --expert-statistics with a file to learn from.")
    if config.expert_policy == "affinity" and config.expert_prefetch != "affinity":
        raise ConfigError("--expert-policy affinity goes by what prefetching learns: use --expert-prefetch affinity.")


def plan_placement(directory: Path, spec: ModelSpec, config: ServeConfig) -> Placement:
    """Choose the placement on rank 0, before any rank loads. Raise ConfigError, one sentence, if there is none."""
    num_ranks = config.expert_parallel_size * config.tensor_parallel_size
    _check_has_experts(spec, config)
    assert spec.moe is not None
    try:
        return choose_placement(
            config.placement,
            (len(spec.moe_layers), spec.moe.num_experts, num_ranks),
            num_redundant=config.num_redundant_experts,
            # Ranks of a stage are on one node.
            num_nodes=config.nnodes if config.pipeline_parallel_size == 1 else 1,
            num_groups=spec.moe.gate.num_groups,
            statistics=read_statistics(directory, config),
        )
    except PlacementError as error:
        raise ConfigError(str(error)) from None


def equal_placement(spec: ModelSpec, config: ServeConfig) -> Placement | None:
    """Return a placement of the experts in their order, which takes what any takes; None for ranks that share none.

    Raise ConfigError if they cannot be shared equally.
    """
    num_ranks = config.expert_parallel_size * config.tensor_parallel_size
    if config.expert_parallel_size > 1:
        _check_has_experts(spec, config)
    if num_ranks == 1 or spec.moe is None:
        return None
    try:
        return contiguous(len(spec.moe_layers), spec.moe.num_experts, num_ranks)
    except PlacementError as error:
        raise ConfigError(str(error)) from None


def _check_has_experts(spec: ModelSpec, config: ServeConfig) -> None:
    if spec.moe is None:
        raise ConfigError(
            f"--expert-parallel-size {config.expert_parallel_size}: a {spec.model_type} model has no experts to share "
            "that moeserve computes itself."
        )


def read_statistics(directory: Path, config: ServeConfig) -> RoutingStatistics | None:
    """Read the statistics of earlier runs of this model; None if no file is named or it does not exist yet.

    A torn file is set aside, and None returned. A learnt placement needs the file. Raise ConfigError, one sentence, if
    it is missing or cannot be used.
    """
    if config.placement in LEARNT:
        return _needed_statistics(directory, config)
    if config.expert_statistics is None:
        return None
    path = Path(config.expert_statistics)
    try:
        return load_statistics(path, statistics_key(directory)) if path.exists() else None
    except TornStatisticsError as error:
        if goes_by_statistics(config):
            raise ConfigError(str(error)) from None
        _set_aside(path, error)
        return None
    except StatisticsError as error:
        raise ConfigError(str(error)) from None


def _set_aside(path: Path, error: TornStatisticsError) -> None:
    """Rename a torn file, so that a start without it does not overwrite it; another rank may have done so already."""
    broken = path.with_name(f"{path.name}.broken")
    with suppress(FileNotFoundError):
        path.replace(broken)
        import structlog  # Imported late: a machine that only computes lacks it.

        log = structlog.get_logger(__name__)
        log.warning("statistics_file_torn", file=str(path), kept_as=str(broken), error=str(error)[:300])


def goes_by_statistics(config: ServeConfig) -> bool:
    """Return whether a setting uses the statistics of earlier runs."""
    return config.placement in LEARNT or config.num_redundant_experts > 0 or config.expert_policy == "static"


def _needed_statistics(directory: Path, config: ServeConfig) -> RoutingStatistics:
    """Read the statistics of earlier runs of this model. Raise ConfigError for a file that cannot be used."""
    assert config.expert_statistics is not None  # check_experts
    try:
        return load_statistics(Path(config.expert_statistics), statistics_key(directory))
    except StatisticsError as error:
        raise ConfigError(str(error)) from None


def measured_load(directory: Path, config: ServeConfig, shape: tuple[int, int]) -> list[list[float]] | None:
    """Return the load [L, E] of earlier runs for the policy `static`, else None. shape: (L, E). Raise ConfigError."""
    if config.expert_policy != "static":
        return None
    load = _needed_statistics(directory, config).load()
    if load.shape != shape:
        raise ConfigError(
            f"The statistics file {config.expert_statistics} is of another shape than the model; "
            "remove it or name another."
        )
    found: list[list[float]] = load.tolist()
    return found


def statistics_key(directory: Path) -> str:
    """Return the key of the model in a statistics file: a hash of its config.json."""
    return model_key(json.loads((directory / "config.json").read_bytes()))
