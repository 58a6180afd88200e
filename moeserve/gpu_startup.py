"""From a run context to a serving engine whose model runs on a GPU."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from moeserve.cuda.startup import GpuSettings, load_gpu_model
from moeserve.device import step_budget
from moeserve.executor import LocalLauncher
from moeserve.expert_service.monitor import ExpertSources
from moeserve.model_loading import Report, ServedModel
from moeserve.models.families import build_spec
from moeserve.models.generation_config import load_generation_defaults
from moeserve.models.hf_config import load_config
from moeserve.run_context import RunContext
from moeserve.serving import serve


def run_on_gpu(context: RunContext, report: Report, stop: threading.Event) -> None:
    """`run_engine` on the CUDA device of this process, planning ahead. Routing is not recorded there."""
    directory, config = Path(context.model_dir), context.config
    spec = build_spec(load_config(directory))
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    settings = GpuSettings(
        config.block_size,
        config.max_num_seqs,
        step_budget(config, "cuda"),
        config.max_model_len,
        config.kv_cache_memory,
        config.gpu_memory_utilization,
        config.enforce_eager,
    )

    def progress(done: int, total: int) -> None:
        report({"event": "loading", "done": done, "total": total, "stage": "loading weights onto the GPU"})

    loaded = load_gpu_model(directory, spec, dtype, settings, progress, torch.device("cuda", 0))
    defaults = load_generation_defaults(directory)
    model = ServedModel(spec, defaults, loaded.kv, dtype, loaded.weights_bytes, loaded.kv_bytes, "cuda")
    serve(context, model, LocalLauncher(loaded.runner), report, stop, None, ExpertSources())
