"""The part of assembling a rank that is particular to a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from experts.routing.tap import RoutingTap
from kernels.cpu.library import native_kernels
from kernels.moe import moe_experts_partial
from kernels.ops import CpuOps, Ops
from kernels.packed_experts import Experts, PackedExperts
from moeserve.config import ServeConfig
from moeserve.device import step_budget
from moeserve.engine.experts.memory import CpuResidentModel
from moeserve.engine.memory_plan import ModelPlan, cpu_kv_dtype
from moeserve.engine.rank import Group, Prepared
from moeserve.engine.ranks.partners import RankPartners
from moeserve.engine.ranks.pipe import Pipe
from moeserve.engine.ranks.together import StepRows
from moeserve.model.decoder import StepDecoder
from moeserve.model.expert_weights import LayerExperts
from moeserve.model.kv_pool import KVPool, kv_pool_bytes
from moeserve.model.runner import ModelRunner
from moeserve.model.spec import DecoderSpec
from moeserve.model.state_pool import StatePool, state_row_bytes
from moeserve.settings.drafts import parse_speculative

if TYPE_CHECKING:
    from experts.parallel.dispatch import Compute  # It imports torch.distributed, which a single rank does not need.


class CpuBody:
    """Implements `moeserve.engine.assemble.Body` on a CPU."""

    captured_sizes: Sequence[int] = ()

    def __init__(
        self,
        plan: ModelPlan,
        config: ServeConfig,
        resident: CpuResidentModel | None,
        num_packers: int | None,
        pipe: Pipe | None = None,
        partners: RankPartners | None = None,
    ) -> None:
        """num_packers: see `CpuOps`. pipe: None where this rank has all layers. partners: None where it has all of a
        layer's weights but experts."""
        rounding = plan.rounding
        self.ops: Ops = CpuOps(rounding.arithmetic, narrow_rows=rounding.narrow, num_packers=num_packers)
        self.resident = resident
        self._plan = plan
        self._config = config
        self._pipe, self._partners = pipe, partners
        # Each rank that shares the layers computes another step.
        self.depth = 0 if pipe is None else pipe.num_stages - 1

    @property
    def _is_compiled(self) -> bool:
        """True if nothing prepares itself for a number of rows at its first product."""
        plan = self._plan
        return plan.dtype == torch.float32 and isinstance(plan.spec, DecoderSpec) and native_kernels() is not None

    def compute_of(self, layer: int) -> Compute[Any]:
        return moe_experts_partial if self.resident is None else self.resident.layers[layer].partial

    def take_expert(self, reader: LayerExperts) -> Tensor:
        return reader.read(0)

    def install_expert(self, experts: Experts, slot: int, taken: Tensor) -> None:
        assert isinstance(experts, PackedExperts)
        experts.replace(slot, taken)

    def record_loaded(self) -> None:
        """Do nothing: the memory plan knows the size of the weights."""

    def meet(self, decoder: StepDecoder, group: Group) -> None:
        """Do nothing: no kernel is compiled at its first call."""

    def prepare(self, decoder: StepDecoder, tap: RoutingTap | None, group: Group | None) -> Prepared:
        plan, block_size = self._plan, self._config.block_size
        kv, pipe = plan.kv, self._pipe
        shared = self._partners or pipe
        part = plan.spec if shared is None else shared.part
        kv_dtype = cpu_kv_dtype(self._config, plan.spec, plan.dtype, plan.rounding)
        pool = KVPool(part.kv_layers, kv.num_blocks, block_size, kv_dtype, num_window_blocks=kv.num_window_blocks)
        states = part.state_layers
        state_pool = StatePool(states, kv.num_state_rows, plan.dtype) if states else None
        num_drafts = parse_speculative(self._config.speculative_config).num_predicted_tokens
        samples = pipe is None or pipe.stage.is_last
        runner = ModelRunner(decoder, pool, tap, state_pool, num_drafts, samples=samples)

        def begin_step(num_rows: int) -> None:
            if group is not None:
                count = self._config.tensor_parallel_size
                group.steps.begin(StepRows.alike(self._config.expert_parallel_size, num_rows, 1).of_first_ranks(count))

        # Each further token would load experts.
        only_size = 1 if self.resident is not None and self._is_compiled and group is None else None
        measured = runner.warm_up(step_budget(self._config), begin_step, only_size)
        if pipe is not None:
            measured = pipe.whole_steps(measured)
        # Of all ranks that have parts of a block.
        parts = [plan.spec] if self._partners is None else self._partners.parts
        kv_bytes = sum(
            kv_pool_bytes(spec.kv_layers, kv.num_blocks, kv.num_window_blocks, block_size, kv_dtype) for spec in parts
        )
        row_bytes = sum(state_row_bytes(spec.state_layers, plan.dtype) for spec in parts)
        weights_bytes = plan.weights_bytes
        return Prepared(runner, kv, kv_bytes, weights_bytes, _release_nothing, row_bytes, pool, state_pool, measured)


def _release_nothing() -> None:
    """Do nothing: a runner on a CPU holds nothing of the group."""
