"""The generic decoder on a GPU: the model of `moeserve.model.decoder`, with every residual sum fused into a norm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.gpu.moe_weights import GpuExperts
from moeserve.cuda.attention import GpuGqa, GpuMla, GpuStep, Sequences
from moeserve.cuda.parts import GpuMlp, GpuMoe, GpuNorm, Projection
from moeserve.model.rope import rope_frequencies
from moeserve.model.spec import DecoderSpec, RopeSpec

KvPools = Sequence[tuple[Tensor, Tensor | None]]


@dataclass(slots=True)
class GpuBatch:
    """The rows of one step, one sequence's new tokens after another.

    token_ids, positions: [T] int64. logit_rows: [S] int64, the rows whose logits are wanted; None for all. num_valid:
    int32 scalar on the device, from which row on the batch is padding; None for none.
    """

    token_ids: Tensor
    positions: Tensor
    sequences: Sequences
    logit_rows: Tensor | None = None
    num_valid: Tensor | None = None


@dataclass(slots=True)
class GpuLayer:
    """Attention and feed-forward block, each behind a norm and added to the residual stream."""

    input_norm: GpuNorm
    attention: GpuGqa | GpuMla
    post_norm: GpuNorm
    mlp: GpuMlp | GpuMoe


class RopeAngles:
    """Cosines and sines of all positions below a length, fp32, made once."""

    __slots__ = ("_cos", "_sin")

    def __init__(self, rope: RopeSpec, max_model_len: int, device: torch.device) -> None:
        frequencies = rope_frequencies(rope, max_model_len)
        inverse = torch.tensor(frequencies.inverse, dtype=torch.float32)
        angles = torch.arange(max_model_len, dtype=torch.float32)[:, None] * inverse
        self._cos = (angles.cos() * frequencies.scale).to(device)
        self._sin = (angles.sin() * frequencies.scale).to(device)

    def __call__(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """positions [T] int64 -> cos, sin [T, R/2]."""
        return self._cos.index_select(0, positions), self._sin.index_select(0, positions)


class GpuDecoder:
    """A loaded model. Holds weights and tables only; whatever belongs to requests comes with each call.

    after_layer: see `moeserve.model.decoder.Decoder`; a graph that is replayed tells nothing.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        embedding: Tensor,
        layers: Sequence[GpuLayer],
        norm: GpuNorm,
        lm_head: Projection,
        *,
        max_model_len: int,
    ) -> None:
        self.spec = spec
        self.dtype = embedding.dtype
        self.device = embedding.device
        self.max_model_len = max_model_len
        self._embedding, self._layers, self._norm, self._lm_head = embedding, tuple(layers), norm, lm_head
        self._angles = RopeAngles(spec.rope, max_model_len, embedding.device)
        self._sparse = {layer: place for place, layer in enumerate(spec.moe_layers)}
        self.after_layer: Callable[[int, Tensor], None] | None = None

    def gated_blocks(self) -> list[tuple[GpuMoe, Tensor]]:
        """The blocks with experts, and the weight [H] of the norm in front of each."""
        return [(layer.mlp, layer.post_norm.weight) for layer in self._layers if isinstance(layer.mlp, GpuMoe)]

    @property
    def experts(self) -> list[GpuExperts]:
        """The experts that are here of each layer that has some."""
        return [layer.mlp.experts for layer in self._layers if isinstance(layer.mlp, GpuMoe)]

    def serve_others(self) -> Tensor:
        """A step in which this rank has no rows: its experts compute those of other ranks. Returns no rows."""
        no_rows = torch.empty((0, self.spec.hidden_size), dtype=self.dtype, device=self.device)
        for layer in self._layers:
            if isinstance(layer.mlp, GpuMoe):
                layer.mlp.serve_others(no_rows)
        return no_rows

    def forward(self, batch: GpuBatch, kv_pools: KvPools) -> Tensor:
        """Logits [S, vocab] of the wanted rows, in the model's dtype. See `states`."""
        return self.logits(self.states(batch, kv_pools))

    def logits(self, states: Tensor) -> Tensor:
        """[S, H] -> [S, vocab]."""
        logits = self._lm_head(states)
        return logits if self.spec.logit_divisor == 1.0 else logits.div_(self.spec.logit_divisor)

    def states(self, batch: GpuBatch, kv_pools: KvPools) -> Tensor:
        """[S, H] of the wanted rows behind the last norm.

        Mutates `kv_pools`. Waits for nothing and allocates only what the caching allocator holds, so that a graph can
        record it. Positions must lie below `max_model_len`; rows with slot -1 come out as noise.
        """
        spec, rows = self.spec, batch.logit_rows
        multiplier = spec.residual_multiplier
        residual = functional.embedding(batch.token_ids, self._embedding)
        if spec.embedding_multiplier != 1.0:
            residual.mul_(spec.embedding_multiplier)
        step = GpuStep(*self._angles(batch.positions), batch.sequences)
        normed = self._layers[0].input_norm(residual)
        following = [layer.input_norm for layer in self._layers[1:]] + [self._norm]
        num_valid = batch.num_valid
        parts = zip(self._layers, kv_pools, following, strict=True)
        for number, (layer, (keys, values), next_norm) in enumerate(parts):
            out = layer.attention(normed, step, keys, values)
            if next_norm is self._norm and rows is not None:
                # From here on a row meets no other row.
                out, residual, num_valid = out.index_select(0, rows), residual.index_select(0, rows), None
            normed = layer.post_norm.of_sum(out, residual, multiplier)
            normed = next_norm.of_sum(layer.mlp(normed, num_valid), residual, multiplier)
            if self.after_layer is not None and number in self._sparse and next_norm is not self._norm:
                self.after_layer(self._sparse[number], residual)
        return normed
