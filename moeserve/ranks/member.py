"""A rank of several at work: its collectives, its experts and its model, on a CPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import structlog

from experts.collectives import Collectives
from experts.dispatch import ExpertParallel
from experts.observer import AnyObserver
from experts.prefetcher import PrefixListener
from experts.residency import ExpertMemoryStats
from kernels.moe import moe_experts_partial
from moeserve.config import ServeConfig
from moeserve.device import step_budget
from moeserve.experts.memory import CpuResidentModel, local_of, open_experts
from moeserve.experts.migrator import make_migrator
from moeserve.experts.observe import SentCounter
from moeserve.model_loading import LoadedModel, ModelPlan, Report, load_model, owned_experts
from moeserve.rank import Rank
from moeserve.ranks.meeting import Meeting
from moeserve.ranks.messages import StepRows
from moeserve.startup import routing_tap, signature_tap, start_observing
from moeserve.wire import RunContext

log = structlog.get_logger(__name__)


class CpuMember:
    """A rank whose model runs on a CPU; see `moeserve.ranks.members.RankMember`."""

    prefetcher: PrefixListener | None = None

    def __init__(self, context: RunContext, meeting: Meeting, rank: int, plan: ModelPlan, report: Report) -> None:
        config, directory = context.config, Path(context.model_dir)
        num_ranks = config.expert_parallel_size
        assert plan.spec.moe is not None
        assert plan.placement is not None
        self._config = config
        self.dispatch_shape: str | None = None
        self._moe = plan.spec.moe
        self.collectives = Collectives(
            rank, num_ranks, meeting.collectives, collective_timeout(config), interface=meeting.interface
        )
        resident: CpuResidentModel | None = None
        observers: list[AnyObserver] = []
        if plan.residency is not None:
            resident = open_experts(directory, plan.spec, plan.residency, config, report, observers)
        self.experts = ExpertParallel(
            self.collectives,
            plan.placement,
            plan.spec.moe_layers,
            last_layer=plan.spec.num_layers - 1,
            compute=moe_experts_partial,
            local_of=None if resident is None else partial(local_of, resident),
        )
        tap = routing_tap(plan.spec, config) or signature_tap(plan, config)
        owned = owned_experts(plan.spec, plan.placement, rank)
        self.model: LoadedModel = load_model(
            directory,
            config,
            report,
            plan=plan,
            owned=owned,
            dispatch_of=self.experts.dispatch_of,
            tap=tap,
            experts=resident,
            observers=observers,
        )
        self._directory, self._tap = directory, tap
        self.runner = Rank(self.model.runner, self.model.observers)
        self.migrator = make_migrator(directory, self.model, self.experts, owned)

    def warm_up(self) -> None:
        """Takes the shape of dispatch that the settings name, or else the one that is faster here; then warms up."""
        shape = self._config.dispatch
        if shape == "auto":
            spec, dtype = self.model.spec, self.model.dtype
            # Experts that are not all in memory would be loaded for it.
            here = () if self.model.experts is not None else self.model.packed_experts
            seconds = self.experts.measure(spec.hidden_size, self._moe.gate.top_k, dtype, here, self._moe.activation)
            shape = min(seconds, key=seconds.__getitem__)
            if self.collectives.rank == 0:
                log.info("dispatch_measured", took=shape, **{name: f"{1000 * s:.2f} ms" for name, s in seconds.items()})
        self.experts.use(shape)
        self.dispatch_shape = shape
        num_ranks = self._config.expert_parallel_size
        self.model.runner.warm_up(
            step_budget(self._config),
            lambda count: self.experts.begin_step([count] * num_ranks, [1] * num_ranks),
        )
        self.experts.forget_counts()
        if self.model.experts is not None:
            self.model.experts.memory.forget_counts()
        records = self._config.record_experts
        self.prefetcher = start_observing(
            self._directory, self.model, self._tap, self._config, records=records, share=self.experts
        )
        self.model.observers.append(SentCounter(self.experts.sent))

    def begin_step(self, rows: StepRows) -> None:
        self.experts.begin_step(rows.num_rows, rows.num_logit_rows)

    def memory_stats(self) -> ExpertMemoryStats | None:
        return None if self.model.experts is None else self.model.experts.memory.stats()

    def close(self) -> None:
        if self.model.experts is not None:
            self.model.experts.memory.close()
        self.collectives.close()


def collective_timeout(config: ServeConfig) -> float:
    """Seconds that ranks wait for each other: less than the supervisor waits for rank 0, which then names the late."""
    return 0.4 * config.engine_timeout
