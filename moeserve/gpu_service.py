"""From a run context to a serving engine whose model runs on a GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from moeserve.config import ServeConfig
from moeserve.device import available_bytes, current_gpu, step_budget
from moeserve.experts.load_ahead import prefetches_on_gpu
from moeserve.experts.monitor import ExpertSources, expert_strategy
from moeserve.experts.observe import ExpertRecording, plan_recording, signs_prefixes
from moeserve.experts.settings import measured_load
from moeserve.model.families import build_spec, load_config, load_generation_defaults
from moeserve.model.gpu_expert_memory import GpuExpertSettings
from moeserve.model.gpu_kernels import kv_dtype_of
from moeserve.model.gpu_model import GpuModel, GpuSettings, load_gpu_model
from moeserve.model.spec import DecoderSpec
from moeserve.model.tensor_reader import Progress
from moeserve.model_loading import Report, ServedModel
from moeserve.rank import Rank
from moeserve.serving import serve
from moeserve.steps import LocalExecutor
from moeserve.wire import RunContext

# Of the host memory that is free, all experts of a model may take so much before they are read from disk instead.
_SHARE_FOR_EXPERTS = 0.8


def run_on_gpu(context: RunContext, report: Report, stop: threading.Event) -> None:
    """`run_engine` on the CUDA device of this process, planning ahead."""
    directory, config = Path(context.model_dir), context.config
    spec = build_spec(load_config(directory))
    recording = plan_recording(config, directory, spec)
    dtype = gpu_dtype(config)
    settings = gpu_settings(config, expert_settings(directory, spec, config))
    loaded = load_gpu_model(directory, spec, dtype, settings, loading_progress(report), current_gpu())
    defaults = load_generation_defaults(directory)
    model = ServedModel(spec, defaults, loaded.kv, dtype, loaded.weights_bytes, loaded.kv_bytes, "cuda")
    rank, sources = _observed(loaded, directory, config, settings)
    recorded = None if recording is None else ExpertRecording(recording)
    try:
        serve(context, model, LocalExecutor(rank), report, stop, recorded, sources, depth=1)
    finally:
        if loaded.experts is not None:
            loaded.experts.memory.close()


def gpu_dtype(config: ServeConfig) -> torch.dtype:
    """What a model is computed in on a GPU."""
    return torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)


def gpu_settings(config: ServeConfig, experts: GpuExpertSettings | None = None) -> GpuSettings:
    """What the settings say of one GPU. experts: where not all of them are in its memory."""
    return GpuSettings(
        config.block_size,
        config.max_num_seqs,
        step_budget(config, "cuda"),
        config.max_model_len,
        config.kv_cache_memory,
        config.gpu_memory_utilization,
        config.enforce_eager,
        experts,
        hears_gates=config.record_experts,
        kv_dtype=kv_dtype_of(config.kv_cache_dtype),
        expert_quantization=config.expert_quantization,
    )


def loading_progress(report: Report) -> Progress:
    """Tells `report` how much has been loaded."""
    return lambda done, total: report(
        {"event": "loading", "done": done, "total": total, "stage": "loading weights onto the GPU"}
    )


def expert_settings(directory: Path, spec: DecoderSpec, config: ServeConfig) -> GpuExpertSettings | None:
    """What the settings say of experts that are not all in a GPU's memory: of the host memory that is free now, each
    rank of this machine may take its share. None where `--expert-memory` is not given. Raises ConfigError."""
    if config.expert_memory is None:
        return None
    num_here = config.expert_parallel_size // config.nnodes
    # Where experts move from rank to rank, every rank finds them all on disk.
    host_bytes = 0 if config.rebalance_interval else int(_SHARE_FOR_EXPERTS * available_bytes() / num_here)
    return GpuExpertSettings(
        config.expert_memory,
        host_bytes,
        config.expert_policy,
        None if config.expert_store_dir is None else Path(config.expert_store_dir).expanduser(),
        config.expert_store_bandwidth,
        measured_load(directory, config, (len(spec.moe_layers), 0 if spec.moe is None else spec.moe.num_experts)),
        config.expert_prefetch,
        signs_prefixes(config),
    )


def _observed(
    loaded: GpuModel, directory: Path, config: ServeConfig, settings: GpuSettings
) -> tuple[Rank, ExpertSources]:
    """What computes steps, and whom to ask about the experts."""
    experts = loaded.experts
    if experts is None:
        return Rank(loaded.runner, loaded.observers), ExpertSources()
    listener, observers = prefetches_on_gpu(loaded.decoder, experts, directory, settings)
    loaded.observers.extend(observers)
    return Rank(loaded.runner, loaded.observers), ExpertSources(
        memory=lambda: [experts.memory.stats()],
        prefetches=listener is not None,
        strategy=lambda: expert_strategy(config, listener),
    )
