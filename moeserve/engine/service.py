"""The engine around a rank: scheduler, caches, sockets and heartbeat, until `stop` is set."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
import torch
import zmq

from experts.errors import ExpertStoreError
from kernels.cpu.library import kernels_in_use, native_kernels_absence
from moeserve.config import ServeConfig
from moeserve.engine.assemble import LoadedRank, load_rank
from moeserve.engine.commands import Commands
from moeserve.engine.containment import ContainingExecutor
from moeserve.engine.crashes.suspects import Suspects, open_suspects
from moeserve.engine.experts.monitor import ExpertFacts, ExpertMonitor, ExpertSources, expert_strategy
from moeserve.engine.experts.observe import ExpertRecording, plan_recording
from moeserve.engine.fingerprint import fingerprint_of
from moeserve.engine.known_model import summary
from moeserve.engine.kv.events.publisher import KvEventPublisher, KvEvents
from moeserve.engine.kv.opening import open_kv
from moeserve.engine.loop import Engine
from moeserve.engine.memory_plan import ModelPlan, plan_model
from moeserve.engine.planner import build_drafts, build_pace, build_parts, build_scheduler, build_text_parts
from moeserve.engine.rank import Rank, ServedModel
from moeserve.engine.ranks.copies import RankCopies
from moeserve.engine.socket import EngineSocket, HeartbeatThread
from moeserve.grammars.masks import GrammarMasks
from moeserve.model.demo import ANSWER_TOKENS, demo_named
from moeserve.model.generation import GenerationDefaults
from moeserve.model.spec import ModelError, ModelSpec
from moeserve.run_context import RunContext, keep_ready
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import Executor, LocalExecutor, RanksObserver, Steps
from moeserve.settings.generation import MAX_NEW_TOKENS, parse_generation
from moeserve.settings.kv_events import KvEventsConfig, parse_kv_events
from moeserve.statuses import Ready, Report
from moeserve.wire import EngineReady
from radix_cache import PrefixCache

if TYPE_CHECKING:
    from experts.parallel.collectives import Collectives  # It imports deepspeed, which a single rank does not need.

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedPart:
    """A rank that has loaded its part of the model, before its first step.

    config: the settings of rank 0. can_be_copied: True if forks of the process can serve, one life of the engine after
    another. threads: of torch, when it serves.
    """

    number: int
    config: ServeConfig
    spec: ModelSpec
    rank: LoadedRank
    can_be_copied: bool
    threads: int


def load_part(
    context: RunContext,
    number: int,
    plan: ModelPlan,
    report: Report,
    *,
    to_copy: bool,
    collectives: Collectives | None = None,
) -> LoadedPart:
    """Load a rank's part of the model and report progress. Raise ModelError or ConfigError.

    to_copy: load it so that it can be copied, if possible: on a CPU, with all experts in memory. Then torch computes on
    a single thread, because its pool of threads does not survive a fork; the threads that pack experts end before it.
    collectives: None on a single rank.
    """
    config = context.config
    threads = config.threads or torch.get_num_threads()
    can_be_copied = to_copy and plan.device == "cpu" and plan.residency is None
    if can_be_copied:
        torch.set_num_threads(1)
    limited = replace(config, threads=1) if can_be_copied else config
    rank = load_rank(Path(context.model_dir), plan, limited, report, collectives, threads)
    return LoadedPart(number, config, plan.spec, rank, can_be_copied, threads)


@contextmanager
def expert_faults_in_words() -> Iterator[None]:
    """Turn a failure of the experts' file into a ModelError."""
    try:
        yield
    except ExpertStoreError as error:
        raise ModelError(str(error)) from error


@expert_faults_in_words()
def load_alone(context: RunContext, report: Report, *, to_copy: bool) -> LoadedPart:
    """Load the whole model; see `load_part`. Raise ModelError or ConfigError, one sentence each."""
    directory = Path(context.model_dir)
    plan = plan_model(directory, context.config)
    # Its file may be wrong: find out before weights are read.
    plan_recording(context.config, directory, plan.spec)
    return load_part(context, 0, plan, report, to_copy=to_copy)


