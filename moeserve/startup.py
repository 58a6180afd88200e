"""From a run context to a serving engine: configuration, weights, KV memory, sockets, in this order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import zmq

from experts.placement import Placement
from experts.prefetcher import Prefetcher
from experts.routing_tap import RoutingTap
from kernels.cpu.library import native_kernels, native_kernels_absence
from kernels.packed_experts import PackedExperts
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine import Engine
from moeserve.engine_socket import EngineSocket, HeartbeatThread
from moeserve.executor import Executor, LocalExecutor, Runner
from moeserve.expert_monitor import ExpertFacts, ExpertMonitor, ExpertSources
from moeserve.expert_placement import plan_placement
from moeserve.expert_prefetch import PrefetchingRunner, start_prefetching
from moeserve.expert_recording import RecordingExecutor, TappedRunner
from moeserve.expert_residency import ResidencyPlan, ResidentModel, open_experts, plan_residency
from moeserve.expert_statistics import ExpertRecording, open_recording
from moeserve.kv_budget import KvBudget, plan_kv
from moeserve.kv_pool import KVPool, kv_block_bytes
from moeserve.memory import available_bytes
from moeserve.messages import EngineReady
from moeserve.model_runner import ModelRunner
from moeserve.models.checkpoint import read_index
from moeserve.models.errors import ModelError
from moeserve.models.families import build_spec
from moeserve.models.generation_config import GenerationDefaults, load_generation_defaults
from moeserve.models.hf_config import load_config
from moeserve.models.spec import DecoderSpec
from moeserve.models.weight_plan import OwnedExperts, plan_weights
from moeserve.models.weights import DispatchOf, dispatch_here, load_decoder
from moeserve.run_context import RunContext
from moeserve.scheduler import Scheduler
from radix_cache import PrefixCache

CPU_BATCHED_TOKENS = 256
Report = Callable[[dict[str, Any]], None]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """What will be loaded. `kv` is the memory of each rank, `weights_bytes` are those of all ranks together.

    placement: which ranks hold which experts, None where one rank holds all. residency: which part of the experts is in
    memory at a time, None where all are.
    """

    spec: DecoderSpec
    dtype: torch.dtype
    kv: KvBudget
    weights_bytes: int
    placement: Placement | None = None
    residency: ResidencyPlan | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to execute plans. `weights_bytes` are those of all ranks, `kv_bytes` those of this one.

    packed_experts: those that are here, of each layer that has some. experts: None where all experts are in memory.
    prefetcher: if some of them are loaded ahead.
    """

    spec: DecoderSpec
    defaults: GenerationDefaults
    runner: ModelRunner
    kv: KvBudget
    dtype: torch.dtype
    weights_bytes: int
    kv_bytes: int
    packed_experts: Sequence[PackedExperts]
    experts: ResidentModel | None = None
    prefetcher: Prefetcher | None = None

    def step_runner(self) -> Runner:
        """What computes the steps of a rank that is alone."""
        return self.runner if self.prefetcher is None else PrefetchingRunner(self.runner, self.prefetcher)


def run_engine(context: RunContext, report: Report, stop: threading.Event) -> None:
    """Loads the model, tells `report` of progress and readiness, and serves until `stop` is set.

    Raises ModelError or ConfigError, one sentence each, for what cannot be served.
    """
    directory, config = Path(context.model_dir), context.config
    plan = plan_model(directory, config)
    recording = open_recording(config, directory, plan.spec)
    tap = routing_tap(plan.spec, config)
    model = load_model(directory, config, report, plan=plan, tap=tap)
    sources = ExpertSources(memory=None if model.experts is None else model.experts.memory.stats)
    try:
        serve(context, model, LocalExecutor(tapped(model.step_runner(), tap)), report, stop, recording, sources)
    finally:
        if model.experts is not None:
            model.experts.memory.close()


