"""The life of one rank among several.

Each rank takes its GPU and, with `--bind-cores`, its cores. Rank 0 plans for all ranks, and every rank loads its part
(`load_member`). Then all start together, rank 0 serves with the engine, and every other rank computes the plans that
rank 0 sends (`serve_member`). Where the parts can be copied, each life of the engine is one of copies
(`launcher.copies`).
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog
import torch
import zmq

from experts.errors import CollectiveError
from experts.parallel.collectives import Collectives
from experts.placement.placement import Placement
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import available_bytes, current_gpu, too_few_gpus
from moeserve.engine.assemble import collective_timeout
from moeserve.engine.crashes.suspects import open_suspects
from moeserve.engine.experts.monitor import ExpertSources, expert_strategy
from moeserve.engine.experts.observe import ExpertRecording, LinkCounts, RecordingPlan, plan_recording
from moeserve.engine.experts.rebalancing import RankMemories, start_rebalancing
from moeserve.engine.kv.disk.opening import files_for
from moeserve.engine.kv.host import disk_copier
from moeserve.engine.memory_plan import ModelPlan, check_shard, check_stage, plan_from_rank_0, plan_model
from moeserve.engine.rank import Rank
from moeserve.engine.ranks.copies import MemberCopies, RankCopies
from moeserve.engine.ranks.cores import bind_to_cores
from moeserve.engine.ranks.joint import JointExecutor
from moeserve.engine.ranks.meeting import Meeting, machine_id, meet_as_first, meet_first
from moeserve.engine.ranks.messages import Dismissed, Joined, Loaded, RankError, Setup, Start, Started
from moeserve.engine.ranks.pipeline import PipelineExecutor
from moeserve.engine.ranks.steps import RankedExecutor, RankSteps
from moeserve.engine.ranks.transport import BeatThread, RankHub, RankLink, dismiss_strangers, find_fault, introduction
from moeserve.engine.service import Execution, LoadedPart, expert_faults_in_words, load_part, serve
from moeserve.gpu_faults import cuda_is_available
from moeserve.run_context import RunContext
from moeserve.statuses import Computing, Met, Report

# While the service starts, a rank may be silent for this many times the engine's timeout.
_STARTING_PATIENCE = 3
_SECONDS_TO_COME = 300.0

log = structlog.get_logger(__name__)


@expert_faults_in_words()
def load_member(context: RunContext, number: int, report: Report, *, to_copy: bool) -> LoadedPart | None:
    """Load the part of rank `number`, with all other ranks; return None if rank 0 ends meanwhile.

    to_copy: load it so that it can be copied, if possible; see `load_part`. SIGTERM ends a rank at
    once: one that waits for a lost rank would wait for long. Raise ModelError, ConfigError or RankError, one sentence
    each, if the service cannot start.
    """
    _bind_rank(context.config, number)
    if context.config.device == "cuda":
        _take_gpu(context.config)
    # The context's threads are gone when the process is forked.
    with zmq.Context() as sockets:
        if number == 0:
            return _load_first(context, sockets, report, to_copy)
        return _load_other(context, sockets, number, to_copy)


@expert_faults_in_words()
def serve_member(context: RunContext, member: LoadedPart, report: Report) -> None:
    """Serve one life of the engine: as rank 0 until SIGTERM, as another rank until rank 0 ends.

    Until all ranks have joined, SIGTERM ends each at once. Raise ModelError, ConfigError or RankError, one sentence
    each, if the service cannot go on.
    """
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(member.threads)
    context = replace(context, config=member.config)
    with zmq.Context() as sockets:
        if member.number == 0:
            _serve_first(context, sockets, member, report)
        else:
            _follow_first(context, sockets, member, report)


def _load_first(
    context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], report: Report, to_copy: bool
) -> LoadedPart:
    """Load rank 0: plan for all ranks, and wait until all have loaded."""
    directory = Path(context.model_dir)
    plan = plan_model(directory, context.config)
    # Its file may be wrong: find out before weights are read.
    plan_recording(context.config, directory, plan.spec)
    meeting = meet_as_first(context, loading=True)
    hub = RankHub(sockets, meeting)
    try:
        _join(context, meeting, hub, within=_SECONDS_TO_COME)
        hub.send_all(_setup_of(plan, context))
        member = _load_part(context, 0, plan, report, to_copy)
        hub.gather(Loaded, within=float("inf"), patience=_patience(context.config))
    finally:
        hub.close()
    return member


def _join(context: RunContext, meeting: Meeting, hub: RankHub, *, within: float) -> None:
    """Wait until all other ranks have joined rank 0, and watch them. Raise RankError if one does not `within` s."""
    if context.meets_in_store:
        meeting.announce(*hub.addresses)
    joined = hub.gather(Joined, within=within, patience=_patience(context.config))
    dismiss_strangers(hub, joined, introduction(context, 0))
    hub.watch(machine_id())


def _load_other(
    context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], number: int, to_copy: bool
) -> LoadedPart | None:
    """Load any rank but 0 as rank 0 says."""
    meeting, own = meet_first(context, loading=True), context.config.device
    link = RankLink(sockets, meeting, number)
    beats = BeatThread(sockets, meeting, number, lambda: 0)
    beats.start()
    try:
        link.send(introduction(context, number))
        setup = link.receive(beats.say_waiting)
        if isinstance(setup, Dismissed):
            raise RankError(setup.reason)
        if not isinstance(setup, Setup):
            return None
        beats.busy.set()
        if context.config.nnodes == 1:
            link.watch(setup.pid)
        context = replace(context, config=_shared_config(context.config, setup.settings))
        _check_device(number, own, context.config.device)
        plan = _plan_of(setup, context)
        if context.config.nnodes > 1 and plan.device == "cpu":
            _check_memory(Path(context.model_dir), plan, context.config, number)
        member = _load_part(context, number, plan, lambda _: None, to_copy)
        link.send(Loaded(number))
        return member
    finally:
        beats.stop()
        link.close()


def _check_memory(directory: Path, plan: ModelPlan, config: ServeConfig, number: int) -> None:
    """Raise ModelError if a rank's part of the layers does not fit: rank 0 knows its own machine's memory alone."""
    if plan.layers:
        check_stage(directory, plan, config, number, available_bytes())
    elif config.tensor_parallel_size > 1:
        check_shard(directory, plan, config, number, available_bytes())


def _load_part(context: RunContext, number: int, plan: ModelPlan, report: Report, to_copy: bool) -> LoadedPart:
    """Load a rank's part of the model. Raise ModelError or ConfigError."""
    device = current_gpu() if plan.device == "cuda" else torch.device("cpu")
    config = context.config
    is_stage = config.pipeline_parallel_size > 1
    collectives = Collectives(number, config.num_ranks, device=device, computes_meanwhile=is_stage)
    return load_part(context, number, plan, report, to_copy=to_copy, collectives=collectives)


