"""From a run context to one rank of several: who meets whom, what is agreed, and then steps until the end."""

from __future__ import annotations

import os
import platform
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog
import torch
import zmq

from experts.errors import CollectiveError
from experts.memory.stats import ExpertMemoryStats
from experts.placement.placement import Placement
from moeserve.config import ServeConfig
from moeserve.expert_service.links import LinkCounts
from moeserve.expert_service.monitor import ExpertSources
from moeserve.expert_service.rank_memories import RankMemories
from moeserve.expert_service.rebalancing import RebalancingExecutor, follow, rebalancing
from moeserve.expert_service.recording import open_recording
from moeserve.expert_service.residency import residency_with
from moeserve.expert_service.strategy import expert_strategy
from moeserve.kv_budget import KvBudget
from moeserve.model_loading import (
    ModelPlan,
    Report,
    plan_model,
    read_spec,
)
from moeserve.plan_codec import decode_plan
from moeserve.ranks.cores import bind_to_cores
from moeserve.ranks.executor import RankedExecutor
from moeserve.ranks.hub import RankHub
from moeserve.ranks.link import BeatThread, RankLink
from moeserve.ranks.meeting import meet_as_first, meet_first
from moeserve.ranks.member import Member, collective_timeout
from moeserve.ranks.messages import (
    Dismissed,
    Forward,
    Joined,
    LayerLoaded,
    Loaded,
    RankError,
    RankResult,
    Setup,
    Shutdown,
    Start,
)
from moeserve.ranks.network import machine_id
from moeserve.result_codec import encode_result
from moeserve.run_context import RunContext
from moeserve.serving import serve
from moeserve.version import VERSION

# Of the engine's timeout: how long a rank that loads may be silent.
_LOADING_PATIENCE = 3

log = structlog.get_logger(__name__)


def run_rank(context: RunContext, rank: int, report: Report, stop: threading.Event) -> None:
    """Serves as rank 0, with the engine, until `stop` is set; as another rank until rank 0 says so or is gone.

    Raises ModelError, ConfigError or RankError, one sentence each, for what cannot be served.
    """
    _keep_to_cores(context.config, rank)
    with zmq.Context() as sockets:
        if rank == 0:
            _run_first(context, sockets, report, stop)
        else:
            _run_other(context, sockets, rank, report)


def _keep_to_cores(config: ServeConfig, rank: int) -> None:
    if config.bind_cores:
        num_here = config.expert_parallel_size // config.nnodes
        cores = bind_to_cores(rank % num_here, num_here, config.threads or torch.get_num_threads())
        log.info("rank_keeps_to_cores", rank=rank, cores=cores)


def _run_first(
    context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], report: Report, stop: threading.Event
) -> None:
    config = context.config
    directory = Path(context.model_dir)
    plan = plan_model(directory, config)
    assert plan.placement is not None
    recording = open_recording(config, directory, plan.spec)
    meeting = meet_as_first(context)
    hub = RankHub(sockets, meeting)
    try:
        if context.meets_in_store:
            meeting.announce(*hub.addresses)
        joined = hub.gather(Joined, stop)
        if joined is None:
            return
        _dismiss_strangers(hub, joined, _introduction(context, 0))
        hub.watch(machine_id())
        settings = msgspec.json.encode(replace(config, api_key=()))
        setup = Setup(
            settings,
            os.getpid(),
            plan.kv.num_blocks,
            plan.kv.max_model_len,
            plan.placement.ranks,
            *((None, ()) if plan.residency is None else (plan.residency.num_slots, plan.residency.lent)),
        )
        for rank in hub.others:
            hub.send(rank, setup)
        member = Member(context, meeting, 0, plan, report)
        loaded = hub.gather(Loaded, stop, patience=_LOADING_PATIENCE * config.engine_timeout)
        if loaded is None:
            return
        all_lent = (member.lent, *(loaded[rank].lent for rank in hub.others))
        lent = tuple(memory for memory in all_lent if memory is not None)
        for rank in hub.others:
            hub.send(rank, Start(lent))
        member.meet_peers(lent)
        member.warm_up()
        executor = RankedExecutor(
            member.runner,
            member.experts,
            hub,
            timeout=collective_timeout(config),
            num_entered=lambda: member.collectives.num_entered,
        )
        steps = rebalancing(executor, config, member.experts.placement, member.migrator, recording)
        links = LinkCounts(steps, config.expert_parallel_size)
        sources = ExpertSources(
            placement=lambda: member.experts.placement,
            placement_version=lambda: executor.placement_version,
            links=links.links,
            rebalancing=steps.stats if isinstance(steps, RebalancingExecutor) else None,
            memory=_memory_of_ranks(member, executor, config.expert_parallel_size),
            prefetches=member.model.prefetcher is not None,
            strategy=lambda: expert_strategy(config, member.model.prefetcher, member.dispatch_shape),
        )
        serve(context, member.model, links, report, stop, recording, sources)
        executor.close()
        member.close()
    except CollectiveError as error:
        hub.check_for(0.5)
        raise RankError(f"The ranks cannot reach each other: {error}.") from error
    finally:
        hub.close()


