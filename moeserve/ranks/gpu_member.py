"""A rank of several whose model runs on a GPU, one rank per device.

Importing this loads Triton. Where the device is a CPU (Triton's interpreter), the same code runs over gloo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog
import torch

from experts.collectives import Collectives
from experts.dispatch import Compute, ExpertParallel
from kernels.activation import Activation
from kernels.gpu.moe_experts import TritonMoe
from kernels.gpu.moe_weights import GpuExperts
from moeserve.cuda.expert_kernels import expert_configs, expert_storage, triton_moe
from moeserve.cuda.expert_warm_up import launch_expert_variants
from moeserve.cuda.gpu_model import (
    GpuSettings,
    allocated_bytes,
    compute_largest_step,
    forget_peak,
    free_for_kv,
    gate_tap,
    make_runner,
)
from moeserve.cuda.launch_variants import StepShape
from moeserve.cuda.weights import load_gpu_decoder
from moeserve.expert_service.links import CountedRunner
from moeserve.kv_budget import share_kv
from moeserve.kv_pool import kv_block_bytes
from moeserve.model_loading import ModelPlan, ServedModel, owned_experts
from moeserve.models.generation_config import load_generation_defaults
from moeserve.models.tensor_reader import Progress

log = structlog.get_logger(__name__)

# Ranks compile the kernels each for itself, and not equally fast.
_SECONDS_TO_COMPILE = 600.0


class GpuMember:
    """See `moeserve.ranks.members.RankMember`. All experts of a rank are in its device's memory.

    Weights are loaded at once, memory for KV is taken in `warm_up`, which all ranks do together.
    """

    prefetcher = None
    lent = None
    migrator = None

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
        """shape: of dispatch. timeout: seconds that ranks may be apart once they serve."""
        spec, device = plan.spec, collectives.device
        assert plan.placement is not None
        assert spec.moe is not None
        # Graphs do not record what ranks send each other.
        settings = replace(settings, enforce_eager=True)
        self._directory, self._plan, self._settings = directory, plan, settings
        self._shape, self._timeout = shape, timeout
        self.collectives = collectives
        self.dispatch_shape: str | None = None
        owned = owned_experts(spec, plan.placement, collectives.rank)
        storage = expert_storage(spec, plan.dtype, settings.expert_quantization)
        self._configs = configs = expert_configs(spec, storage, device)
        assert configs is not None
        num_slots = max(len(owned(layer)) for layer in spec.moe_layers)
        self._max_rows = settings.max_num_batched_tokens
        moe = triton_moe(configs, device, plan.dtype, self._max_rows, num_slots)
        self._compute = in_pieces(moe, self._max_rows)
        self.experts = ExpertParallel(
            collectives,
            plan.placement,
            spec.moe_layers,
            last_layer=spec.num_layers - 1,
            compute=self._compute,
            for_devices=True,
        )
        self._tap = tap = gate_tap(spec, settings)
        self._decoder = load_gpu_decoder(
            directory,
            spec,
            dtype=plan.dtype,
            device=device,
            dispatch_of=self.experts.dispatch_of if tap is None else tap.around(self.experts.dispatch_of),
            storage=storage,
            owned_experts=owned,
            max_model_len=settings.max_model_len,
            progress=progress,
        )
        self._weights_bytes = allocated_bytes(device)
        forget_peak(device)

    def meet_peers(self, lent: Sequence[object]) -> None:
        """No memory is lent."""

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Takes the shape of dispatch that was asked for, or the faster one, then memory for KV, of which every rank
        gets as much as the one with the least; compiles all kernels. Raises ConfigError where nothing is left for KV.
        """
        spec, dtype, settings = self._plan.spec, self._plan.dtype, self._settings
        self.collectives.be_patient(_SECONDS_TO_COMPILE)
        self._launch_experts()
        self._choose_shape()
        compute_largest_step(self._decoder, settings, self._begin_alike)
        memory = settings.kv_cache_memory or free_for_kv(self.collectives.device, settings)
        block_bytes = kv_block_bytes(spec.kv_layers, settings.block_size, settings.kv_dtype or dtype)
        kv = share_kv(
            self.collectives.agree_on_least(memory),
            block_bytes=block_bytes,
            block_size=settings.block_size,
            model_max_len=spec.max_position,
            max_model_len=settings.max_model_len,
        )
        runner = make_runner(
            self._decoder, kv, settings, self._configs, self._begin_alike, self.collectives.waits.wait_for, self._tap
        )
        self.runner = CountedRunner(runner, self.experts.sent)
        self.model = ServedModel(
            spec,
            load_generation_defaults(self._directory),
            kv,
            dtype,
            self.collectives.add_up(self._weights_bytes),
            kv.num_blocks * block_bytes,
            "cuda",
        )
        self.experts.forget_counts()
        self.collectives.be_patient(self._timeout)

    def memory_stats(self) -> None:
        """All experts are in memory."""

    def close(self) -> None:
        self.collectives.close()

    def _begin_alike(self, shape: StepShape) -> None:
        """Every rank computes a step of the same shape."""
        num_ranks = self.collectives.num_ranks
        self.experts.begin_step([shape.num_tokens] * num_ranks, [shape.num_logits] * num_ranks)

    def _launch_experts(self) -> None:
        if self.collectives.device.type == "cuda" and self._configs is not None:
            moe = self._plan.spec.moe
            assert moe is not None
            launch_expert_variants(
                self._compute, self._decoder.experts[0], self._decoder, moe, self._configs.variant, self._max_rows
            )

    def _choose_shape(self) -> None:
        shape, moe = self._shape, self._plan.spec.moe
        assert moe is not None
        if shape == "auto":
            seconds = self.experts.measure(
                self._plan.spec.hidden_size, moe.gate.top_k, self._plan.dtype, self._decoder.experts, moe.activation
            )
            shape = min(seconds, key=seconds.__getitem__)
            if self.collectives.rank == 0:
                log.info("dispatch_measured", took=shape, **{name: f"{1000 * s:.2f} ms" for name, s in seconds.items()})
        self.experts.use(shape)
        self.dispatch_shape = shape


def in_pieces(moe: TritonMoe, max_rows: int) -> Compute[GpuExperts]:
    """What a rank computes of arrived rows: all ranks may send theirs at once, scratch is for `max_rows` of them.

    A row's bits depend on its piece only through the configuration that a number of rows is computed with.
    """

    def compute(
        x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, experts: GpuExperts, activation: Activation
    ) -> torch.Tensor:
        if len(x) <= max_rows:
            return moe.partial(x, slots, weights, experts, activation)
        pieces = zip(x.split(max_rows), slots.split(max_rows), weights.split(max_rows), strict=True)
        return torch.cat([moe.partial(*piece, experts, activation) for piece in pieces])

    return compute