def _serve_first(
    context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], member: LoadedPart, report: Report
) -> None:
    # Read now: an earlier life may have saved more than was there when the model was loaded.
    recording = plan_recording(context.config, Path(context.model_dir), member.spec)
    meeting = meet_as_first(context)
    hub = RankHub(sockets, meeting)
    try:
        # All of them have loaded.
        _join(context, meeting, hub, within=_patience(context.config))
        hub.send_all(Start(os.getpid()))
        rank = _start_first(meeting, hub, member)
        # The first step has less patience: a rank that is slow on a busy machine would be taken for lost in it.
        hub.gather(Started, within=float("inf"), patience=_patience(context.config))
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        execute = _over_shards if rank.group is None else _over_experts
        if context.config.pipeline_parallel_size > 1:
            execute = _over_stages
        serve(context, rank, execute(context.config, rank, hub, recording), open_suspects(context), report, stop)
        rank.close()
    except CollectiveError as error:
        raise hub.fault_behind(error) from error
    finally:
        hub.close()


def _start_first(meeting: Meeting, hub: RankHub, member: LoadedPart) -> Rank:
    """Return rank 0 once it has warmed up with all others."""
    collectives = _collectives(member)
    try:
        return _start(meeting, member)
    except CollectiveError as error:
        raise find_fault(hub, error, collectives.num_entered, collectives.waits.seconds) from error


def _collectives(member: LoadedPart) -> Collectives:
    assert member.rank.collectives is not None
    return member.rank.collectives


def _start(meeting: Meeting, member: LoadedPart) -> Rank:
    """Open the collectives and start the rank, together with all others.

    Ranks are patient until each has started: on a busy machine one may take seconds longer for its own part.
    """
    _collectives(member).open(meeting.rendezvous, _patience(member.config), interface=meeting.interface)
    return member.rank.start()


