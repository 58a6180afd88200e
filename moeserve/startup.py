"""From a run context to a serving engine: configuration, weights, KV memory, sockets, in this order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
import zmq

from moeserve.config import ConfigError, ServeConfig
from moeserve.engine import Engine
from moeserve.engine_socket import EngineSocket, HeartbeatThread
from moeserve.kv_budget import KvBudget, plan_kv
from moeserve.kv_pool import KVPool, kv_block_bytes
from moeserve.memory import available_bytes
from moeserve.messages import EngineReady
from moeserve.model_runner import ModelRunner
from moeserve.models.errors import ModelError
from moeserve.models.families import build_spec
from moeserve.models.generation_config import GenerationDefaults, load_generation_defaults
from moeserve.models.hf_config import load_config
from moeserve.models.spec import DecoderSpec
from moeserve.models.weight_plan import weights_num_bytes
from moeserve.models.weights import load_decoder
from moeserve.run_context import RunContext
from moeserve.scheduler import Scheduler
from radix_cache import PrefixCache

CPU_BATCHED_TOKENS = 256
Report = Callable[[dict[str, Any]], None]

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to execute plans."""

    spec: DecoderSpec
    defaults: GenerationDefaults
    runner: ModelRunner
    kv: KvBudget
    dtype: torch.dtype
    weights_bytes: int
    kv_bytes: int


def run_engine(context: RunContext, report: Report, stop: threading.Event) -> None:
    """Loads the model, tells `report` of progress and readiness, and serves until `stop` is set.

    Raises ModelError or ConfigError, one sentence each, for what cannot be served.
    """
    config = context.config
    model = load_model(Path(context.model_dir), config, report)
    scheduler, cache = build_scheduler(config, model.kv)
    ready = EngineReady(
        pid=os.getpid(),
        model_hash=context.model_hash,
        max_model_len=model.kv.max_model_len,
        vocab_size=model.spec.vocab_size,
        eos_token_ids=list(model.defaults.eos_token_ids or model.spec.eos_token_ids),
        default_sampling=model.defaults.sampling,
        max_num_seqs=config.max_num_seqs,
        max_num_queued_reqs=config.max_num_queued_reqs,
        num_blocks=model.kv.num_blocks,
        block_size=config.block_size,
        device="cpu",
        dtype=str(model.dtype).removeprefix("torch."),
        weights_bytes=model.weights_bytes,
        kv_bytes=model.kv_bytes,
    )
    sockets: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = EngineSocket(sockets, context.engine_address, context.incarnation)
    engine = Engine(socket, scheduler, cache, model.runner, ready)
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
        }
    )
    try:
        engine.run(stop)
    finally:
        heartbeat.stop()
        socket.close()
        sockets.term()


def load_model(directory: Path, config: ServeConfig, report: Report) -> LoadedModel:
    """Reads configuration and weights, takes KV memory and warms up."""
    if config.threads:
        torch.set_num_threads(config.threads)
    spec = build_spec(load_config(directory))
    dtype = torch.float32 if config.dtype == "auto" else getattr(torch, config.dtype)
    name = str(dtype).removeprefix("torch.")
    weights_bytes = weights_num_bytes(spec, dtype.itemsize)
    free = available_bytes()
    if weights_bytes > free:
        raise ModelError(
            f"The weights take {weights_bytes / 2**30:.1f} GiB as {name}, but only {free / 2**30:.1f} GiB of "
            "memory are free."
        )
    kv = plan_kv(
        block_bytes=kv_block_bytes(spec.kv_layers, config.block_size, dtype),
        block_size=config.block_size,
        available_bytes=free - weights_bytes,
        kv_cache_memory=config.kv_cache_memory,
        model_max_len=spec.max_position,
        max_model_len=config.max_model_len,
    )

    stage = f"loading {weights_bytes / 2**30:.1f} GiB of weights as {name}"
    if spec.quantization is not None:
        stage += f", expanded from {spec.quantization.kind}"

    def progress(done: int, total: int) -> None:
        report({"event": "loading", "done": done, "total": total, "stage": stage})

    decoder = load_decoder(directory, spec, dtype=dtype, max_model_len=kv.max_model_len, progress=progress)
    runner = ModelRunner(decoder, KVPool(spec.kv_layers, kv.num_blocks, config.block_size, dtype))
    runner.warm_up(_step_budget(config))
    return LoadedModel(
        spec,
        load_generation_defaults(directory),
        runner,
        kv,
        dtype,
        weights_bytes,
        kv.num_blocks * kv_block_bytes(spec.kv_layers, config.block_size, dtype),
    )


def build_scheduler(config: ServeConfig, kv: KvBudget) -> tuple[Scheduler, PrefixCache]:
    """The scheduler and the cache it plans with. Raises ConfigError for limits that contradict each other."""
    budget = _step_budget(config)
    if budget < config.max_num_seqs:
        raise ConfigError(f"--max-num-batched-tokens {budget} is below --max-num-seqs {config.max_num_seqs}.")
    cache = PrefixCache(kv.num_blocks, config.block_size, caching=config.enable_prefix_caching)
    scheduler = Scheduler(
        cache,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_queued_reqs=config.max_num_queued_reqs,
        max_model_len=kv.max_model_len,
        policy=config.scheduling_policy,
    )
    return scheduler, cache


def _step_budget(config: ServeConfig) -> int:
    return config.max_num_batched_tokens or max(CPU_BATCHED_TOKENS, config.max_num_seqs)
