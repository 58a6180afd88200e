"""Loading a checkpoint into transformers' modelling code: built empty, leaf modules exchanged for ours, then filled.

One conversion's tensors, or one expert, are in memory beside the model at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from experts.moe_layer import Dispatch, RoutedExperts
from experts.observer import AnyObserver
from kernels.ops import CpuOps, Ops
from kernels.weight_formats import Matrix, QuantizedRows, widened
from moeserve.model.checkpoint import OwnedExperts
from moeserve.model.hf.decoder import TransformersDecoder
from moeserve.model.hf.expert_weights import MappedModel, TransformersExperts, map_model
from moeserve.model.hf.experts import replacement_of
from moeserve.model.hf.geometry import run_empty
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.hf.modules import (
    Projection,
    Table,
    exchange_norms,
    exchange_weights,
    replace_module,
    replaceable_linears,
)
from moeserve.model.hf.spec import TransformersSpec
from moeserve.model.hf.step import Step
from moeserve.model.hf.weights import convert, stored_rows
from moeserve.model.rounding import NO_ROUNDING, Rounding, fine, format_in_file
from moeserve.model.spec import CheckpointError, ModelError, ModelSpec, UnsupportedModel
from moeserve.model.tensor_reader import Progress, TensorReader


def load_transformers_decoder(
    directory: Path,
    spec: ModelSpec,
    *,
    dtype: torch.dtype = torch.float32,
    ops: Ops | None = None,
    max_model_len: int | None = None,
    owned_experts: OwnedExperts | None = None,
    dispatch_of: Callable[[int], Dispatch] | None = None,
    observers: Sequence[AnyObserver] = (),
    progress: Progress | None = None,
    rounding: Rounding = NO_ROUNDING,
) -> TransformersDecoder:
    """Load the checkpoint in `directory` as `dtype`; see `moeserve.model.weights.load_decoder`. Raise ModelError.

    Call `TransformersDecoder.settle` next.
    """
    ops = ops or CpuOps()
    assert isinstance(spec, TransformersSpec)
    rounding.check(dtype)
    model = map_model(directory)
    code, weights, stored = model.code, model.weights, TransformersExperts(model, dtype, rounding)
    routed = []
    num_bytes = sum(map(weights.num_stored_bytes, weights.sources.values())) + stored.num_bytes(owned_experts)
    with stored.reader(num_bytes, progress) as reader:
        filler = _Filler(model, reader, ops, dtype, rounding)
        # Not earlier: before, the model runs with all its tensors on the meta device.
        _fill_buffers(code, ops.device)
        for place, layer in enumerate(stored.layers):
            experts = stored.layer(layer, None if owned_experts is None else owned_experts(layer), reader)
            packed = ops.pack_experts(experts.shape, len(experts.owned), experts.read_matrices)
            dispatch = ops.compute_experts if dispatch_of is None else dispatch_of(layer)
            routed.append(RoutedExperts(packed, experts.activation, dispatch, place, observers))
            name = model.experts[layer]
            replace_module(code.outer, name, replacement_of(experts.form, routed[-1], model.num_experts(name)))
        filler.fill()
    exchange_norms(code.body, dtype, ops)
    if ops.same_bits:
        exchange_weights(code.outer)
    _check_filled(code)
    longest = max_model_len or spec.max_position
    return TransformersDecoder(
        spec,
        code,
        ops,
        Step(),
        routed,
        max_model_len=longest,
        dtype=dtype,
        serves_others=dispatch_of is not None,
        observers=observers,
    )


def exchange_projections(code: ModellingCode) -> dict[str, Projection]:
    """Replace the plain projections of an empty model with shells. A projection whose weights its code reads stays."""
    linears = dict(replaceable_linears(code.outer))
    shells = {name: Projection(linear) for name, linear in linears.items()}
    for name, shell in shells.items():
        replace_module(code.outer, name, shell)
    try:
        run_empty(code)
    except UnsupportedModel:  # It is not known which weights its code reads.
        for name, linear in linears.items():
            replace_module(code.outer, name, linear)
        return {}
    for name, shell in list(shells.items()):
        if shell.is_read:
            replace_module(code.outer, name, linears[name])
            del shells[name]
    return shells


def _fill_buffers(code: ModellingCode, device: torch.device) -> None:
    """Compute the buffers that a checkpoint need not hold, frequencies of rotary embeddings above all."""
    owners = {}
    for name, buffer in list(code.outer.named_buffers()):
        owner, own = code.outer.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        fresh = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
        if fresh.is_floating_point():
            fresh.fill_(torch.nan)
        owner.register_buffer(own, fresh, persistent=own not in owner._non_persistent_buffers_set)
        owners[id(owner)] = owner
    models = [module for module in code.outer.modules() if isinstance(module, PreTrainedModel)]
    for owner in owners.values():
        # The innermost model knows its parts; models come before those inside them.
        inner = next(model for model in reversed(models) if any(owner is module for module in model.modules()))
        inner._init_weights(owner)
    for model in models:
        # Some models fill the buffers of their layers as a whole.
        if any(buffer.is_floating_point() and buffer.isnan().any() for buffer in model.buffers()):
            model._init_weights(model)


def _check_filled(code: ModellingCode) -> None:
    tensors = [*code.outer.named_parameters(), *code.outer.named_buffers()]
    left = [name for name, tensor in tensors if tensor.is_meta and not _is_beside_text(code, name)]
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        raise CheckpointError(f"The checkpoint lacks the tensor {left[0]}{more}.")
    for name, buffer in code.outer.named_buffers():
        if buffer.is_floating_point() and buffer.isnan().any():
            raise ModelError(f"transformers does not say how {name} of a {code.config.model_type} model is computed.")


def _is_beside_text(code: ModellingCode, name: str) -> bool:
    """Return whether a tensor belongs to a module around the text decoder that images alone pass."""
    owner = code.outer.get_submodule(name.rpartition(".")[0])
    return owner is not code.writer and owner is not code.body and code.body in owner.modules()


class _Filler:
    """Reads all parameters outside experts into a model, and packs its projections."""

    def __init__(
        self, model: MappedModel, reader: TensorReader, ops: Ops, dtype: torch.dtype, rounding: Rounding
    ) -> None:
        code = model.code
        self._code, self._weights, self._reader, self._ops, self._dtype = code, model.weights, reader, ops, dtype
        self._keys, self._rounding = model.keys, rounding
        # By module name, the tensors that have arrived for projections that wait for more.
        self._waiting: dict[str, dict[str, Matrix]] = {}
        self._projections: dict[str, tuple[Projection, frozenset[str]]] = {}
        for name, shell in exchange_projections(code).items():
            self._projections[name] = shell, frozenset(("weight", "bias") if shell.has_bias else ("weight",))
        strict = getattr(code.outer, "_keep_in_fp32_modules_strict", None) or ()
        self._in_fp32 = {*(getattr(code.outer, "_keep_in_fp32_modules", None) or ()), *strict}

    def fill(self) -> None:
        tied: dict[str, list[str]] = {}
        for name, other in self._weights.tied.items():
            tied.setdefault(other, []).append(name)
        for target in self._weights.sources:
            matrices = self._quantised(target) or convert(self._weights, target, self._reader, self._code)
            for name, matrix in matrices.items():
                self._put(name, matrix)
                for other in tied.get(name, ()):
                    self._put(other, matrix)

    def _quantised(self, target: str) -> dict[str, QuantizedRows]:
        """Return the matrices of a conversion in the checkpoint's own bits; none unless all of them are kept so."""
        tensors = self._weights.tensors
        stored = [tensors[name] for name in self._weights.sources[target].names]
        if not self._rounding.keeps_stored or not all(format_in_file(tensor.dtype) for tensor in stored):
            return {}
        found = {}
        for name, rows in stored_rows(self._weights, target, self._code).items():
            key = self._keys.get(name.rpartition(".")[0])
            if key is None or self._rounding.stored_format(key, stored[0]) is None:
                return {}
            matrix = rows.of(lambda own: self._reader.read_quantised(tensors[own]))
            if matrix is None:
                return {}
            found[name] = matrix
        return found

    def _put(self, name: str, matrix: Matrix) -> None:
        shape = self._weights.shapes.get(name)
        if shape is None:
            return
        if tuple(matrix.shape) != shape:
            raise CheckpointError(f"{name} has shape {list(matrix.shape)}, but the configuration says {list(shape)}.")
        module_name, _, own = name.rpartition(".")
        if module_name in self._projections:
            self._put_projection(module_name, own, matrix)
            return
        module = self._code.outer.get_submodule(module_name)
        if isinstance(module, nn.Embedding):
            if isinstance(matrix, Tensor) and self._rounding.format_of("embedding", shape[1]):
                matrix = self._rounding.apply(matrix, "embedding")
            if isinstance(matrix, QuantizedRows) or self._keeps(matrix):
                module.register_parameter(own, Table(matrix, self._dtype, self._ops))  # type: ignore[arg-type]
                return
        tensor = widened(matrix).to(self._ops.device)
        if tensor.is_floating_point():
            tensor = tensor.to(torch.float32 if any(part in name for part in self._in_fp32) else self._dtype)
        if own in module._buffers:
            module.register_buffer(own, tensor)
        else:
            module.register_parameter(own, nn.Parameter(tensor, requires_grad=False))

    def _put_projection(self, name: str, own: str, matrix: Matrix) -> None:
        shell, needed = self._projections[name]
        came = self._waiting.setdefault(name, {})
        came[own] = matrix
        if came.keys() < needed:
            return
        weight, key = came["weight"], self._keys[name]
        if isinstance(weight, Tensor):
            weight = weight if self._keeps(weight) else weight.to(self._dtype)
            weight = self._rounding.apply(weight, key)
        bias = widened(came["bias"]).to(self._ops.device, self._dtype) if "bias" in came else None
        shell.fill(self._ops.pack_linear(fine(weight, key), bias, self._dtype), self._dtype)
        del self._waiting[name]

    def _keeps(self, tensor: Tensor) -> bool:
        """Return whether products read this tensor as it is stored."""
        return self._ops.keeps_narrow and self._dtype == torch.float32 and tensor.dtype == torch.bfloat16