def _patience(config: ServeConfig) -> float:
    """Return how many seconds a rank may be silent, or behind the others, while the service starts."""
    return _STARTING_PATIENCE * config.engine_timeout


def _setup_of(plan: ModelPlan, context: RunContext) -> Setup:
    return Setup(
        # Other ranks serve no clients and need no API keys.
        msgspec.json.encode(replace(context.config, api_key=())),
        os.getpid(),
        plan.kv,
        None if plan.placement is None else plan.placement.ranks,
        None if plan.residency is None else plan.residency.slots.num_slots,
        plan.layers,
    )


def _over_experts(config: ServeConfig, rank: Rank, hub: RankHub, recording: RecordingPlan | None) -> Execution:
    """Return the steps of ranks that share the experts."""
    group, migrator, memories = rank.group, rank.migrator, _memories(config, rank)
    assert group is not None
    assert migrator is not None
    rebalancing = start_rebalancing(config, group.experts.placement, migrator, hub.send_all)
    copies = RankCopies(hub.send, _holders_of_blocks(config))
    executor = RankedExecutor(
        rank.runner,
        rank.begin_step,
        hub,
        timeout=collective_timeout(config),
        num_entered=lambda: group.collectives.num_entered,
        placement_version=lambda: migrator.version,
        listeners=[listener.on_message for listener in (rebalancing, memories, copies) if listener is not None],
        num_shards=config.tensor_parallel_size,
    )
    recorded = None
    if recording is not None:
        windows = () if rebalancing is None else (rebalancing.window,)
        num_shards = config.tensor_parallel_size
        recorded = ExpertRecording(recording, lambda: group.experts.placement, windows, num_shards)
    # Results are those of groups, and links lie between ranks.
    links = LinkCounts(config.expert_parallel_size) if config.tensor_parallel_size == 1 else None
    sources = ExpertSources(
        placement=lambda: group.experts.placement,
        placement_version=lambda: migrator.version,
        links=None if links is None else links.links,
        rebalancing=None if rebalancing is None else rebalancing.stats,
        memory=None if memories is None else memories.stats,
        prefetches=rank.prefetcher is not None,
        strategy=lambda: expert_strategy(config, rank.prefetcher, str(rank.dispatch), all_fit=rank.memory is None),
    )
    return Execution(
        executor=executor,
        recording=recorded,
        sources=sources,
        observers=[observer for observer in (rebalancing, links) if observer is not None],
        copies=copies,
        end=executor.close,
    )


def _over_stages(config: ServeConfig, rank: Rank, hub: RankHub, recording: RecordingPlan | None) -> Execution:
    """Return the steps of ranks that share the layers, and in each stage, where it has several, its experts or each of
    its layers."""
    group, width = rank.group, config.expert_parallel_size
    placement = None if group is None else group.experts.placement
    links = LinkCounts(width)
    sources = ExpertSources()
    if group is not None:
        sources = ExpertSources(
            placement=lambda: placement,
            links=links.links,
            strategy=lambda: expert_strategy(config, None, str(rank.dispatch)),
        )
    copies = RankCopies(hub.send, _holders_of_blocks(config))
    executor = PipelineExecutor(
        rank.runner,
        hub,
        copies.on_message,
        timeout=collective_timeout(config),
        begin_step=rank.begin_step,
        width=width,
        num_shards=config.tensor_parallel_size,
    )
    return Execution(
        executor=executor,
        recording=None if recording is None else ExpertRecording(recording, lambda: placement),
        sources=sources,
        observers=[links],
        copies=copies,
        progress=executor.signs_of_work,
        end=executor.close,
    )


def _over_shards(config: ServeConfig, rank: Rank, hub: RankHub, recording: RecordingPlan | None) -> Execution:
    """Return the steps of ranks that compute every layer together."""
    collectives, memories = rank.collectives, _memories(config, rank)
    assert collectives is not None
    copies = RankCopies(hub.send, _holders_of_blocks(config))
    executor = JointExecutor(
        rank.runner,
        hub,
        [listener.on_message for listener in (memories, copies) if listener is not None],
        timeout=collective_timeout(config),
        num_entered=lambda: collectives.num_entered,
    )
    sources = ExpertSources()
    if memories is not None:
        sources = ExpertSources(
            memory=memories.stats,
            prefetches=rank.prefetcher is not None,
            strategy=lambda: expert_strategy(config, rank.prefetcher),
        )
    recorded = None if recording is None else ExpertRecording(recording)
    return Execution(executor=executor, recording=recorded, sources=sources, copies=copies, end=executor.close)


