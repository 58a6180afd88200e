"""The operations that compute a decoder, and their bodies on a CPU.

A decoder, its attention and its experts are written once, in terms of `Ops`; the bodies are chosen when a model is
assembled. The GPU's bodies are `kernels.gpu.ops.GpuOps`, in a module of their own because importing it loads Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.activation import Activation, sigmoid, softcap
from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan
from kernels.cpu.library import native_kernels
from kernels.cpu.packing import WeightMemory, results_in_order
from kernels.gated_delta_rule import DeltaHeads, gated_delta_rule
from kernels.linear import Linear, pack_linear
from kernels.mamba import MambaHeads, mamba1_scan, mamba2_scan
from kernels.moe import expert_layout, moe_experts
from kernels.moe_gate import select_experts
from kernels.norm import gated_norm, layer_norm, norm_of_gated, rms_norm, rms_norm_of_sum
from kernels.packed_experts import ExpertMatrices, Experts, ExpertShape, PackedExperts
from kernels.rope_kv import apply_rotary, rotate_and_store, write_kv
from kernels.sampling import Draw, sample
from kernels.short_conv import short_conv
from kernels.specs import GateSpec
from kernels.state_rows import StateRows
from kernels.weight_formats import Arithmetic, Matrix, QuantizedRows, widened

# x [T, H, K] -> [T, H, N], with one projection per head.
HeadLinear = Callable[[Tensor], Tensor]
# ids [T] -> rows [T, N] of a table, a new tensor.
Table = Callable[[Tensor], Tensor]
# x [T, H] -> [T, H], a dense gated feed-forward block.
GatedBlock = Callable[[Tensor], Tensor]


class AttentionContext(Protocol):
    """Attention's information on a step's rows, for one device's operations: `PagedRows`, or `Sequences` on a GPU."""

    @property
    def slots(self) -> Tensor:
        """[T] int64, the slots for the rows' keys and values, -1 for rows that pad the batch."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """The weights of an RMS norm over [D], or of a layer norm if there is a bias."""

    weight: Tensor
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class MoeNorms:
    """Norms of a block in which gate, experts and shared expert have their own.

    gate, experts: of the residual stream, for the input of each. after_experts, after_shared: of the result of each.
    """

    gate: NormWeights
    experts: NormWeights
    after_experts: NormWeights
    after_shared: NormWeights


@dataclass(slots=True)
class StepInputs:
    """The inputs of a step that all layers share: cos, sin [T, R/2] for attention, states for recurrent layers.

    chosen: the positions [T, top_k] that a layer with an indexer leaves for itself and for the layers behind it that
    have none, see `kernels.indexed_attention`; None where tokens attend to all positions.
    """

    cos: Tensor
    sin: Tensor
    context: AttentionContext
    states: StateRows | None = None
    chosen: Tensor | None = None


class Ops(Protocol):
    """Operations on tensors of one device. A method mutates only the arguments that it names as mutated.

    keeps_narrow: float32 products read 16-bit weights without widening them first. wide_angles: heads are rotated in
    float32 whatever their dtype. same_bits: a row's bits do not depend on the other rows of a step.
    """

    @property
    def device(self) -> torch.device: ...

    @property
    def keeps_narrow(self) -> bool: ...

    @property
    def wide_angles(self) -> bool: ...

    @property
    def same_bits(self) -> bool: ...

    def on_device(self, values: Tensor) -> Tensor:
        """Return values on the device, a copy unless they are there already."""

    def pack_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        """Pack weight [N, K] and bias [N], on the device, for inputs of `dtype`."""

    def pack_table(self, table: Matrix, dtype: torch.dtype) -> Table:
        """Keep a table [N, K] on the device, whose rows are wanted in `dtype`."""

    def pack_heads(self, weight: Tensor, dtype: torch.dtype) -> HeadLinear:
        """Pack weight [H, N, K], on the device, for inputs of `dtype`."""

    def pack_gated(self, matrices: ExpertMatrices, activation: Activation, dtype: torch.dtype) -> GatedBlock:
        """Pack a dense block, whose matrices are on the device."""

    def pack_experts(
        self, shape: ExpertShape, num_experts: int, matrices_of: Callable[[int], ExpertMatrices]
    ) -> Experts:
        """Pack one layer's experts. `matrices_of` returns them, on any device; several threads may call it."""

    def norm(self, x: Tensor, norm: NormWeights, out: Tensor | None = None) -> Tensor:
        """x [T, D] -> [T, D], a new tensor, or `out`, which may be x."""

    def norm_of_sum(
        self, x: Tensor, residual: Tensor, norm: NormWeights, multiplier: float, scale: float = 1.0
    ) -> Tensor:
        """Add x times `multiplier` to `residual`, multiply that by `scale`, both in place, and return its norm.

        x is overwritten.
        """

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
        """Write keys and values of qkv [T, H + 2 KV, D] into pools [KV, num_slots, D]; return its queries [T, H, D].

        In this order: clip to [-clip, clip], norm of each query and key, and of each value if there are three, by
        `head_norms` (weights [D] for each), rotation of queries and keys. qkv is overwritten.
        """

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
        """Return the queries [T, H, L + R]: `spaces` [T, H, L], then q [T, H, R] rotated.

        Write one key for all heads into the pool [1, num_slots, L + R]: `latent` [T, L], which is also the value, then
        `key` [T, R] rotated.
        """

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
        """q [T, H, Dk] over the pools [KV, num_slots, D] -> [T, H, Dv]; see `kernels.attention.paged_attention`.

        If `values` is None, the first `value_dim` channels of the keys are the values.
        """

    def select_experts(
        self, logits: Tensor, spec: GateSpec, correction_bias: Tensor | None, num_valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """See `kernels.moe_gate.select_experts`. Rows from `num_valid` (int32 scalar on the device) on, which pad a
        batch, get ids -1 and weights 0."""

    def compute_experts(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: Experts, activation: Activation
    ) -> Tensor:
        """See `kernels.moe.moe_experts`; all experts of the layer are local."""

    def sigmoid(self, x: Tensor) -> Tensor:
        """Return the logistic function of x, in its dtype."""

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """See `kernels.activation.softcap`. Mutates x."""

    def short_conv(
        self,
        x: Tensor,
        weight: Tensor,
        states: Tensor,
        rows: StateRows,
        bias: Tensor | None = None,
        *,
        activates: bool = True,
    ) -> Tensor:
        """See `kernels.short_conv.short_conv`. Mutates `states`."""

    def gated_delta_rule(
        self, qkv: Tensor, gates: Tensor, heads: DeltaHeads, states: Tensor, rows: StateRows
    ) -> Tensor:
        """See `kernels.gated_delta_rule.gated_delta_rule`. Mutates `states`."""

    def mamba2_scan(self, xbc: Tensor, steps: Tensor, heads: MambaHeads, states: Tensor, rows: StateRows) -> Tensor:
        """See `kernels.mamba.mamba2_scan`. Mutates `states`."""

    def mamba1_scan(
        self, x: Tensor, sizes: Tensor, bc: Tensor, rate: Tensor, skip: Tensor, states: Tensor, rows: StateRows
    ) -> Tensor:
        """See `kernels.mamba.mamba1_scan`. Mutates `states`."""

    def gated_norm(self, x: Tensor, gate: Tensor, norm: NormWeights) -> Tensor:
        """See `kernels.norm.gated_norm`."""

    def norm_of_gated(self, x: Tensor, gate: Tensor, norm: NormWeights, num_groups: int) -> Tensor:
        """See `kernels.norm.norm_of_gated`."""

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, Tensor]:
        """See `kernels.sampling.sample`."""


