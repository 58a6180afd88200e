"""The stages share this: sizes, folders, the environment of services, and the services that run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_serve.folders import LARGE, write_folder
from benchmarks.gpu_serve.service import ROOT, Popen, Service
from moeserve.engine.gpu_check.models import CONFIGS


@dataclass(frozen=True, slots=True)
class Scale:
    """The sizes of a run. interpret: Triton's interpreter stands in for a GPU, and no time means anything.

    streams, tokens: of the load. prompts: lengths in tokens. memory_layers: of the model whose experts do not fit.
    """

    interpret: bool
    model: Mapping[str, Any]
    settings: tuple[str, ...]
    streams: tuple[int, ...]
    tokens: int
    prompts: tuple[int, ...]
    memory_layers: int
    expert_memory: str
    kv_memory: str
    ready_within: float


ON_GPU = Scale(
    interpret=False,
    model=LARGE,
    settings=("--slo", "ttft:60s", "--num-frontends", "2"),
    streams=(1, 16, 64, 256),
    tokens=192,
    prompts=(1024, 8192, 32768),
    memory_layers=12,
    expert_memory="7GiB",
    kv_memory="1GiB",
    ready_within=150.0,
)
_FEW = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
_TINY = {**CONFIGS["qwen3_moe"], **_FEW, "num_experts": 4, "vocab_size": 320, "max_position_embeddings": 256}
_TINY_SETTINGS = (
    "--max-num-seqs",
    "4",
    # A start computes the largest step, and long prompts are computed in parts of it.
    "--max-num-batched-tokens",
    "32",
    "--max-model-len",
    "160",
    "--block-size",
    "16",
)
INTERPRETED = Scale(
    interpret=True,
    model=_TINY,
    settings=(*_TINY_SETTINGS, "--kv-cache-memory", "1MiB", "--slo", "ttft:600s"),
    streams=(2,),
    tokens=2,
    prompts=(24,),
    memory_layers=1,
    expert_memory="32KiB",
    kv_memory="8KiB",
    ready_within=300.0,
)


class Lab:
    """Starts services, and ends them with their stage."""

    def __init__(self, scale: Scale, out: Path, scratch: Path, popen: Popen = subprocess.Popen) -> None:
        """out: receives logs. scratch: for model folders and caches. popen: starts services."""
        self.scale, self.out, self.scratch, self._popen = scale, out, scratch, popen
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        if scale.interpret:
            paths.insert(0, str(ROOT / "tests" / "support" / "interpreted_gpu"))
        self.environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
        self._running: list[Service] = []
        self._large: Service | None = None

    def folder(self, name: str, config: Mapping[str, Any]) -> Path:
        folder = self.scratch / "models" / name
        return folder if folder.exists() else write_folder(folder, config)

    def serve(self, name: str, config: Mapping[str, Any], *settings: str) -> Service:
        """Start a service of a model; `end_stage` ends it."""
        usual = ("--response-store", "memory", "--speculative-config", "none", "--engine-timeout", "120")
        service = Service(
            self.folder(name, config),
            self.out / f"{name}-{len(list(self.out.glob(f'{name}-*.log')))}.log",
            *usual,
            *settings,
            environment=self.environment,
            ready_within=self.scale.ready_within,
            popen=self._popen,
        )
        self._running.append(service)
        return service

    def large(self) -> Service:
        """Return the service of the large model, which stages share."""
        if self._large is None or self._large.process.poll() is not None:
            self._large = self.serve("large", self.scale.model, "--device", "cuda", *self.scale.settings)
        return self._large

    def end_stage(self, *, keeps: bool) -> None:
        """See `benchmarks.gpu_serve.run.Closing`: only the large model's service is kept."""
        kept = self._large if keeps else None
        for service in self._running:
            if service is not kept and service.process.poll() is None:
                service.stop()
        self._running = [] if kept is None else [kept]
        self._large = kept
