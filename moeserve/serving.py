"""The engine of a loaded model at work: scheduler, caches, sockets and heartbeat, until it is told to stop."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import zmq

from kernels.cpu.library import native_kernels_absence
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import KvBudget, step_budget
from moeserve.engine import Engine, EngineSocket, HeartbeatThread
from moeserve.experts.monitor import ExpertFacts, ExpertMonitor, ExpertSources
from moeserve.experts.observe import ExpertRecording, signature_merger
from moeserve.model.spec import DecoderSpec
from moeserve.model_loading import Report, ServedModel
from moeserve.request_memory import MergeAnnotations
from moeserve.scheduler import Scheduler
from moeserve.steps import Executor, RanksObserver, Steps
from moeserve.wire import EngineReady, RunContext
from radix_cache import PrefixCache

log = structlog.get_logger(__name__)


def serve(
    context: RunContext,
    model: ServedModel,
    executor: Executor,
    report: Report,
    stop: threading.Event,
    recording: ExpertRecording | None,
    sources: ExpertSources,
    *,
    depth: int,
    observers: Sequence[RanksObserver] = (),
) -> None:
    """Runs the engine over an executor until `stop` is set; `model` is that of this process.

    recording: where the routing goes that the results carry, after the other `observers`. It is saved at the end.
    sources: whom to ask about the experts. depth: see `moeserve.steps.Steps`.
    """
    config = context.config
    if recording is not None:
        observers = (*observers, recording)
    merge = signature_merger(model.spec) if sources.prefetches and config.enable_prefix_caching else None
    scheduler, caches = build_scheduler(config, model.kv, model.device, run_ahead=depth > 0, merge_annotations=merge)
    ready = _ready(context, model)
    sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = EngineSocket(sockets, context.engine_address, context.incarnation)
    monitor = _monitor(context, model.spec, recording, sources)
    steps = Steps(scheduler, executor, depth, observers)
    engine = Engine(socket, scheduler, caches, steps, ready, monitor)
    heartbeat = HeartbeatThread(sockets, context.heartbeat_address, context.incarnation, engine.heartbeat)
    heartbeat.start()
    report(_ready_event(ready, model))
    try:
        engine.run(stop)
    finally:
        heartbeat.stop()
        if recording is not None:
            _save(recording)
        socket.close()
        sockets.term()


def _ready(context: RunContext, model: ServedModel) -> EngineReady:
    config = context.config
    num_ranks = config.expert_parallel_size
    return EngineReady(
        pid=os.getpid(),
        model_hash=context.model_hash,
        max_model_len=model.kv.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=model.eos_token_ids,
        default_sampling=model.defaults.sampling,
        max_num_seqs=config.max_num_seqs,
        max_num_queued_reqs=config.max_num_queued_reqs,
        num_blocks=num_ranks * model.kv.num_blocks,
        block_size=config.block_size,
        device=model.device,
        dtype=str(model.dtype).removeprefix("torch."),
        weights_bytes=model.weights_bytes,
        kv_bytes=num_ranks * model.kv_bytes,
        num_experts=0 if model.spec.moe is None else model.spec.moe.num_experts,
    )


def _ready_event(ready: EngineReady, model: ServedModel) -> dict[str, Any]:
    return {
        "event": "ready",
        "device": ready.device,
        "dtype": ready.dtype,
        "weights_bytes": ready.weights_bytes,
        "kv_bytes": ready.kv_bytes,
        "num_blocks": ready.num_blocks,
        "block_size": ready.block_size,
        "max_model_len": ready.max_model_len,
        "model_max_len": model.spec.max_position,
        "no_compiled_kernels": native_kernels_absence() if model.device == "cpu" else None,
    }


def _monitor(
    context: RunContext,
    spec: DecoderSpec,
    recording: ExpertRecording | None,
    sources: ExpertSources,
) -> ExpertMonitor | None:
    if spec.moe is None:
        return None
    num_ranks = context.config.expert_parallel_size
    facts = ExpertFacts(spec.moe_layers, spec.moe.num_experts, spec.moe.gate.top_k, num_ranks)
    return ExpertMonitor(facts, recording, sources, Path(context.run_dir))


def _save(recording: ExpertRecording) -> None:
    try:
        for file, tokens in recording.close().items():
            log.info("experts_saved", file=file, tokens=tokens)
    except OSError as error:
        log.error("experts_not_saved", error=str(error))


def build_scheduler(
    config: ServeConfig,
    kv: KvBudget,
    device: str = "cpu",
    *,
    run_ahead: bool = False,
    merge_annotations: MergeAnnotations | None = None,
) -> tuple[Scheduler, list[PrefixCache]]:
    """The scheduler and the caches it plans with, one per rank. Raises ConfigError for limits that contradict."""
    budget = step_budget(config, device)
    if budget < config.max_num_seqs:
        raise ConfigError(f"--max-num-batched-tokens {budget} is below --max-num-seqs {config.max_num_seqs}.")
    caches = [
        PrefixCache(kv.num_blocks, config.block_size, caching=config.enable_prefix_caching)
        for _ in range(config.expert_parallel_size)
    ]
    scheduler = Scheduler(
        caches,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_model_len=kv.max_model_len,
        policy=config.scheduling_policy,
        run_ahead=run_ahead,
        merge_annotations=merge_annotations,
    )
    return scheduler, caches
