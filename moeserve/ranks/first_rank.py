"""The life of rank 0: it plans for all, sees that all have loaded, and serves with the engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec
import zmq

from experts.errors import CollectiveError
from experts.residency import ExpertMemoryStats
from moeserve.experts.monitor import ExpertSources, expert_strategy
from moeserve.experts.observe import ExpertRecording, count_links, open_recording
from moeserve.experts.rebalancing import RankMemories, RebalancingExecutor, rebalancing
from moeserve.model_loading import ModelPlan, Report
from moeserve.ranks.meeting import Meeting, machine_id, meet_as_first
from moeserve.ranks.member import collective_timeout
from moeserve.ranks.members import RankMember, make_member, plan_ranks
from moeserve.ranks.messages import Joined, Loaded, RankError, Setup, Start
from moeserve.ranks.steps import RankedExecutor, ranked_executor
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
    recording = open_recording(context.config, directory, plan.spec)
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
    recording: ExpertRecording | None,
    report: Report,
    stop: threading.Event,
) -> None:
    config = context.config
    executor = ranked_executor(
        member.runner,
        member,
        hub,
        timeout=collective_timeout(config),
        num_entered=lambda: member.collectives.num_entered,
    )
    steps = rebalancing(executor, config, member.experts.placement, member.migrator, recording)
    links = count_links(steps, config.expert_parallel_size)
    sources = ExpertSources(
        placement=lambda: member.experts.placement,
        placement_version=lambda: executor.placement_version,
        links=links.links,
        rebalancing=steps.stats if isinstance(steps, RebalancingExecutor) else None,
        memory=_memory_of_ranks(member, executor, config.expert_parallel_size),
        prefetches=member.prefetcher is not None,
        strategy=lambda: expert_strategy(
            config, member.prefetcher, member.dispatch_shape, all_fit=member.memory_stats() is None
        ),
    )
    serve(context, member.model, links, report, stop, recording, sources)
    executor.close()


def _memory_of_ranks(
    member: RankMember, executor: RankedExecutor, num_ranks: int
) -> Callable[[], Sequence[ExpertMemoryStats]] | None:
    """Whom to ask for the expert memories of all ranks, None where there are none."""
    if member.memory_stats() is None:
        return None
    num_layers = len(member.model.spec.moe_layers)
    memories = RankMemories(cast("Callable[[], ExpertMemoryStats]", member.memory_stats), num_ranks, num_layers)
    executor.on_beat = memories.heed
    return memories.stats