def routing_tap(spec: DecoderSpec, config: ServeConfig) -> RoutingTap | None:
    """What hears the gates of this process, if routing is recorded."""
    if spec.moe is None or not config.record_experts:
        return None
    return RoutingTap(spec.moe_layers, spec.moe.num_experts)


def tapped(runner: Runner, tap: RoutingTap | None) -> Runner:
    return runner if tap is None else TappedRunner(runner, tap)


def serve(
    context: RunContext,
    model: LoadedModel,
    executor: Executor,
    report: Report,
    stop: threading.Event,
    recording: ExpertRecording | None,
    sources: ExpertSources,
) -> None:
    """Runs the engine over an executor until `stop` is set; `model` is that of this process.

    recording: where the routing goes that the results carry. It is saved at the end. sources: whom to ask about the
    experts.
    """
    config = context.config
    if recording is not None:
        recording.placement = sources.placement
        executor = RecordingExecutor(executor, recording)
    num_ranks = config.expert_parallel_size
    scheduler, caches = build_scheduler(config, model.kv)
    ready = EngineReady(
        pid=os.getpid(),
        model_hash=context.model_hash,
        max_model_len=model.kv.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=list(model.defaults.eos_token_ids or model.spec.eos_token_ids),
        default_sampling=model.defaults.sampling,
        max_num_seqs=config.max_num_seqs,
        max_num_queued_reqs=config.max_num_queued_reqs,
        num_blocks=num_ranks * model.kv.num_blocks,
        block_size=config.block_size,
        device="cpu",
        dtype=str(model.dtype).removeprefix("torch."),
        weights_bytes=model.weights_bytes,
        kv_bytes=num_ranks * model.kv_bytes,
        num_experts=0 if model.spec.moe is None else model.spec.moe.num_experts,
    )
    sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = EngineSocket(sockets, context.engine_address, context.incarnation)
    monitor = _monitor(context, model.spec, recording, sources)
    engine = Engine(socket, scheduler, caches, executor, ready, monitor)
    heartbeat = HeartbeatThread(sockets, context.heartbeat_address, context.incarnation, engine.heartbeat)
    heartbeat.start()
    report(
        {
            "event": "ready",
            "device": ready.device,
            "dtype": ready.dtype,
            "weights_bytes": ready.weights_bytes,
            "kv_bytes": ready.kv_bytes,
            "num_blocks": ready.num_blocks,
            "block_size": ready.block_size,
            "max_model_len": ready.max_model_len,
            "model_max_len": model.spec.max_position,
            "no_compiled_kernels": native_kernels_absence(),
        }
    )
    try:
        engine.run(stop)
    finally:
        heartbeat.stop()
        if recording is not None:
            _save(recording)
        socket.close()
        sockets.term()


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
        recording.close()
    except OSError as error:
        log.error("experts_not_saved", error=str(error))


def read_spec(directory: Path, config: ServeConfig) -> tuple[DecoderSpec, torch.dtype]:
    """What the model's configuration says, and the dtype to compute in."""
    return build_spec(load_config(directory)), torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)


def plan_model(directory: Path, config: ServeConfig) -> ModelPlan:
    """Reads the configuration and shares out the memory that is free now, before any rank takes some."""
    spec, dtype = read_spec(directory, config)
    num_ranks = config.expert_parallel_size
    placement: Placement | None = None
    owned: list[OwnedExperts | None] = [None]
    if num_ranks > 1:
        placement = plan_placement(directory, spec, config)
        owned = [owned_experts(spec, placement, rank) for rank in range(num_ranks)]
    residency = plan_residency(directory, spec, dtype, config)
    if residency is not None:
        owned = [no_experts]
    index = read_index(directory)
    narrow = dtype == torch.float32 and native_kernels() is not None
    weights_bytes = sum(
        plan_weights(spec, index, of_rank).loaded_num_bytes(dtype.itemsize, narrow=narrow) for of_rank in owned
    )
    if residency is not None:
        weights_bytes += residency.num_bytes
    name = str(dtype).removeprefix("torch.")
    free = available_bytes()
    if weights_bytes > free:
        raise ModelError(
            f"The weights take {weights_bytes / 2**30:.1f} GiB as {name}, but only {free / 2**30:.1f} GiB of "
            "memory are free."
        )
    kv = plan_kv(
        block_bytes=kv_block_bytes(spec.kv_layers, config.block_size, dtype),
        block_size=config.block_size,
        available_bytes=(free - weights_bytes) // num_ranks,
        kv_cache_memory=config.kv_cache_memory,
        model_max_len=spec.max_position,
        max_model_len=config.max_model_len,
    )
    return ModelPlan(spec, dtype, kv, weights_bytes, placement, residency)


