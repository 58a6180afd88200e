"""From a run context to one rank of several: who meets whom, what is agreed, and then steps until the end."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import structlog
import zmq

from experts.collectives import Collectives
from experts.dispatch import ExpertParallel
from experts.errors import CollectiveError
from experts.placement import Placement
from moeserve.config import ServeConfig
from moeserve.expert_statistics import open_recording
from moeserve.kv_budget import KvBudget
from moeserve.plan_codec import decode_plan
from moeserve.rank_hub import RankHub
from moeserve.rank_link import BeatThread, RankLink
from moeserve.rank_messages import Forward, Joined, Loaded, RankError, RankResult, Setup, Start
from moeserve.ranked_executor import RankedExecutor
from moeserve.result_codec import encode_result
from moeserve.run_context import RunContext
from moeserve.startup import (
    LoadedModel,
    ModelPlan,
    Report,
    load_model,
    owned_experts,
    plan_model,
    read_spec,
    routing_tap,
    serve,
    step_budget,
    tapped,
)

log = structlog.get_logger(__name__)


def run_rank(context: RunContext, rank: int, report: Report, stop: threading.Event) -> None:
    """Serves as rank 0, with the engine, until `stop` is set; as another rank until rank 0 says so or is gone.

    Raises ModelError, ConfigError or RankError, one sentence each, for what cannot be served.
    """
    with zmq.Context() as sockets:
        if rank == 0:
            _run_first(context, sockets, report, stop)
        else:
            _run_other(context, sockets, rank)


def _run_first(
    context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], report: Report, stop: threading.Event
) -> None:
    directory = Path(context.model_dir)
    plan = plan_model(directory, context.config)
    assert plan.placement is not None
    recording = open_recording(context.config, directory, plan.spec)
    hub = RankHub(sockets, context)
    try:
        if not hub.gather(Joined, stop):
            return
        for rank in hub.others:
            hub.send(rank, Setup(os.getpid(), plan.kv.num_blocks, plan.kv.max_model_len, plan.placement.ranks))
        member = _Member(context, 0, plan, report)
        if not hub.gather(Loaded, stop):
            return
        for rank in hub.others:
            hub.send(rank, Start())
        member.warm_up()
        executor = RankedExecutor(
            member.runner,
            member.experts,
            hub,
            timeout=_collective_timeout(context.config),
            num_entered=lambda: member.collectives.num_entered,
        )
        serve(context, member.model, executor, report, stop, recording, lambda: member.experts.placement)
        executor.close()
        member.collectives.close()
    except CollectiveError as error:
        hub.check_for(0.5)
        raise RankError(f"The ranks cannot reach each other: {error}.") from error
    finally:
        hub.close()


def _run_other(context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], rank: int) -> None:
    link = RankLink(sockets, context, rank)
    try:
        link.send(Joined(rank, os.getpid()))
        setup = link.receive()
        if not isinstance(setup, Setup):
            return
        # From here on rank 0 says when to leave: it finishes its step first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        link.watch(setup.pid)
        spec, dtype = read_spec(Path(context.model_dir), context.config)
        placement = Placement(context.config.expert_parallel_size, setup.placement)
        plan = ModelPlan(spec, dtype, KvBudget(setup.num_blocks, setup.max_model_len), 0, placement)
        member = _Member(context, rank, plan, lambda _: None)
        link.send(Loaded(rank))
        if isinstance(link.receive(), Start):
            member.warm_up()
            _run_steps(context, sockets, rank, link, member)
        member.collectives.close()
    except CollectiveError as error:
        raise RankError(f"Rank {rank} cannot reach the others: {error}.") from error
    finally:
        link.close()


def _run_steps(
    context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], rank: int, link: RankLink, member: _Member
) -> None:
    beats = BeatThread(sockets, context, rank, lambda: member.collectives.num_entered)
    beats.start()
    try:
        while isinstance(step := link.receive(), Forward):
            beats.busy.set()
            member.experts.begin_step(step.num_rows, step.num_logit_rows)
            result = member.runner.run(decode_plan(step.plan))
            beats.busy.clear()
            link.send(RankResult(rank, encode_result(result)))
    except CollectiveError:
        # Rank 0 finds out whose fault it is and ends, which ends the wait here. The beats say that it is not ours.
        link.receive()
    finally:
        beats.stop()


class _Member:
    """What every rank has: its collectives, its experts and its model."""

    def __init__(self, context: RunContext, rank: int, plan: ModelPlan, report: Report) -> None:
        config = context.config
        num_ranks = config.expert_parallel_size
        assert plan.spec.moe is not None
        assert plan.placement is not None
        self._config = config
        self._moe = plan.spec.moe
        self.collectives = Collectives(rank, num_ranks, context.rendezvous, _collective_timeout(config))
        self.experts = ExpertParallel(
            self.collectives, plan.placement, plan.spec.moe_layers, last_layer=plan.spec.num_layers - 1
        )
        tap = routing_tap(plan.spec, config)
        self.model: LoadedModel = load_model(
            Path(context.model_dir),
            config,
            report,
            plan=plan,
            owned=owned_experts(plan.spec, plan.placement, rank),
            dispatch_of=self.experts.dispatch_of,
            tap=tap,
        )
        self.runner = tapped(self.model.runner, tap)

    def warm_up(self) -> None:
        """Takes the shape of dispatch that the settings name, or else the one that is faster here; then warms up."""
        shape = self._config.dispatch
        if shape == "auto":
            spec, dtype = self.model.spec, self.model.dtype
            seconds = self.experts.measure(spec.hidden_size, self._moe.gate.top_k, dtype)
            shape = min(seconds, key=seconds.__getitem__)
            if self.collectives.rank == 0:
                log.info("dispatch_measured", took=shape, **{name: f"{1000 * s:.2f} ms" for name, s in seconds.items()})
        self.experts.use(shape)
        num_ranks = self._config.expert_parallel_size
        self.model.runner.warm_up(
            step_budget(self._config),
            lambda count: self.experts.begin_step([count] * num_ranks, [1] * num_ranks),
        )
        self.experts.forget_counts()


def _collective_timeout(config: ServeConfig) -> float:
    """Seconds that ranks wait for each other: less than the supervisor waits for rank 0, which then names the late."""
    return 0.4 * config.engine_timeout