def _memories(config: ServeConfig, rank: Rank) -> RankMemories | None:
    """Return the counters of all ranks' expert memories, None if all experts are in memory."""
    if rank.memory is None:
        return None
    return RankMemories(rank.memory.stats, config.num_ranks, len(rank.model.spec.moe_layers))


def _holders_of_blocks(config: ServeConfig) -> list[list[int]]:
    """Return, by prefix cache, the ranks that hold a part of each of its blocks."""
    groups, shards = config.expert_parallel_size, config.tensor_parallel_size
    ranks = range(config.num_ranks)
    return [[rank for rank in ranks if rank // shards % groups == group] for group in range(groups)]


def _follow_first(
    context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], member: LoadedPart, report: Report
) -> None:
    """Run any rank but 0: join, and compute the plans that rank 0 sends."""
    meeting, number = meet_first(context), member.number
    report(Met(meeting.incarnation))
    link = RankLink(sockets, meeting, number)
    collectives, is_stage = _collectives(member), member.config.pipeline_parallel_size > 1
    num_done = member.rank.progress.count if is_stage else lambda: collectives.num_entered
    beats = BeatThread(sockets, meeting, number, num_done, member.rank.memory_stats)
    beats.busy.set()
    beats.start()
    try:
        link.send(introduction(context, number))
        start = link.receive()
        if isinstance(start, Dismissed):
            raise RankError(start.reason)
        if not isinstance(start, Start):
            member.rank.close()
            return
        if context.config.nnodes == 1:
            link.watch(start.pid)
        # From here on only rank 0 ends this process, after the steps in flight.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        started = _start(meeting, member)
        link.send(Started(number))
        report(Computing())
        copies = MemberCopies(number, lambda *folder: disk_copier(started, files_for(started, *folder)), link.send)
        RankSteps(
            number,
            link,
            started.runner,
            started.begin_step,
            beats,
            copies,
            migrator=started.migrator,
            returns_results=is_stage or started.group is not None,
        ).run()
        copies.close()
        started.close()
    except CollectiveError as error:
        raise RankError(f"Rank {number} cannot reach the others: {error}.") from error
    finally:
        beats.stop()
        link.close()


def _check_device(rank: int, own: str, first: str) -> None:
    """Raise RankError if the devices differ: this process has set up its collectives for its own device."""
    if (own == "cuda") != (first == "cuda"):
        raise RankError(f"Rank {rank} was started with --device {own} and rank 0 with --device {first}.")


def _plan_of(setup: Setup, context: RunContext) -> ModelPlan:
    config = context.config
    placement = None if setup.placement is None else Placement(_num_peers(config), setup.placement)
    return plan_from_rank_0(Path(context.model_dir), config, placement, setup.kv, setup.expert_slots, setup.layers)


def _num_peers(config: ServeConfig) -> int:
    """Return how many ranks share the experts of a layer."""
    return config.num_ranks // config.pipeline_parallel_size


def _shared_config(own: ServeConfig, settings: bytes) -> ServeConfig:
    """Return the settings of rank 0 with the settings that a node chooses for itself."""
    return replace(
        msgspec.json.decode(settings, type=ServeConfig),
        threads=own.threads,
        node_rank=own.node_rank,
        curve_key_file=own.curve_key_file,
        log_level=own.log_level,
        log_format=own.log_format,
    )


def _bind_rank(config: ServeConfig, rank: int) -> None:
    if config.bind_cores:
        num_here = config.num_ranks_here
        cores = bind_to_cores(rank % num_here, num_here, config.threads or torch.get_num_threads())
        log.info("rank_keeps_to_cores", rank=rank, cores=cores)


def _take_gpu(config: ServeConfig) -> None:
    """Make this rank's GPU the current one before any other is touched. Raise ConfigError if there are too few."""
    if not cuda_is_available():
        return
    obstacle = too_few_gpus(config, torch.cuda.device_count())
    if obstacle is not None:
        raise ConfigError(obstacle)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
