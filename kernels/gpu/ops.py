"""The operations of a decoder on a GPU. They wait for nothing, and a CUDA graph can record them."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernels.activation import Activation, activate
from kernels.attention_plan import AttentionPlan
from kernels.cpu.packing import results_in_order
from kernels.gpu import recurrent
from kernels.gpu.attention import ExtendRun, PagedContext, Partials, Scoring, paged_attention
from kernels.gpu.attention_config import PrefillConfig
from kernels.gpu.attention_kernels import SplitWork
from kernels.gpu.moe import TritonMoe
from kernels.gpu.moe_config import WeightStorage
from kernels.gpu.moe_gate import select_experts
from kernels.gpu.moe_weights import ExpertStorage, GpuExperts, empty_weights
from kernels.gpu.norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from kernels.gpu.packed_linear import PackedLinear, PackedTable
from kernels.gpu.rope_kv import norm_rope_write_kv
from kernels.gpu.sampling import greedy, sample
from kernels.linear import Linear, TorchLinear
from kernels.norm import norm_of_gated_reference
from kernels.ops import AttentionContext, GatedBlock, HeadLinear, NormWeights, StepInputs, Table
from kernels.packed_experts import ExpertMatrices, Experts, ExpertShape
from kernels.sampling import Draw
from kernels.specs import GateSpec
from kernels.transfer import Upload, to_device
from kernels.weight_formats import Matrix, QuantizedRows

_SIGN = 1 << 63
_MOST_READERS = 8
_BYTES_READ_AHEAD = 4 << 30


@dataclass(slots=True)
class Sequences:
    """`kernels.ops.AttentionContext` on a GPU: a step's sequences, sequences with one new token first, and scratch.

    slots: [T] int64, -1 for rows that pad the batch. block_table: [S, N] int32. seq_lens: [S] int32 including new
    tokens, 0 for padding. query_starts: [S + 1] int32. works: by window, a work list of the first `num_decodes`.
    prefill: the configuration for prompts; None without prompts. extends: by window, the short prompts that are
    computed as extends; empty without any.
    """

    slots: Tensor
    block_table: Tensor
    seq_lens: Tensor
    query_starts: Tensor
    num_decodes: int
    block_size: int
    works: Mapping[int | None, SplitWork]
    partials: Partials
    prefill: PrefillConfig | None = None
    extends: Mapping[int | None, ExtendRun] = field(default_factory=dict)


# The shape of a layer's attention: query heads, KV heads, channels of a key and of a value, and the window.
LayerShape = tuple[int, int, int, int, int | None]


@dataclass(slots=True)
class SequencesByShape:
    """`kernels.ops.AttentionContext` on a GPU for a model whose layers may attend in several shapes.

    slots: as in `Sequences`. plan: the same sequences on the host. make: returns them for one shape; each is made once,
    when a layer first attends in it.
    """

    slots: Tensor
    plan: AttentionPlan
    make: Callable[[LayerShape], Sequences]
    made: dict[LayerShape, Sequences] = field(default_factory=dict)

    def of(self, q: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Sequences:
        shape = (q.shape[1], keys.shape[0], keys.shape[2], values.shape[2], window)
        if shape not in self.made:
            self.made[shape] = self.make(shape)
        return self.made[shape]


class GpuOps:
    """`kernels.ops.Ops` on a GPU, or on a CPU under Triton's interpreter.

    storage: the format of stored experts, and the products of all matrices in FP8. moe: computes layers whose experts
    are all local; if None, every layer has a dispatch of its own.
    """

    keeps_narrow = False
    wide_angles = True
    same_bits = False
    short_conv = staticmethod(recurrent.short_conv)
    gated_delta_rule = staticmethod(recurrent.gated_delta_rule)
    mamba1_scan = staticmethod(recurrent.mamba1_scan)
    mamba2_scan = staticmethod(recurrent.mamba2_scan)

    def __init__(self, device: torch.device, storage: WeightStorage, moe: TritonMoe | None = None) -> None:
        self.device = device
        self._storage, self._moe = storage, moe
        self._upload = Upload(device) if device.type == "cuda" else None

    def on_device(self, values: Tensor) -> Tensor:
        return values if self._upload is None else self._upload(values)

    def _rows_on_device(self, rows: QuantizedRows) -> QuantizedRows:
        return QuantizedRows(rows.format, self.on_device(rows.data), rows.depth, rows.order)

    def pack_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Return a product of the vendor's matrix library, or of a kernel that unpacks a quantised weight."""
        if isinstance(weight, QuantizedRows):
            return PackedLinear(
                self._rows_on_device(weight), bias, dtype, self.device, fp8_products=self._storage.fp8_products
            )
        return TorchLinear(self.on_device(weight).to(dtype), bias)

    def pack_table(self, table: Matrix, dtype: torch.dtype) -> Table:
        if isinstance(table, QuantizedRows):
            return PackedTable(self._rows_on_device(table), dtype, self.device)
        on_device = self.on_device(table).to(dtype)
        return lambda ids: on_device[ids]

    def pack_heads(self, weight: Tensor, dtype: torch.dtype) -> HeadLinear:
        return _BatchedHeads(weight.to(dtype).transpose(1, 2).contiguous())

    def pack_gated(self, matrices: ExpertMatrices, activation: Activation, dtype: torch.dtype) -> GatedBlock:
        gate_up, down, gate_up_bias, down_bias = matrices
        return _TwoLinears(
            self.pack_linear(gate_up, gate_up_bias, dtype), self.pack_linear(down, down_bias, dtype), activation
        )

    def pack_experts(
        self, shape: ExpertShape, num_experts: int, matrices_of: Callable[[int], ExpertMatrices]
    ) -> GpuExperts:
        """Store the experts, quantised on the device one expert at a time, while threads read the next ones."""
        storage = ExpertStorage(shape, self._storage)
        with torch.device(self.device):
            stored = [empty_weights(probe, num_experts, self.device) for probe in storage.probes()]
        experts = GpuExperts(stored[0], stored[1])
        reads = (partial(matrices_of, expert) for expert in range(num_experts))
        for expert, matrices in enumerate(results_in_order(reads, self._num_readers(experts))):
            gate_up, down = (self._matrix_on_device(matrix, storage) for matrix in matrices[:2])
            experts.copy_slot(expert, storage.store((gate_up, down, *matrices[2:]), self.device))
        return experts

    def _matrix_on_device(self, matrix: Matrix, storage: ExpertStorage) -> Matrix:
        if isinstance(matrix, Tensor):
            return self.on_device(matrix)
        return matrix if storage.forms is None else self._rows_on_device(matrix)

    def _num_readers(self, experts: GpuExperts) -> int:
        """Return the number of threads that read experts, which hold a few of them in the host's memory."""
        num_bytes = sum(field.nbytes for matrix in (experts.gate_up, experts.down) for field in matrix.fields())
        fitting = _BYTES_READ_AHEAD * experts.gate_up.num_slots // max(1, 3 * num_bytes)
        return max(1, min(_MOST_READERS, fitting, len(os.sched_getaffinity(0))))

    def norm(self, x: Tensor, norm: NormWeights, out: Tensor | None = None) -> Tensor:
        if norm.bias is None:
            return rms_norm(x, norm.weight, norm.eps, out)
        return layer_norm(x, norm.weight, norm.bias, norm.eps, out)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: NormWeights) -> Tensor:
        return recurrent.gated_norm(x, gate, norm.weight, norm.eps)

    def norm_of_gated(self, x: Tensor, gate: Tensor, norm: NormWeights, num_groups: int) -> Tensor:
        return norm_of_gated_reference(x, gate, norm.weight, norm.eps, num_groups)

    def norm_of_sum(
        self, x: Tensor, residual: Tensor, norm: NormWeights, multiplier: float, scale: float = 1.0
    ) -> Tensor:
        assert scale == 1.0, "models that scale the stream are computed on a CPU alone"
        if norm.bias is None:
            return add_rms_norm(x, residual, norm.weight, norm.eps, multiplier)
        return add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps, multiplier)

    def rotate_and_store(
        self,
        qkv: Tensor,
        step: StepInputs,
        keys: Tensor,
        values: Tensor,
        *,
        interleaved: bool,
        head_norms: tuple[Tensor, ...] | None,
        eps: float,
        clip: float | None,
    ) -> Tensor:
        num_kv_heads = keys.shape[0]
        q, k, v = torch.split(qkv, [qkv.shape[1] - 2 * num_kv_heads, num_kv_heads, num_kv_heads], 1)
        assert head_norms is None or len(head_norms) == 2, "models that normalise values are computed on a CPU alone"
        q_weight, k_weight = head_norms or (None, None)
        return norm_rope_write_kv(
            q,
            k,
            v,
            step.cos,
            step.sin,
            step.context.slots,
            keys,
            values,
            interleaved=interleaved,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            clip=clip,
        )

    def rotate_and_store_latent(
        self,
        spaces: Tensor,
        q: Tensor,
        latent: Tensor,
        key: Tensor,
        step: StepInputs,
        keys: Tensor,
        *,
        interleaved: bool,
    ) -> Tensor:
        width = spaces.shape[2]
        heads = q.new_empty((*spaces.shape[:2], width + q.shape[2]))
        heads[..., :width].copy_(spaces)
        # The latent is both the first part of the key and the value, so it is written like a value.
        norm_rope_write_kv(
            q,
            key.unsqueeze(1),
            latent.unsqueeze(1),
            step.cos,
            step.sin,
            step.context.slots,
            keys[..., width:],
            keys[..., :width],
            interleaved=interleaved,
            out=heads[..., width:],
        )
        return heads

    def attend(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor | None,
        context: AttentionContext,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
        value_dim: int | None = None,
    ) -> Tensor:
        values = keys[..., :value_dim] if values is None else values
        if isinstance(context, SequencesByShape):
            context = context.of(q, keys, values, window)
        assert isinstance(context, Sequences)
        return paged_attention(
            q,
            PagedContext(keys, values, context.block_table, context.seq_lens, context.block_size),
            context.query_starts,
            context.works[window],
            context.partials,
            Scoring(scale, sinks=sinks),
            num_decodes=context.num_decodes,
            config=context.prefill,
            extends=context.extends.get(window),
        )

    def select_experts(
        self, logits: Tensor, spec: GateSpec, correction_bias: Tensor | None, num_valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return select_experts(logits, spec, correction_bias, num_valid=num_valid)

    def compute_experts(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: Experts, activation: Activation
    ) -> Tensor:
        assert self._moe is not None
        assert isinstance(experts, GpuExperts)
        return self._moe(x, expert_ids, expert_weights, experts, activation)

    def sigmoid(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return x.div_(cap).tanh_().mul_(cap)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
        if not any(draw.temperature for draw in draws):
            return greedy(logits)
        device = self.device
        filters: dict[str, Any] = {}
        if any(draw.filters for draw in draws):
            filters = {
                "top_k": to_device(array("i", (draw.top_k for draw in draws)), device),
                "top_p": to_device(array("f", (draw.top_p for draw in draws)), device),
                "min_p": to_device(array("f", (draw.min_p for draw in draws)), device),
            }
        return sample(
            logits,
            to_device(array("f", (draw.temperature for draw in draws)), device),
            # Seeds count modulo 2 ** 64.
            to_device(array("q", ((draw.seed + _SIGN) % (2 * _SIGN) - _SIGN for draw in draws)), device),
            to_device(array("q", (draw.position for draw in draws)), device),
            **filters,
        )


class _BatchedHeads:
    """weight [H, K, N], all heads in one product."""

    def __init__(self, weight: Tensor) -> None:
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)


class _TwoLinears:
    """A dense block by the vendor's matrix library."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up, self._down, self._activation = gate_up, down, activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(activate(self._gate_up(x), self._activation))