@dataclass(frozen=True, slots=True)
class PagedRows:
    """`AttentionContext` on a CPU."""

    slots: Tensor
    plan: AttentionPlan


class CpuOps:
    """`Ops` on a CPU."""

    device = torch.device("cpu")
    keeps_narrow = True
    wide_angles = False
    same_bits = True
    sample = staticmethod(sample)
    sigmoid = staticmethod(sigmoid)
    softcap = staticmethod(softcap)
    short_conv = staticmethod(short_conv)
    gated_delta_rule = staticmethod(gated_delta_rule)
    mamba1_scan = staticmethod(mamba1_scan)
    mamba2_scan = staticmethod(mamba2_scan)

    def __init__(
        self, arithmetic: Arithmetic = "int8", *, narrow_rows: bool = False, num_packers: int | None = None
    ) -> None:
        """arithmetic: of products with quantised weights. narrow_rows: see `kernels.linear.pack_linear`. num_packers:
        the threads that pack experts, torch's number by default."""
        self._arithmetic: Arithmetic = arithmetic
        self._narrow_rows = narrow_rows
        self._num_packers = num_packers
        self._memory = WeightMemory()

    def on_device(self, values: Tensor) -> Tensor:
        return values

    def pack_linear(self, weight: Matrix, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        return pack_linear(
            weight, bias, dtype, arithmetic=self._arithmetic, narrow_rows=self._narrow_rows, take=self._memory.take
        )

    def pack_table(self, table: Matrix, dtype: torch.dtype) -> Table:
        """Keep a table in its own bits: rows are widened when they are looked up."""
        if isinstance(table, QuantizedRows):
            return lambda ids: table.rows(ids).dequantise().to(dtype)
        return lambda ids: table[ids].to(dtype)

    def pack_heads(self, weight: Tensor, dtype: torch.dtype) -> HeadLinear:
        return _LinearPerHead([pack_linear(head.contiguous(), dtype=dtype) for head in weight])

    def pack_gated(self, matrices: ExpertMatrices, activation: Activation, dtype: torch.dtype) -> GatedBlock:
        gate_up, down, gate_up_bias, down_bias = matrices
        (hidden_size, width), rows = down.shape, gate_up.shape[0]
        formats, has_order = None, False
        if isinstance(gate_up, QuantizedRows) and isinstance(down, QuantizedRows):
            formats, has_order = (gate_up.format, down.format), gate_up.order is not None
        else:
            gate_up, down = widened(gate_up), widened(down)
        shape = ExpertShape(
            hidden_size,
            width,
            dtype,
            down.dtype if isinstance(down, Tensor) else dtype,
            has_bias=gate_up_bias is not None or down_bias is not None,
            is_gated=rows != width,
            formats=formats,
            arithmetic=self._arithmetic,
            has_order=has_order,
            narrow_rows=self._narrow_rows,
        )
        if shape.has_bias:
            gate_up_bias = torch.zeros(rows, dtype=dtype) if gate_up_bias is None else gate_up_bias
            down_bias = torch.zeros(hidden_size, dtype=dtype) if down_bias is None else down_bias
        return OneExpert(self.pack_experts(shape, 1, lambda _: (gate_up, down, gate_up_bias, down_bias)), activation)

    def pack_experts(
        self, shape: ExpertShape, num_experts: int, matrices_of: Callable[[int], ExpertMatrices]
    ) -> PackedExperts:
        layout = expert_layout(shape)
        experts = layout.experts(num_experts)

        def packing_of(expert: int) -> Callable[[], Tensor]:
            room, matrices = self._memory.take(layout.num_bytes), matrices_of(expert)

            def pack() -> Tensor:
                layout.pack_into(room, matrices)
                return room

            return pack

        packings = map(packing_of, range(num_experts))
        # A single expert is packed by all threads together.
        if num_experts > 1 and (native := native_kernels()) is not None:
            num_packers = self._num_packers or torch.get_num_threads()
            packed = results_in_order(packings, num_packers, native.compute_alone)
        else:
            packed = (pack() for pack in packings)
        for expert, room in enumerate(packed):
            experts.put(expert, room)
        return experts

    def norm(self, x: Tensor, norm: NormWeights, out: Tensor | None = None) -> Tensor:
        if norm.bias is None:
            normed = rms_norm(x, norm.weight, norm.eps)
        else:
            normed = layer_norm(x, norm.weight, norm.bias, norm.eps)
        return normed if out is None else out.copy_(normed)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: NormWeights) -> Tensor:
        return gated_norm(x, gate, norm.weight, norm.eps)

    def norm_of_gated(self, x: Tensor, gate: Tensor, norm: NormWeights, num_groups: int) -> Tensor:
        return norm_of_gated(x, gate, norm.weight, norm.eps, num_groups)

    def norm_of_sum(
        self, x: Tensor, residual: Tensor, norm: NormWeights, multiplier: float, scale: float = 1.0
    ) -> Tensor:
        if norm.bias is None:
            return rms_norm_of_sum(x, residual, norm.weight, norm.eps, multiplier, scale)
        if multiplier != 1.0:
            x.mul_(multiplier)
        residual.add_(x)
        return self.norm(residual if scale == 1.0 else residual.mul_(scale), norm)

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
        if clip is not None:
            qkv.clamp_(-clip, clip)
        slots = step.context.slots
        return rotate_and_store(
            qkv, step.cos, step.sin, slots, keys, values, interleaved=interleaved, head_norms=head_norms, eps=eps
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
        num_heads = q.shape[1]
        # The key is one more head beside the queries.
        rotated = apply_rotary(torch.cat([q, key.unsqueeze(1)], 1), step.cos, step.sin, interleaved=interleaved)
        heads = torch.cat([torch.cat([spaces, latent.unsqueeze(1)], 1), rotated], -1)
        write_kv(keys, None, step.context.slots, heads[:, num_heads:], None)
        return heads[:, :num_heads]

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
        assert isinstance(context, PagedRows)
        if values is not None:
            return paged_attention(q, keys, values, context.plan, scale=scale, window=window, sinks=sinks)
        out = paged_attention(q, keys, keys, context.plan, scale=scale, window=window, sinks=sinks)
        return out[..., :value_dim]

    def select_experts(
        self, logits: Tensor, spec: GateSpec, correction_bias: Tensor | None, num_valid: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        assert num_valid is None
        return select_experts(logits, spec, correction_bias)

    def compute_experts(
        self, x: Tensor, expert_ids: Tensor, expert_weights: Tensor, experts: Experts, activation: Activation
    ) -> Tensor:
        assert isinstance(experts, PackedExperts)
        return moe_experts(x, expert_ids, expert_weights, experts, activation)


class _LinearPerHead:
    """One packed product per head, because the rows of a batched product would depend on their number."""

    def __init__(self, linears: list[Linear]) -> None:
        self._linears = tuple(linears)

    def __call__(self, x: Tensor) -> Tensor:
        heads = x.transpose(0, 1).contiguous()
        return torch.stack([linear(head) for linear, head in zip(self._linears, heads, strict=True)], 1)


class OneExpert:
    """A dense block as an expert that every row chooses with weight 1."""

    def __init__(self, expert: PackedExperts, activation: Activation) -> None:
        self.expert, self.activation = expert, activation

    def __call__(self, x: Tensor) -> Tensor:
        ids = torch.zeros((len(x), 1), dtype=torch.int64)
        weights = torch.ones((len(x), 1))
        return moe_experts(x, ids, weights, self.expert, self.activation)