@expert_faults_in_words()
def serve_alone(context: RunContext, loaded: LoadedPart, report: Report, stop: threading.Event) -> None:
    """Serve a loaded model until `stop` is set, and report readiness.

    Raise ModelError or ConfigError, one sentence each, if the model cannot be served, or no longer.
    """
    config = context.config
    torch.set_num_threads(loaded.threads)
    # Read now: an earlier life may have saved more than was there when the model was loaded.
    recording = plan_recording(config, Path(context.model_dir), loaded.spec)
    rank = loaded.rank.start()
    memory, prefetcher = rank.memory, rank.prefetcher
    sources = ExpertSources(
        memory=None if memory is None else lambda: [memory.stats()],
        prefetches=prefetcher is not None,
        strategy=None if memory is None else lambda: expert_strategy(config, prefetcher),
    )
    recorded = None if recording is None else ExpertRecording(recording)
    suspects = open_suspects(context)
    try:
        # A device with a queue may fail later than the launch, and a failed step may have advanced recurrent states,
        # which cannot be computed again.
        executor: Executor = LocalExecutor(rank.runner)
        if rank.depth == 0 and not rank.model.spec.state_layers:
            executor = ContainingExecutor(rank.runner, config.block_size, suspects.begin)
        execution = Execution(executor=executor, recording=recorded, sources=sources)
        serve(context, rank, execution, suspects, report, stop)
    finally:
        rank.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The computation of a service's steps, by one rank or several, and what observes it.

    recording: receives the routing in the results, after the other `observers`; it is saved at the end. sources: for
    metrics and commands of the experts. copies: of several ranks' KV. progress: counts the work of other ranks for
    which this one waits in its steps. end: is called once no step follows.
    """

    executor: Executor
    recording: ExpertRecording | None = None
    sources: ExpertSources = field(default_factory=ExpertSources)
    observers: Sequence[RanksObserver] = ()
    copies: RankCopies | None = None
    progress: Callable[[], int] = lambda: 0
    end: Callable[[], None] = lambda: None


def serve(
    context: RunContext, rank: Rank, execution: Execution, suspects: Suspects, report: Report, stop: threading.Event
) -> None:
    """Run the engine over an executor until `stop` is set. rank: of this process."""
    config, model = context.config, rank.model
    kv_events = parse_kv_events(config.kv_events_config)
    pace = build_pace(config, model.device, rank.warm_up)
    drafts = build_drafts(config, model.kv, rank.depth)
    with ExitStack() as ends:
        kv = open_kv(context, rank, pace, execution.executor, execution.copies)
        ends.callback(kv.close)
        tokenizer = Path(context.model_dir) / "tokenizer.json"
        masks = GrammarMasks(tokenizer, model.spec.vocab_size, model.eos_token_ids, most_drafts=drafts.most_forced)
        ends.callback(masks.close)
        text_parts = build_text_parts(masks, drafts)
        parts = build_parts(kv.caches, suspects.until, pace, kv.sources(), text_parts, config.pipeline_parallel_size)
        scheduler = build_scheduler(config, model.kv, kv.caches, model.device, depth=rank.depth, pace=pace, parts=parts)
        parts += kv.moves(scheduler)
        sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        ends.callback(sockets.term)
        socket = ends.enter_context(closing(EngineSocket(sockets, context.engine_address, context.incarnation)))
        event_sources: list[dict[str, Any]] = []
        if kv_events.is_on:
            events = _start_events(kv_events, kv.caches, sockets, ends)
            event_sources = events.sources
            parts.append(events)
        ready = _ready(context, rank, kv.caches[0], event_sources, drafts=drafts.makes_any)
        steps = _steps(rank, scheduler, execution, suspects)
        commands = Commands(kv.commands(), _monitor(context, model.spec, execution))
        engine = Engine(socket, steps, ready, suspects, commands, parts)
        if execution.recording is not None:
            ends.callback(_save, execution.recording)
        heartbeat = HeartbeatThread(sockets, context.heartbeat_address, context.incarnation, engine.heartbeat)
        heartbeat.start()
        ends.callback(heartbeat.stop)
        keep_ready(context, ready)
        report(_ready_status(ready, model))
        engine.run(stop)
    execution.end()


def _steps(rank: Rank, scheduler: Scheduler, execution: Execution, suspects: Suspects) -> Steps:
    recording = () if execution.recording is None else (execution.recording,)

    def progress() -> int:
        return rank.progress.count() + execution.progress()

    observers = suspects, *execution.observers, *recording
    return Steps(scheduler, execution.executor, rank.depth, observers, progress)


def _start_events(
    config: KvEventsConfig, caches: Sequence[PrefixCache], sockets: zmq.Context[zmq.Socket[bytes]], ends: ExitStack
) -> KvEvents:
    """Publish what the caches hold from now on, until `ends`. Raise ConfigError if an address cannot be had."""
    # Milliseconds of the Unix time: no life publishes more batches than it lasts.
    first = time.time_ns() // 1_000_000
    publisher = KvEventPublisher(config, caches[0].block_size, len(caches), sockets, first)
    publisher.start()
    ends.callback(publisher.stop)
    return KvEvents(caches, publisher)


def _ready(
    context: RunContext, rank: Rank, cache: PrefixCache, kv_event_sources: list[dict[str, Any]], *, drafts: bool
) -> EngineReady:
    config, model = context.config, rank.model
    num_ranks = config.expert_parallel_size
    longest_answer = parse_generation(config.override_generation_config).get(MAX_NEW_TOKENS)
    return EngineReady(
        pid=os.getpid(),
        model_hash=context.model_hash,
        fingerprint=fingerprint_of(config, rank, context.model_hash),
        max_model_len=model.kv.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=model.eos_token_ids,
        default_sampling=_default_sampling(config, model.defaults),
        max_num_seqs=config.max_num_seqs,
        max_num_queued_reqs=config.max_num_queued_reqs,
        num_blocks=num_ranks * model.kv.num_blocks,
        block_size=config.block_size,
        device=model.device,
        dtype=str(model.dtype).removeprefix("torch."),
        weights_bytes=model.weights_bytes,
        kv_bytes=num_ranks * model.kv_bytes,
        num_experts=0 if model.spec.moe is None else model.spec.moe.num_experts,
        keeps_states=cache.states.are_kept,
        drafts=drafts,
        arithmetic=model.arithmetic,
        kv_event_sources=kv_event_sources,
        default_max_tokens=_default_max_tokens(config, model.defaults),
        longest_answer=None if longest_answer is None else int(longest_answer),
    )


def _default_sampling(config: ServeConfig, defaults: GenerationDefaults) -> dict[str, float]:
    """Return the sampling of requests that set none. The demo is greedy: its second choices are often nonsense."""
    if demo_named(config.model) is None or "temperature" in parse_generation(config.override_generation_config):
        return defaults.sampling
    return defaults.sampling | {"temperature": 0.0}


def _default_max_tokens(config: ServeConfig, defaults: GenerationDefaults) -> int | None:
    """Return the longest answer to a request that sets no bound, None for all that its context leaves."""
    if config.default_max_tokens is not None:
        return config.default_max_tokens or None
    if defaults.max_new_tokens is None and demo_named(config.model) is not None:
        return ANSWER_TOKENS
    return defaults.max_new_tokens


def _ready_status(ready: EngineReady, model: ServedModel) -> Ready:
    shared = {name: getattr(ready, name) for name in Ready.__struct_fields__ if name in EngineReady.__struct_fields__}
    return Ready(
        **shared,
        num_state_slots=model.kv.num_state_slots,
        num_snapshots=model.kv.num_snapshots,
        state_row_bytes=model.state_row_bytes,
        num_window_blocks=ready.num_blocks // model.kv.num_blocks * model.kv.num_window_blocks,
        window=model.kv.window,
        model_max_len=model.spec.max_position,
        short_context=model.short_context,
        model=summary(model.spec),
        kernels=kernels_in_use() if model.device == "cpu" else None,
        no_compiled_kernels=native_kernels_absence() if model.device == "cpu" else None,
    )


def _monitor(context: RunContext, spec: ModelSpec, execution: Execution) -> ExpertMonitor | None:
    if spec.moe is None:
        return None
    facts = ExpertFacts(spec.moe_layers, spec.moe.num_experts, spec.moe.gate.top_k)
    return ExpertMonitor(facts, execution.recording, execution.sources, Path(context.run_dir))


def _save(recording: ExpertRecording) -> None:
    try:
        for file, tokens in recording.close().items():
            log.info("experts_saved", file=file, tokens=tokens)
    except OSError as error:
        log.error("experts_not_saved", error=str(error))
