"""The size of a model by its configuration alone: its parameters, and the tensors that a checkpoint would hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from moeserve.model.dummy import write_dummy_index
from moeserve.model.families import build_spec, load_config
from moeserve.model.packed.parts import fp8_dtype
from moeserve.model.spec import DecoderSpec, QuantizationSpec
from moeserve.model.stored import TensorInfo, item_bits
from moeserve.model.tensor_names import (
    TensorRef,
    Tensors,
    fused_expert_tensors,
    layer_tensors,
    mxfp4_expert_tensors,
    outer_tensors,
)

_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# In quantised checkpoints, these projections stay as they were trained.
_NEVER_QUANTISED = frozenset({"embedding", "lm_head", "moe_gate", "shared_gate", "conv", "index_weights"})
_NEVER_QUANTISED |= {"layer_embedding"}
# Bytes of 32 weights, for the quantised forms that follow from a configuration alone.
_BLOCK_BYTES = {"INT4_F16": 19, "INT8_ZERO": 37, "INT8_F32": 36, "FP8_F32": 36, "FP8_128": 33, "NVFP4_F32": 20}
_BLOCK_BYTES |= {"MXFP4": 17}
_NOWHERE = Path("config.json")


@dataclass(frozen=True, slots=True)
class ParameterCount:
    """Numbers of parameters.

    total: all numbers of the checkpoint; tied embeddings count once. active: the numbers that compute one token, all
    but the experts that its gates do not choose; None if not known. experts: of all experts of all layers.
    """

    total: int
    active: int | None
    experts: int


def count_parameters(spec: DecoderSpec) -> ParameterCount:
    others = _count(outer_tensors(spec))
    experts = chosen = 0
    for layer in range(spec.num_layers):
        others += _count(layer_tensors(spec, layer))
        if spec.moe is not None and spec.sparse_layers[layer]:
            of_layer = _count(fused_expert_tensors(spec, layer))
            experts += of_layer
            chosen += of_layer // spec.moe.num_experts * spec.moe.gate.top_k
    return ParameterCount(others + experts, others + chosen, experts)


def stored_dtype(named: object) -> str | None:
    """Return safetensors' name for the dtype that a configuration names; None if it names no plain dtype."""
    return _STORED.get(str(named).removeprefix("torch."))


def expected_index(spec: DecoderSpec, dtype: str) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint of the model, by name, as `read_index` does; no file holds them.

    dtype: of plain tensors, as safetensors names it. Experts are in one tensor per layer, which takes the same bytes as
    single ones.
    """
    index = _infos(outer_tensors(spec), dtype, spec.quantization)
    for layer in range(spec.num_layers):
        index |= _infos(layer_tensors(spec, layer), dtype, spec.quantization)
        if spec.moe is None or not spec.sparse_layers[layer]:
            continue
        if spec.quantization is not None and spec.quantization.kind == "mxfp4":
            for key, ref in mxfp4_expert_tensors(spec, layer).items():
                _add(index, ref, dtype if key.endswith(".bias") else "U8")
        else:
            index |= _infos(fused_expert_tensors(spec, layer), dtype, spec.quantization)
    return index


def write_dummy(directory: Path) -> None:
    """Make a folder that holds a configuration a model whose weights are drawn, see `moeserve.model.dummy`."""
    config = load_config(directory)
    dtype = stored_dtype(config.get("dtype") or config.get("torch_dtype")) or "BF16"
    write_dummy_index(expected_index(build_spec(config), dtype), directory)


def _count(tensors: Mapping[str, TensorRef]) -> int:
    # Some are read for two parts of a decoder.
    return sum(prod(shape) for shape in {ref.names: ref.shape for ref in tensors.values()}.values())


def _infos(tensors: Tensors, dtype: str, quantization: QuantizationSpec | None) -> dict[str, TensorInfo]:
    index: dict[str, TensorInfo] = {}
    fp8 = quantization is not None and quantization.kind == "fp8"
    form = "" if quantization is None else quantization.form
    for key, ref in tensors.items():
        kept = len(ref.shape) < 2 or key in _NEVER_QUANTISED or key.endswith("bias")
        if form and not kept and ref.shape[-1] % 32 == 0:
            own = fp8_dtype(ref.shape[-1], ref.shape[-1]) if form == "FP8_F32" else form
            index[ref.names[0]] = TensorInfo(_NOWHERE, own, ref.shape, prod(ref.shape) // 32 * _BLOCK_BYTES[own])
            continue
        if not fp8 or kept:
            _add(index, ref, dtype)
            continue
        assert quantization is not None
        *leading, rows, columns = ref.shape
        num_scales = prod(leading) * -(-rows // quantization.block[0]) * -(-columns // quantization.block[1])
        own = fp8_dtype(columns, quantization.block[1])
        index[ref.names[0]] = TensorInfo(_NOWHERE, own, ref.shape, prod(ref.shape) + 4 * num_scales)
    return index


def _add(index: dict[str, TensorInfo], ref: TensorRef, dtype: str) -> None:
    num_bytes = prod(ref.shape) * item_bits(dtype) // 8
    index[ref.names[0]] = TensorInfo(_NOWHERE, dtype, ref.shape, num_bytes)
