"""All layers of a decoder as one call of the compiled kernels.

A step of few rows takes milliseconds, of which Python would take one or two to call the parts of its layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, addressof, c_double, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.attention_block import AttentionBlock
from kernels.cpu.experts import NativeExperts
from kernels.cpu.library import NativeKernels
from kernels.moe_gate import NativeChoice
from kernels.ops import MoeNorms, NormWeights, PagedRows, StepInputs
from kernels.specs import Activation


@dataclass(frozen=True, slots=True)
class MoeParts:
    """A block of experts. shared: the expert that every row has, None without one. norms: see `MoeNorms`."""

    choice: NativeChoice
    experts: NativeExperts
    activation: Activation
    shared: tuple[NativeExperts, Activation] | None = None
    norms: MoeNorms | None = None


@dataclass(frozen=True, slots=True)
class LayerParts:
    """A layer of attention and experts. norm: before the experts. next_norm: before the next layer, or the last norm.

    after_attention, after_block: of what each adds to the stream, None without such norms. scale: of the stream behind
    the layer. is_windowed: the layer has a window.
    """

    attention: AttentionBlock
    block: MoeParts
    norm: NormWeights
    next_norm: NormWeights
    after_attention: NormWeights | None
    after_block: NormWeights | None
    scale: float
    is_windowed: bool

    @property
    def inner_norms(self) -> list[NormWeights | None]:
        """The norms that a layer may lack, in the order of layers.cpp."""
        own = self.block.norms
        of_block = [None] * 4 if own is None else [own.gate, own.experts, own.after_experts, own.after_shared]
        return [self.after_attention, *of_block, self.after_block]

    @property
    def norms(self) -> list[NormWeights]:
        """Its norms with those of the stream last."""
        return [*(norm for norm in self.inner_norms if norm is not None), self.norm, self.next_norm]


class _Layer(Structure):
    """`Layer` of layers.cpp."""

    _fields_ = [
        ("attention", c_void_p),
        ("gate", c_void_p),
        ("experts", c_void_p),
        ("shared", c_void_p),
        ("norm", c_void_p),
        ("next_norm", c_void_p),
        ("after_attention", c_void_p),
        ("for_gate", c_void_p),
        ("for_experts", c_void_p),
        ("after_experts", c_void_p),
        ("after_shared", c_void_p),
        ("after_both", c_void_p),
        ("eps", c_double),
        ("next_eps", c_double),
        ("scale", c_double),
        ("is_windowed", c_int64),
    ]


class _Sizes(Structure):
    """`Sizes` of layers.cpp."""

    _fields_ = [("num_layers", c_int64), ("hidden", c_int64), ("top_k", c_int64), ("multiplier", c_double)]


class NativeLayers:
    """Layers one after another, each part of which the compiled kernels compute. They hold no data of requests."""

    def __init__(self, layers: Sequence[LayerParts], kernels: NativeKernels, hidden: int, multiplier: float) -> None:
        """multiplier: of all that is added to the residual stream."""
        self._layers = layers
        self._run = kernels.layers
        self._top_k = layers[0].block.choice.top_k
        self._sizes = _Sizes(len(layers), hidden, self._top_k, multiplier)
        # Kept alive: the experts make another record where they are called with another activation.
        self._experts = [_expert_records(layer.block) for layer in layers]
        self._records = (_Layer * len(layers))(*map(_record, layers, self._experts))
        self._addresses = addressof(self._sizes), addressof(self._records)
        self._pools: tuple[Sequence[tuple[Tensor, Tensor | None]], object, int] | None = None

    def __call__(
        self,
        normed: Tensor,
        residual: Tensor,
        step: StepInputs,
        windowed: StepInputs,
        pools: Sequence[tuple[Tensor, Tensor | None]],
        last_rows: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the norm [S, H] of the stream after the last layer, and the chosen experts [., k], layer by layer.

        normed, residual: [T, H], contiguous in float32, both overwritten. normed is the norm before the first layer.
        windowed: for layers with window blocks. pools: keys and values [KV, num_slots, D] of each layer first, mutated.
        last_rows: [S] int64, contiguous, the rows that the last layer's experts compute, at most T; None for all.
        """
        num_rows = len(normed)
        num_last = num_rows if last_rows is None else len(last_rows)
        attention = self._layers[0].attention
        rows = _rows_of(attention, step)
        windowed_rows = rows if windowed is step else _rows_of(attention, windowed)
        ids = torch.empty(((len(self._layers) - 1) * num_rows + num_last, self._top_k), dtype=torch.int64)
        missing = self._run(
            *self._addresses,
            addressof(rows),
            addressof(windowed_rows),
            self._address_of(pools),
            num_rows,
            None if last_rows is None else last_rows.data_ptr(),
            -1 if last_rows is None else num_last,
            normed.data_ptr(),
            residual.data_ptr(),
            ids.data_ptr(),
        )
        if missing >= 0:
            raise ValueError(f"expert {missing} is not here")
        return normed[:num_last], ids

    def _address_of(self, pools: Sequence[tuple[Tensor, Tensor | None]]) -> int:
        """Return the address of the addresses of the pools' records, which are kept until other pools come."""
        if self._pools is None or self._pools[0] is not pools:
            records = []
            for layer, (keys, values) in zip(self._layers, pools[: len(self._layers)], strict=True):
                assert values is not None
                records.append(layer.attention.pools_of(keys, values))
            addresses = (c_void_p * len(records))(*map(addressof, records))
            self._pools = pools, (records, addresses), addressof(addresses)
        return self._pools[2]


def _rows_of(attention: AttentionBlock, step: StepInputs) -> Structure:
    context = step.context
    assert isinstance(context, PagedRows)
    return attention.rows_of(step.cos, step.sin, context.slots, context.plan)


def _expert_records(block: MoeParts) -> tuple[Structure, Structure | None]:
    """Return the records of a block's experts and of its shared expert."""
    shared = None if block.shared is None else block.shared[0].record_for(block.shared[1])
    return block.experts.record_for(block.activation), shared


def _record(layer: LayerParts, experts: tuple[Structure, Structure | None]) -> _Layer:
    routed, shared = experts
    return _Layer(
        layer.attention.address,
        layer.block.choice.address,
        addressof(routed),
        None if shared is None else addressof(shared),
        layer.norm.weight.data_ptr(),
        layer.next_norm.weight.data_ptr(),
        *(None if norm is None else norm.weight.data_ptr() for norm in layer.inner_norms),
        layer.norm.eps,
        layer.next_norm.eps,
        layer.scale,
        layer.is_windowed,
    )


def native_layers(
    layers: Sequence[LayerParts], kernels: NativeKernels, hidden: int, multiplier: float
) -> NativeLayers | None:
    """Return the layers as one call; None where a norm has a bias or is not in float32, or where the widths of results
    or the numbers of chosen experts differ."""
    norms = [norm for layer in layers for norm in layer.norms]
    if any(norm.bias is not None or norm.weight.dtype is not torch.float32 for norm in norms):
        return None
    top_k = layers[0].block.choice.top_k
    if any(layer.attention.width != hidden or layer.block.choice.top_k != top_k for layer in layers):
        return None
    return NativeLayers(layers, kernels, hidden, multiplier)
