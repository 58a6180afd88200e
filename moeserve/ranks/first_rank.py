"""The life of rank 0: it plans for all, sees that all have loaded, and serves with the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import zmq

from experts.errors import CollectiveError
from experts.residency import ExpertMemoryStats
from moeserve.experts.monitor import ExpertSources, expert_strategy
from moeserve.experts.observe import ExpertRecording, LinkCounts, RecordingPlan, plan_recording
from moeserve.experts.rebalancing import RankMemories, start_rebalancing
from moeserve.model_loading import ModelPlan, Report
from moeserve.ranks.meeting import Meeting, machine_id, meet_as_first
from moeserve.ranks.member import collective_timeout
from moeserve.ranks.members import RankMember, make_member, plan_ranks
from moeserve.ranks.messages import Joined, Loaded, RankError, Setup, Start
from moeserve.ranks.steps import RankedExecutor
from moeserve.ranks.transport import RankHub, dismiss_strangers, find_fault, introduction
from moeserve.serving import serve
from moeserve.wire import RunContext

# Of the engine's timeout: how long a rank that loads may be silent.
_LOADING_PATIENCE = 3


def run_first_rank(
    context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], report: Report, stop: threading.Event
) -> None:
    directory = Path(context.model_dir)
    plan = plan_ranks(directory, context.config)
    recording = plan_recording(context.config, directory, plan.spec)
    meeting = meet_as_first(context)
    hub = RankHub(sockets, meeting)
    try:
        member = _load_together(context, plan, meeting, hub, report, stop)
        if member is not None:
            _serve(context, member, hub, recording, report, stop)
            member.close()
    except CollectiveError as error:
        hub.check_for(0.5)
        raise RankError(f"The ranks cannot reach each other: {error}.") from error
    finally:
        hub.close()


def _load_together(
    context: RunContext, plan: ModelPlan, meeting: Meeting, hub: RankHub, report: Report, stop: threading.Event
) -> RankMember | None:
    """This rank, when all of them have loaded and are warm; None if `stop` is set before."""
    if context.meets_in_store:
        meeting.announce(*hub.addresses)
    joined = hub.gather(Joined, stop)
    if joined is None:
        return None
    dismiss_strangers(hub, joined, introduction(context, 0))
    hub.watch(machine_id())
    setup = _setup_of(plan, context)
    for rank in hub.others:
        hub.send(rank, setup)
    member = make_member(context, meeting, 0, plan, report)
    loaded = hub.gather(Loaded, stop, patience=_LOADING_PATIENCE * context.config.engine_timeout)
    if loaded is None:
        return None
    for rank in hub.others:
        hub.send(rank, Start())
    try:
        member.warm_up()
    except CollectiveError as error:
        collectives = member.collectives
        raise find_fault(hub, error, collectives.num_entered, collectives.waits.seconds) from error
    return member


def _setup_of(plan: ModelPlan, context: RunContext) -> Setup:
    assert plan.placement is not None
    return Setup(
        # The other ranks hear no clients.
        msgspec.json.encode(replace(context.config, api_key=())),
        os.getpid(),
        plan.kv.num_blocks,
        plan.kv.max_model_len,
        plan.placement.ranks,
        None if plan.residency is None else plan.residency.slots.num_slots,
    )


def _serve(
    context: RunContext,
    member: RankMember,
    hub: RankHub,
    recording: RecordingPlan | None,
    report: Report,
    stop: threading.Event,
) -> None:
    config, experts, migrator = context.config, member.experts, member.migrator
    links, memories = LinkCounts(config.expert_parallel_size), _memory_of_ranks(member, config.expert_parallel_size)
    rebalancing = start_rebalancing(config, experts.placement, migrator, hub.send_all)
    executor = RankedExecutor(
        member.runner,
        member,
        hub,
        timeout=collective_timeout(config),
        num_entered=lambda: member.collectives.num_entered,
        placement_version=lambda: migrator.version,
        heed=[listener.heed for listener in (rebalancing, memories) if listener is not None],
    )
    recorded = None
    if recording is not None:
        windows = () if rebalancing is None else (rebalancing.window,)
        recorded = ExpertRecording(recording, lambda: experts.placement, windows)
    sources = ExpertSources(
        placement=lambda: experts.placement,
        placement_version=lambda: migrator.version,
        links=links.links,
        rebalancing=None if rebalancing is None else rebalancing.stats,
        memory=None if memories is None else memories.stats,
        prefetches=member.prefetcher is not None,
        strategy=lambda: expert_strategy(
            config, member.prefetcher, member.dispatch_shape, all_fit=member.memory_stats() is None
        ),
    )
    observers = [links] if rebalancing is None else [rebalancing, links]
    depth = 1 if member.model.device == "cuda" else 0
    serve(context, member.model, executor, report, stop, recorded, sources, depth=depth, observers=observers)
    executor.close()


def _memory_of_ranks(member: RankMember, num_ranks: int) -> RankMemories | None:
    """Whom to ask for the expert memories of all ranks, None where there are none."""
    if member.memory_stats() is None:
        return None
    num_layers = len(member.model.spec.moe_layers)
    return RankMemories(cast("Callable[[], ExpertMemoryStats]", member.memory_stats), num_ranks, num_layers)
