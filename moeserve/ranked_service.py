"""The life of one rank among several.

Rank 0 plans for all ranks, every rank loads its part, and all start together. Then rank 0 serves with the engine, and
every other rank computes what rank 0 sends. Before that each rank takes its GPU and, with `--bind-cores`, its cores.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import structlog
import torch
import zmq

from experts.collectives import Collectives
from experts.errors import CollectiveError, ExpertStoreError
from experts.placement import Placement
from moeserve.assemble import LoadedRank, Report, collective_timeout, load_rank
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import KvBudget, current_gpu, too_few_gpus
from moeserve.experts.monitor import ExpertSources, expert_strategy
from moeserve.experts.observe import ExpertRecording, LinkCounts, RecordingPlan, plan_recording
from moeserve.experts.rebalancing import RankMemories, start_rebalancing
from moeserve.memory_plan import ModelPlan, plan_as_told, plan_model
from moeserve.model.spec import ModelError
from moeserve.rank import Rank
from moeserve.ranks.meeting import Meeting, machine_id, meet_as_first, meet_first
from moeserve.ranks.messages import Dismissed, Joined, Loaded, RankError, Setup, Start
from moeserve.ranks.steps import RankedExecutor, RankSteps
from moeserve.ranks.transport import BeatThread, RankHub, RankLink, dismiss_strangers, find_fault, introduction
from moeserve.service import serve
from moeserve.wire import RunContext

# While it loads, a rank may be silent for this many times the engine's timeout.
_LOADING_PATIENCE = 3

log = structlog.get_logger(__name__)


def run_rank(context: RunContext, rank: int, report: Report) -> None:
    """Serve as rank 0 with the engine until SIGTERM, or follow rank 0 as another rank until it ends.

    Until all ranks have loaded, SIGTERM ends each at once: a rank that waits for a lost rank would wait for long. Raise
    ModelError, ConfigError or RankError, one sentence each, if the service cannot start or go on.
    """
    _bind_rank(context.config, rank)
    if context.config.device == "cuda":
        _take_gpu(context.config)
    try:
        with zmq.Context() as sockets:
            if rank == 0:
                _run_first(context, sockets, report)
            else:
                _run_other(context, sockets, rank, report)
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error


def _run_first(context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], report: Report) -> None:
    """Run rank 0: plan for all ranks, wait until all have loaded, and serve with the engine."""
    directory = Path(context.model_dir)
    plan = plan_model(directory, context.config)
    recording = plan_recording(context.config, directory, plan.spec)
    meeting = meet_as_first(context)
    hub = RankHub(sockets, meeting)
    try:
        rank = _load_together(context, plan, meeting, hub, report)
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        _serve_with_others(context, rank, hub, recording, report, stop)
        rank.close()
    except CollectiveError as error:
        hub.check_for(0.5)
        raise RankError(f"The ranks cannot reach each other: {error}.") from error
    finally:
        hub.close()


def _load_together(context: RunContext, plan: ModelPlan, meeting: Meeting, hub: RankHub, report: Report) -> Rank:
    """Return rank 0 once all ranks have loaded and warmed up."""
    if context.meets_in_store:
        meeting.announce(*hub.addresses)
    joined = hub.gather(Joined)
    dismiss_strangers(hub, joined, introduction(context, 0))
    hub.watch(machine_id())
    hub.send_all(_setup_of(plan, context))
    loaded = _load_member(context, meeting, 0, plan, report)
    hub.gather(Loaded, patience=_LOADING_PATIENCE * context.config.engine_timeout)
    hub.send_all(Start())
    try:
        return loaded.start()
    except CollectiveError as error:
        assert loaded.group is not None
        collectives = loaded.group.collectives
        raise find_fault(hub, error, collectives.num_entered, collectives.waits.seconds) from error


def _load_member(context: RunContext, meeting: Meeting, rank: int, plan: ModelPlan, report: Report) -> LoadedRank:
    """Load a rank's part of the model. Raise ModelError, ConfigError or CollectiveError.

    Open the collectives first, so that each rank sees the free memory before any rank has allocated weights.
    """
    config = context.config
    collectives = Collectives(
        rank,
        config.expert_parallel_size,
        meeting.collectives,
        collective_timeout(config),
        interface=meeting.interface,
        device=current_gpu() if plan.device == "cuda" else torch.device("cpu"),
    )
    return load_rank(Path(context.model_dir), plan, config, report, collectives)


def _setup_of(plan: ModelPlan, context: RunContext) -> Setup:
    assert plan.placement is not None
    return Setup(
        # Other ranks serve no clients and need no API keys.
        msgspec.json.encode(replace(context.config, api_key=())),
        os.getpid(),
        plan.kv.num_blocks,
        plan.kv.max_model_len,
        plan.kv.num_state_slots,
        plan.kv.num_snapshots,
        plan.kv.num_window_blocks,
        plan.kv.window,
        plan.placement.ranks,
        None if plan.residency is None else plan.residency.slots.num_slots,
    )


def _serve_with_others(
    context: RunContext,
    rank: Rank,
    hub: RankHub,
    recording: RecordingPlan | None,
    report: Report,
    stop: threading.Event,
) -> None:
    """Serve with the engine, observing the steps of all ranks."""
    config, group, migrator = context.config, rank.group, rank.migrator
    assert group is not None
    assert migrator is not None
    num_ranks, memory = config.expert_parallel_size, rank.memory
    links = LinkCounts(num_ranks)
    memories = None if memory is None else RankMemories(memory.stats, num_ranks, len(rank.model.spec.moe_layers))
    rebalancing = start_rebalancing(config, group.experts.placement, migrator, hub.send_all)
    executor = RankedExecutor(
        rank.runner,
        rank,
        hub,
        timeout=collective_timeout(config),
        num_entered=lambda: group.collectives.num_entered,
        placement_version=lambda: migrator.version,
        listeners=[listener.on_message for listener in (rebalancing, memories) if listener is not None],
    )
    recorded = None
    if recording is not None:
        windows = () if rebalancing is None else (rebalancing.window,)
        recorded = ExpertRecording(recording, lambda: group.experts.placement, windows)
    sources = ExpertSources(
        placement=lambda: group.experts.placement,
        placement_version=lambda: migrator.version,
        links=links.links,
        rebalancing=None if rebalancing is None else rebalancing.stats,
        memory=None if memories is None else memories.stats,
        prefetches=rank.prefetcher is not None,
        strategy=lambda: expert_strategy(config, rank.prefetcher, rank.dispatch_shape, all_fit=memory is None),
    )
    observers = [links] if rebalancing is None else [rebalancing, links]
    serve(context, rank, executor, report, stop, recorded, sources, observers)
    executor.close()


def _run_other(context: RunContext, sockets: zmq.Context[zmq.Socket[bytes]], rank: int, report: Report) -> None:
    """Run any rank but 0: join, load, and compute what rank 0 sends."""
    meeting, own = meet_first(context), context.config.device
    link = RankLink(sockets, meeting, rank)
    loaded: LoadedRank | None = None
    beats = BeatThread(
        sockets,
        meeting,
        rank,
        lambda: loaded.group.collectives.num_entered if loaded is not None and loaded.group is not None else 0,
        lambda: loaded.memory_stats() if loaded is not None else None,
    )
    beats.start()
    try:
        link.send(introduction(context, rank))
        setup = link.receive(beats.say_waiting)
        if isinstance(setup, Dismissed):
            raise RankError(setup.reason)
        if not isinstance(setup, Setup):
            return
        beats.busy.set()
        if context.config.nnodes == 1:
            link.watch(setup.pid)
        context = replace(context, config=_shared_config(context.config, setup.settings))
        _check_device(rank, own, context.config.device)
        loaded = _load_member(context, meeting, rank, _plan_of(setup, context), lambda _: None)
        link.send(Loaded(rank))
        if isinstance(link.receive(), Start):
            # From here on only rank 0 ends this process, after the steps in flight.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            started = loaded.start()
            report({"event": "computing"})
            assert started.migrator is not None
            RankSteps(rank, link, started.runner, started, started.migrator, beats).run()
            started.close()
        else:
            loaded.close()
    except CollectiveError as error:
        raise RankError(f"Rank {rank} cannot reach the others: {error}.") from error
    finally:
        beats.stop()
        link.close()


def _check_device(rank: int, own: str, first: str) -> None:
    """Raise RankError if the devices differ: this process has set up its collectives for its own device."""
    if (own == "cuda") != (first == "cuda"):
        raise RankError(f"Rank {rank} was started with --device {own} and rank 0 with --device {first}.")


def _plan_of(setup: Setup, context: RunContext) -> ModelPlan:
    placement = Placement(context.config.expert_parallel_size, setup.placement)
    kv = KvBudget(
        setup.num_blocks,
        setup.max_model_len,
        setup.num_state_slots,
        setup.num_snapshots,
        setup.num_window_blocks,
        setup.window,
    )
    return plan_as_told(Path(context.model_dir), context.config, placement, kv, setup.expert_slots)


def _shared_config(own: ServeConfig, settings: bytes) -> ServeConfig:
    """Return the settings of rank 0 with those that a node chooses for itself."""
    return replace(
        msgspec.json.decode(settings, type=ServeConfig),
        threads=own.threads,
        node_rank=own.node_rank,
        curve_key_file=own.curve_key_file,
        log_level=own.log_level,
        log_format=own.log_format,
    )


def own_cores(place: int, num_ranks: int, threads: int, usable: Sequence[int]) -> list[int]:
    """Return the cores for the rank at `place` among `num_ranks` ranks of a machine, each with `threads` threads.

    These are all `usable` cores, unless the ranks fill them exactly. With fewer threads the system can move them to
    idle cores, and under a container's quota other services share the cores and would bind to the same ones.
    """
    if num_ranks * threads != len(usable):
        return list(usable)
    return sorted(usable)[place * threads : (place + 1) * threads]


def bind_to_cores(place: int, num_ranks: int, threads: int) -> list[int]:
    """Bind this thread, and all threads that it starts from now on, to `own_cores`, and return them.

    Ranks exchange rows in every layer, so two ranks that share a core for a moment double the time of a step. Without
    binding the system puts them on one core now and then, because the core of a rank that waits looks idle.
    """
    cores = own_cores(place, num_ranks, threads, sorted(os.sched_getaffinity(0)))
    os.sched_setaffinity(0, cores)
    return cores


def _bind_rank(config: ServeConfig, rank: int) -> None:
    if config.bind_cores:
        num_here = config.expert_parallel_size // config.nnodes
        cores = bind_to_cores(rank % num_here, num_here, config.threads or torch.get_num_threads())
        log.info("rank_keeps_to_cores", rank=rank, cores=cores)


def _take_gpu(config: ServeConfig) -> None:
    """Make this rank's GPU the current one before any other is touched. Raise ConfigError if there are too few."""
    if not torch.cuda.is_available():
        return
    obstacle = too_few_gpus(config, torch.cuda.device_count())
    if obstacle is not None:
        raise ConfigError(obstacle)
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
