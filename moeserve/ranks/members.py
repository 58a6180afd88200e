"""What every rank of several has, whatever it computes on, and how it is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from experts.collectives import Collectives
from experts.dispatch import ExpertParallel
from experts.placement import Placement
from experts.residency import ExpertMemoryStats
from moeserve.config import ServeConfig
from moeserve.device import KvBudget, choose_device, cuda_absence, current_gpu
from moeserve.experts.monitor import Prefetching
from moeserve.experts.rebalancing import Migrator
from moeserve.experts.settings import plan_placement
from moeserve.model_loading import ModelPlan, Report, ServedModel, plan_model, read_spec
from moeserve.ranks.meeting import Meeting
from moeserve.ranks.member import CpuMember, collective_timeout
from moeserve.ranks.messages import StepRows
from moeserve.steps import Runner
from moeserve.wire import RunContext


class RankMember(Protocol):
    """A rank at work. `runner` and `model` are there after `warm_up`.

    migrator: brings experts that are placed anew. prefetcher: loads experts ahead, if any.
    dispatch_shape: in use, None before it is known.
    """

    dispatch_shape: str | None

    @property
    def runner(self) -> Runner: ...

    @property
    def collectives(self) -> Collectives: ...

    @property
    def experts(self) -> ExpertParallel[Any]: ...

    @property
    def model(self) -> ServedModel: ...

    @property
    def migrator(self) -> Migrator: ...

    @property
    def prefetcher(self) -> Prefetching | None: ...

    def warm_up(self) -> None:
        """What all ranks do together before the first step."""

    def begin_step(self, rows: StepRows) -> None:
        """Tells of the step that `runner` is asked for next, by all ranks."""

    def memory_stats(self) -> ExpertMemoryStats | None: ...

    def close(self) -> None: ...


def plan_ranks(directory: Path, config: ServeConfig) -> ModelPlan:
    """What rank 0 plans for all. On GPUs the memory for KV is known when all have loaded: there `kv` is nothing yet."""
    if choose_device(config, cuda_absence) == "cpu":
        return plan_model(directory, config)
    return plan_gpu_rank(directory, config, None)


def plan_gpu_rank(directory: Path, config: ServeConfig, placement: Placement | None) -> ModelPlan:
    """placement: None to decide it."""
    from moeserve.gpu_service import gpu_dtype

    spec, _ = read_spec(directory, config)
    placement = placement or plan_placement(directory, spec, config)
    return ModelPlan(spec, gpu_dtype(config), KvBudget(0, 0), 0, placement)


def make_member(context: RunContext, meeting: Meeting, rank: int, plan: ModelPlan, report: Report) -> RankMember:
    """Loads a rank's part of the model. Raises ModelError, ConfigError or CollectiveError."""
    if choose_device(context.config, cuda_absence) == "cpu":
        return CpuMember(context, meeting, rank, plan, report)
    return _make_gpu_member(context, meeting, rank, plan, report)


def _make_gpu_member(context: RunContext, meeting: Meeting, rank: int, plan: ModelPlan, report: Report) -> RankMember:
    from moeserve.gpu_service import expert_settings, gpu_settings, loading_progress
    from moeserve.ranks.gpu_member import GpuMember

    config, directory = context.config, Path(context.model_dir)
    # Ranks meet in their collectives before they load: all see the memory that was free before anybody has taken some.
    settings = gpu_settings(config, expert_settings(directory, plan.spec, config))
    timeout = collective_timeout(config)
    collectives = Collectives(
        rank,
        config.expert_parallel_size,
        meeting.collectives,
        timeout,
        interface=meeting.interface,
        device=current_gpu(),
    )
    return GpuMember(
        directory,
        plan,
        settings,
        collectives,
        shape=config.dispatch,
        timeout=timeout,
        progress=loading_progress(report),
    )