def owned_experts(spec: DecoderSpec, placement: Placement, rank: int) -> OwnedExperts:
    """The experts that a rank loads, by layer of the decoder."""
    placed_layer = {layer: number for number, layer in enumerate(spec.moe_layers)}
    return lambda layer: placement.experts_on(placed_layer[layer], rank)


def no_experts(_: int) -> Sequence[int]:
    """Nothing is loaded with the model: experts are read when they are needed."""
    return ()


def load_model(
    directory: Path,
    config: ServeConfig,
    report: Report,
    *,
    plan: ModelPlan | None = None,
    owned: OwnedExperts | None = None,
    dispatch_of: DispatchOf | None = None,
    tap: RoutingTap | None = None,
) -> LoadedModel:
    """Reads weights and takes KV memory, as planned or for a rank that is alone, which then warms up.

    owned, dispatch_of: see `load_decoder`. A rank of several warms up when all are loaded: they meet in each layer.
    tap: hears what the gates choose.
    """
    if config.threads:
        torch.set_num_threads(config.threads)
    plan = plan or plan_model(directory, config)
    spec, dtype, kv = plan.spec, plan.dtype, plan.kv
    absence = native_kernels_absence()
    if absence is not None:
        log.warning("cpu_kernels_not_compiled", reason=absence, consequence="torch computes, several times slower")

    experts: ResidentModel | None = None
    if plan.residency is not None:
        experts = open_experts(directory, spec, plan.residency, config, report)
    stage = f"loading {plan.weights_bytes / 2**30:.1f} GiB of weights for {str(dtype).removeprefix('torch.')}"
    if spec.quantization is not None:
        stage += f", expanded from {spec.quantization.kind}"

    def progress(done: int, total: int) -> None:
        report({"event": "loading", "done": done, "total": total, "stage": stage})

    dispatch = dispatch_of or (dispatch_here if experts is None else experts.dispatch_of)
    decoder = load_decoder(
        directory,
        spec,
        dtype=dtype,
        max_model_len=kv.max_model_len,
        owned_experts=owned if experts is None else no_experts,
        dispatch_of=dispatch if tap is None else tap.around(dispatch),
        progress=progress,
    )
    runner = ModelRunner(decoder, KVPool(spec.kv_layers, kv.num_blocks, config.block_size, dtype))
    if dispatch_of is None:
        runner.warm_up(step_budget(config))
    prefetcher = None
    if experts is not None:
        experts.memory.forget_counts()
        prefetcher = start_prefetching(config.expert_prefetch, experts, decoder)
    return LoadedModel(
        spec,
        load_generation_defaults(directory),
        runner,
        kv,
        dtype,
        plan.weights_bytes,
        kv.num_blocks * kv_block_bytes(spec.kv_layers, config.block_size, dtype),
        decoder.experts,
        experts,
        prefetcher,
    )


def build_scheduler(config: ServeConfig, kv: KvBudget) -> tuple[Scheduler, list[PrefixCache]]:
    """The scheduler and the caches it plans with, one per rank. Raises ConfigError for limits that contradict."""
    budget = step_budget(config)
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
    )
    return scheduler, caches


def step_budget(config: ServeConfig) -> int:
    """Tokens per step and rank."""
    return config.max_num_batched_tokens or max(CPU_BATCHED_TOKENS, config.max_num_seqs)
