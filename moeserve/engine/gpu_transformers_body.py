"""The part of assembling a rank on a GPU for a model on transformers' code. Importing this module loads Triton.

Decode steps are not captured as CUDA graphs: modelling code asks for numbers on the host in the middle of a step.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experts.routing.tap import RoutingTap
from kernels.gpu.ops import GpuOps
from kernels.packed_experts import Experts
from moeserve.engine.rank import Group, Prepared
from moeserve.model.decoder import KvPools, StepDecoder
from moeserve.model.expert_store import stored_experts
from moeserve.model.expert_weights import LayerExperts
from moeserve.model.gpu.kernels import expert_configs, expert_storage, triton_moe
from moeserve.model.gpu.model import GpuSettings, allocated_bytes, forget_peak, free_for_kv, kv_blocks
from moeserve.model.gpu.runner import GpuModelRunner, HeardDecoder
from moeserve.model.gpu.setup import launch_all_draws, seconds_on_gpu
from moeserve.model.gpu.shaped_batches import ShapedBatches
from moeserve.model.hf import check
from moeserve.model.hf.decoder import TransformersDecoder
from moeserve.model.hf.spec import TransformersSpec
from moeserve.model.kv_pool import KVPool, kv_pool_bytes
from moeserve.model.rounding import Rounding
from moeserve.model.spec import Progress
from moeserve.model.state_pool import StatePool
from moeserve.plan import Chunk, StateUse

# Tokens of the prompts that are computed before the first request, beside the largest: each may be its own variant.
_WARM_UP_SIZES = (1, 2, 16, 64)
_NO_RANKS = "ranks share no model on transformers' code on GPUs"


class TransformersGpuBody:
    """Implements `moeserve.engine.assemble.Body`. On a CPU device Triton's interpreter runs the same code."""

    depth = 1
    resident = None
    captured_sizes: Sequence[int] = ()

    def __init__(
        self,
        directory: Path,
        spec: TransformersSpec,
        dtype: torch.dtype,
        rounding: Rounding,
        settings: GpuSettings,
        device: torch.device,
        told: Progress,
    ) -> None:
        """rounding: of the checkpoint's weights. told: hears what is done between loading and the first request.

        Raise ConfigError or ModelError.
        """
        self._spec, self._dtype, self._settings, self._device = spec, dtype, settings, device
        shapes = () if spec.moe is None else stored_experts(directory, spec, dtype, rounding).shapes()
        storage = expert_storage(spec, dtype, settings.expert_form, shapes)
        configs = expert_configs(spec, storage, device)
        max_rows = max(settings.max_num_batched_tokens, check.MAX_ROWS)
        moe = None if configs is None else triton_moe(configs, device, dtype, max_rows)
        self.ops = GpuOps(device, storage, moe)
        self._weights_bytes = 0
        self._told, self._began, self._seconds = told, time.monotonic(), dict[str, float]()

    def compute_of(self, layer: int) -> Any:
        raise NotImplementedError(_NO_RANKS)

    def take_expert(self, reader: LayerExperts) -> Any:
        raise NotImplementedError(_NO_RANKS)

    def install_expert(self, experts: Experts, slot: int, taken: Any) -> None:
        raise NotImplementedError(_NO_RANKS)

    def meet(self, decoder: StepDecoder, group: Group) -> None:
        raise NotImplementedError(_NO_RANKS)

    def record_loaded(self) -> None:
        self._passed("load_s")
        self._weights_bytes = allocated_bytes(self._device)
        forget_peak(self._device)

    def _passed(self, part: str) -> None:
        """Count the time since the last call, or since the body was opened, as a part of the start."""
        now = time.monotonic()
        self._seconds[part], self._began = round(now - self._began, 1), now

    @torch.inference_mode()
    def prepare(self, decoder: StepDecoder, tap: RoutingTap | None, group: Group | None) -> Prepared:
        """Check the modelling code, compute the largest step, allocate the memory that is left for KV, and compile.

        Raise ConfigError if no memory is left, ModelError for a model that cannot be served.
        """
        assert isinstance(decoder, TransformersDecoder)
        settings, size = self._settings, self._settings.block_size
        self._told("checking the modelling code", 0, 0)
        self.settle(decoder)
        self._passed("check_s")
        self._told("computing the largest step", 0, 0)
        batches = self._batches(size, decoder.max_model_len)
        largest = min(settings.max_num_batched_tokens, decoder.max_model_len)
        num_blocks = -(-largest // size)
        steps = _BlankSteps(decoder, KVPool(self._spec.kv_layers, num_blocks, size, self._dtype, self._device), batches)
        steps.run([largest] * max(1, settings.max_num_batched_tokens // largest))
        del steps
        self._passed("largest_step_s")
        memory = settings.kv_cache_memory or free_for_kv(self._device, settings, 0)
        kv = kv_blocks(self._spec, self._dtype, settings, memory)
        kv_bytes = kv_pool_bytes(self._spec.kv_layers, kv.num_blocks, kv.num_window_blocks, size, self._dtype)
        pool = KVPool(self._spec.kv_layers, kv.num_blocks, size, self._dtype, self._device, kv.num_window_blocks)
        state_pool = self._state_pool(kv.num_state_rows)
        measured = self._compile(_BlankSteps(decoder, pool, batches, state_pool), min(largest, kv.max_model_len))
        self._passed("kernels_s")
        runner = GpuModelRunner(
            HeardDecoder(decoder, decoder.arrange_pools(pool.layers, state_pool), tap),
            pool,
            batches,
            decode=None,
            state_pool=state_pool,
            clears_blocks=True,
            measured=measured,
        )
        row_bytes = 0 if settings.states is None else settings.states.row_bytes
        seconds = self._seconds
        return Prepared(
            runner, kv, kv_bytes, self._weights_bytes, runner.close, row_bytes, pool, state_pool, measured, seconds
        )

    def settle(self, decoder: TransformersDecoder) -> None:
        """Have a decoder choose how its mixers are called. Raise UnsupportedModel if none is right."""
        decoder.settle(lambda _: None, self._batches(check.BLOCK_SIZE, check.MAX_LEN).of_chunks)

    def _compile(self, steps: _BlankSteps, largest: int) -> list[tuple[int, float]]:
        """Compute prompts of several sizes, so that no request waits for the compiler; return their seconds, each of
        the second time. Do nothing under the interpreter."""
        if self._device.type != "cuda":
            return []
        self._told("compiling kernels", 0, 0)
        launch_all_draws(steps.decoder)
        measured = []
        largest = min(largest, steps.capacity)
        for count in sorted({min(count, largest) for count in (*_WARM_UP_SIZES, largest)}):
            steps.run([count])
            measured.append((count, seconds_on_gpu(partial(steps.run, [count]))))
        return measured

    def _batches(self, block_size: int, max_model_len: int) -> ShapedBatches:
        settings = self._settings
        return ShapedBatches(self._spec, block_size, max_model_len, settings.max_num_seqs, self._dtype, self._device)

    def _state_pool(self, num_rows: int) -> StatePool | None:
        layers = self._spec.state_layers
        return StatePool(layers, num_rows, self._dtype, self._device) if layers else None


class _BlankSteps:
    """Steps before the first request, over the first blocks and state slot of a pool."""

    def __init__(
        self,
        decoder: TransformersDecoder,
        pool: KVPool,
        batches: ShapedBatches,
        states: StatePool | None = None,
    ) -> None:
        """states: None makes a pool with one slot where the model needs one."""
        layers = decoder.spec.state_layers
        if states is None and layers:
            states = StatePool(layers, 1, decoder.dtype, decoder.device)
        self.decoder, self._batches = decoder, batches
        # Layers with window blocks take the same numbers.
        self._table = array("i", range(min(pool.num_blocks, pool.num_window_blocks or pool.num_blocks)))
        self.capacity = len(self._table) * pool.block_size  # tokens of a prompt
        self._pools: KvPools = decoder.arrange_pools(pool.layers, states)
        self._state = None if states is None else StateUse(0)

    def run(self, lengths: Sequence[int]) -> Tensor:
        """Compute prompts of these lengths, which share their blocks, and return the logits after each.

        Their keys and values have no meaning, and no request may hold the blocks yet.
        """
        vocab_size, chunks, rows = self.decoder.spec.vocab_size, [], []
        for length in lengths:
            # Spread tokens over the vocabulary, so that the gate spreads them over the experts.
            token_ids = array("i", (position * 31 % vocab_size for position in range(length)))
            chunks.append(Chunk("", token_ids, 0, self._table, None, state=self._state))
            rows.append(sum(lengths[: len(chunks)]) - 1)
        logits = self.decoder.forward(self._batches.of_chunks(chunks, rows), self._pools)
        # Penalties and log probabilities each make a copy of the logits in fp32.
        return logits.float().clone().log_softmax(-1)