def _run_other(context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], rank: int, report: Report) -> None:
    meeting = meet_first(context)
    link = RankLink(sockets, meeting, rank)
    member: Member | None = None
    beats = BeatThread(
        sockets,
        meeting,
        rank,
        lambda: member.collectives.num_entered if member else 0,
        lambda: member.memory_stats() if member else None,
    )
    beats.start()
    try:
        link.send(_introduction(context, rank))
        setup = link.receive(beats.say_waiting)
        if isinstance(setup, Dismissed):
            raise RankError(setup.reason)
        if not isinstance(setup, Setup):
            return
        # From here on rank 0 says when to leave: it finishes its step first.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        beats.busy.set()
        if context.config.nnodes == 1:
            link.watch(setup.pid)
        context = replace(context, config=_shared_config(context.config, setup.settings))
        spec, dtype = read_spec(Path(context.model_dir), context.config)
        placement = Placement(context.config.expert_parallel_size, setup.placement)
        residency = None
        if setup.expert_slots is not None:
            residency = residency_with(setup.expert_slots, setup.lent, Path(context.model_dir), spec, dtype)
        plan = ModelPlan(spec, dtype, KvBudget(setup.num_blocks, setup.max_model_len), 0, placement, residency)
        member = Member(context, meeting, rank, plan, lambda _: None)
        link.send(Loaded(rank, member.lent))
        if isinstance(start := link.receive(), Start):
            member.meet_peers(start.lent)
            member.warm_up()
            report({"event": "computing"})
            _run_steps(rank, link, member, beats)
        member.close()
    except CollectiveError as error:
        raise RankError(f"Rank {rank} cannot reach the others: {error}.") from error
    finally:
        beats.stop()
        link.close()


def _memory_of_ranks(
    member: Member, executor: RankedExecutor, num_ranks: int
) -> Callable[[], Sequence[ExpertMemoryStats]] | None:
    """Whom to ask for the expert memories of all ranks, None where there are none."""
    experts = member.model.experts
    if experts is None:
        return None
    memories = RankMemories(experts.memory.stats, num_ranks, len(experts.layers))
    executor.on_beat = memories.heed
    return memories.stats


def _run_steps(rank: int, link: RankLink, member: Member, beats: BeatThread) -> None:
    beats.busy.clear()
    try:
        while not isinstance(message := link.receive(beats.say_waiting), Shutdown):
            if not isinstance(message, Forward):
                follow(message, member.migrator)
                continue
            beats.busy.set()
            if message.placement_version != member.migrator.version:
                member.migrator.switch(message.placement_version)
            member.experts.begin_step(message.num_rows, message.num_logit_rows)
            result = member.runner.run(decode_plan(message.plan))
            beats.busy.clear()
            if outcome := member.migrator.outcome():
                link.send(LayerLoaded(rank, outcome.version, outcome.error))
            link.send(RankResult(rank, encode_result(result)))
    except CollectiveError:
        # Rank 0 finds out whose fault it is and ends, which ends the wait here. The beats say that it is not ours.
        link.receive()


def _introduction(context: RunContext, rank: int) -> Joined:
    software = f"moeserve {VERSION} with torch {torch.__version__}"
    return Joined(rank, os.getpid(), platform.node(), machine_id(), software, context.model_hash)


def _dismiss_strangers(hub: RankHub, joined: Mapping[int, Joined], first: Joined) -> None:
    """Raises RankError, and tells the rank why, if one has another model or other software than rank 0."""
    for rank, other in sorted(joined.items()):
        where = f"{hub.name(rank)} cannot take part"
        if other.software != first.software:
            reason = f"{where}: it runs {other.software}, rank 0 {first.software}."
        elif other.model_hash != first.model_hash:
            reason = f"{where}: its model differs from that of rank 0; give every node the same files."
        else:
            continue
        hub.send(rank, Dismissed(reason))
        raise RankError(reason)


def _shared_config(own: ServeConfig, settings: bytes) -> ServeConfig:
    """The settings of rank 0, but what is a node's own matter."""
    return replace(
        msgspec.json.decode(settings, type=ServeConfig),
        threads=own.threads,
        node_rank=own.node_rank,
        curve_key_file=own.curve_key_file,
        log_level=own.log_level,
        log_format=own.log_format,
    )
