"""A rank of several whose model runs on a GPU, one rank per device.

Importing this loads Triton. Where the device is a CPU (Triton's interpreter), the same code runs over gloo.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import structlog
import torch

from experts.collectives import Collectives
from experts.dispatch import ExpertParallel
from experts.observer import AnyObserver
from experts.prefetcher import PrefixListener
from experts.residency import ExpertMemoryStats
from kernels.gpu.moe_config import WeightStorage
from kernels.gpu.ops import GpuOps
from moeserve.cuda.expert_kernels import expert_configs, expert_storage
from moeserve.cuda.expert_warm_up import launch_expert_variants
from moeserve.cuda.gpu_model import (
    GpuSettings,
    allocated_bytes,
    compute_largest_step,
    forget_peak,
    free_for_kv,
    gate_tap,
    kv_blocks,
    make_runner,
)
from moeserve.cuda.runner import GpuModelRunner
from moeserve.cuda.step_arrays import capture_sizes
from moeserve.experts.load_ahead import prefetches_on_gpu
from moeserve.experts.observe import SentCounter
from moeserve.model.checkpoint import OwnedExperts
from moeserve.model.decoder import Decoder
from moeserve.model.families import load_generation_defaults
from moeserve.model.tensor_reader import Progress
from moeserve.model.weights import load_decoder
from moeserve.model_loading import ModelPlan, ServedModel, no_experts, owned_experts
from moeserve.rank import Rank
from moeserve.ranks.gpu_experts import make_gpu_migrator, open_rank_experts
from moeserve.ranks.gpu_steps import GpuSteps
from moeserve.ranks.messages import StepRows, captures_decodes

log = structlog.get_logger(__name__)

# Ranks compile the kernels each for itself, and not equally fast.
_SECONDS_TO_COMPILE = 600.0


class GpuMember:
    """See `moeserve.ranks.members.RankMember`. A rank's experts are in its device's memory, or those that have a slot.

    Weights are loaded at once, memory for KV is taken in `warm_up`, which all ranks do together.
    """

    prefetcher: PrefixListener | None = None
    _captured: GpuModelRunner | None = None

    def __init__(
        self,
        directory: Path,
        plan: ModelPlan,
        settings: GpuSettings,
        collectives: Collectives,
        *,
        shape: str,
        timeout: float,
        progress: Progress | None = None,
    ) -> None:
        """shape: of dispatch, see `captures_decodes`. timeout: seconds that ranks may be apart once they serve."""
        spec, device = plan.spec, collectives.device
        assert plan.placement is not None
        assert spec.moe is not None
        self._directory, self._plan = directory, plan
        self._shape, self._timeout = shape, timeout
        self.collectives = collectives
        self.dispatch_shape: str | None = None
        owned = owned_experts(spec, plan.placement, collectives.rank)
        storage = expert_storage(spec, plan.dtype, settings.expert_quantization)
        configs = expert_configs(spec, storage, device)
        assert configs is not None
        self._configs = configs
        self._observers: list[AnyObserver] = []
        here = open_rank_experts(
            directory,
            plan,
            settings,
            owned,
            storage,
            configs,
            collectives.waits,
            device,
            progress or _silent,
            self._observers,
        )
        self._resident, self._compute = here.resident, here.compute_of(spec.moe_layers[0])
        captures = captures_decodes(shape, eager=settings.enforce_eager, all_resident=here.resident is None)
        if not (captures or settings.enforce_eager or collectives.rank):
            log.info("decode_steps_not_captured", dispatch=shape, all_experts_in_memory=here.resident is None)
        self._settings = replace(settings, enforce_eager=not captures)
        self.experts = ExpertParallel(
            collectives,
            plan.placement,
            spec.moe_layers,
            last_layer=spec.num_layers - 1,
            compute=self._compute,
            local_of=None if here.resident is None else here.compute_of,
            for_devices=True,
        )
        self.steps = GpuSteps(self.experts, collectives)
        self._tap = gate_tap(spec, settings, None if here.resident is None else settings.experts)
        if self._tap is not None:
            self._observers.append(self._tap)
        self._decoder = self._load_decoder(owned if here.resident is None else no_experts, storage, progress)
        self.migrator = make_gpu_migrator(directory, plan, self.experts, owned, storage, self._decoder.experts)
        self._weights_bytes = allocated_bytes(device)
        forget_peak(device)

    def _load_decoder(self, owned: OwnedExperts, storage: WeightStorage, progress: Progress | None) -> Decoder:
        """owned: the experts to load with the rest."""
        return load_decoder(
            self._directory,
            self._plan.spec,
            dtype=self._plan.dtype,
            ops=GpuOps(self.collectives.device, storage),
            dispatch_of=self.experts.dispatch_of,
            observers=self._observers,
            owned_experts=owned,
            max_model_len=self._settings.max_model_len,
            progress=progress,
        )

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Takes the shape of dispatch that was asked for, or the faster one, then memory for KV, of which every rank
        gets as much as the one with the least; compiles all kernels. Raises ConfigError where nothing is left for KV.
        """
        spec, dtype, settings = self._plan.spec, self._plan.dtype, self._settings
        self.collectives.be_patient(_SECONDS_TO_COMPILE)
        self._launch_experts()
        self._choose_shape()
        compute_largest_step(self._decoder, settings, self.steps.begin_alike)
        memory = settings.kv_cache_memory or free_for_kv(self.collectives.device, settings)
        kv, kv_bytes = kv_blocks(spec, dtype, settings, self.collectives.agree_on_least(memory))
        self._captured = make_runner(self._decoder, kv, settings, self._configs, self.steps, self._tap)
        if self._resident is not None:
            self.prefetcher, observers = prefetches_on_gpu(
                self._decoder, self._resident, self._directory, settings, self.experts
            )
            self._observers += observers
        self._observers.append(SentCounter(self.experts.sent))
        self.runner = Rank(self._captured, self._observers)
        self.model = ServedModel(
            spec,
            load_generation_defaults(self._directory),
            kv,
            dtype,
            self.collectives.add_up(self._weights_bytes),
            kv_bytes,
            "cuda",
        )
        self.experts.forget_counts()
        self.collectives.be_patient(self._timeout)

    def begin_step(self, rows: StepRows) -> None:
        self.steps.begin(rows)

    def memory_stats(self) -> ExpertMemoryStats | None:
        return None if self._resident is None else self._resident.memory.stats()

    def close(self) -> None:
        if self._resident is not None:
            self._resident.memory.close()
        if self._captured is not None:
            self._captured.close()
        self.collectives.close()

    def _launch_experts(self) -> None:
        moe, experts = self._plan.spec.moe, self._decoder.experts[0]
        assert moe is not None
        ids = range(experts.gate_up.num_slots) if self._resident is None else sorted(self.experts.experts_here(0))
        max_rows = self._settings.max_num_batched_tokens
        launch_expert_variants(self._compute, experts, self._decoder, moe, self._configs.variant, max_rows, ids)

    def _choose_shape(self) -> None:
        shape, moe = self._shape, self._plan.spec.moe
        assert moe is not None
        if shape == "auto":
            # Experts that are not all in memory would be loaded for it.
            here = self._decoder.experts if self._resident is None else ()
            seconds = self.experts.measure(
                self._plan.spec.hidden_size, moe.gate.top_k, self._plan.dtype, here, moe.activation
            )
            shape = min(seconds, key=seconds.__getitem__)
            if self.collectives.rank == 0:
                log.info("dispatch_measured", took=shape, **{name: f"{1000 * s:.2f} ms" for name, s in seconds.items()})
        sizes = () if self._settings.enforce_eager else capture_sizes(self._settings.max_num_seqs)
        self.steps.use(shape, sizes)
        self.dispatch_shape = shape


def _silent(_done: int, _total: int) -> None:
    """Nobody wants to know how far loading is."""
