"""The facts about a model on transformers' code that the service needs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from kernels.specs import Activation, GateSpec
from moeserve.model.generation import token_ids
from moeserve.model.hf.description import count_parameters, count_widened, kinds_of_layers, layers_of
from moeserve.model.hf.expert_form import ExpertForm, form_of
from moeserve.model.hf.experts import activation_of
from moeserve.model.hf.geometry import Geometry, find_geometry
from moeserve.model.hf.modelling import ModellingCode, empty_model, read_hf_config
from moeserve.model.packed.config import quantization_in
from moeserve.model.sizes import ParameterCount
from moeserve.model.spec import (
    KvLayerSpec,
    ModelError,
    ModelSpec,
    MoeSpec,
    QuantizationSpec,
    StateShape,
    UnsupportedModel,
)

# Rotary embeddings that change the angles of all tokens once a text is longer than the model was trained for.
_SWITCHING_ROPE = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersSpec(ModelSpec):
    """A model on transformers' code.

    geometry: the memory that its layers keep for a request. max_position: for a rotary embedding that changes with the
    length of the text, the length up to which it does not change. kinds: (number of layers, kind), as `kinds_of_layers`
    returns them. parameters: of the text decoder. widened: see `count_widened`.
    """

    geometry: Geometry
    kinds: tuple[tuple[int, str], ...]
    parameters: ParameterCount
    widened: int

    @property
    def idle_widened(self) -> int:
        """The parameters in `widened` that one token does not choose; 0 if it is not known how many experts it does."""
        count = self.parameters
        if count.active is None or not self.widened:
            return 0
        return (count.total - count.active) * self.widened // count.experts

    @property
    def kv_layers(self) -> tuple[KvLayerSpec, ...]:
        # Blocks count tokens also where no layer keeps rows of them.
        return self.geometry.kv_layers or (KvLayerSpec(1, 1, 0),)

    @property
    def gpu_obstacle(self) -> str | None:
        """Why no GPU serves the model, in a sentence; None if one does."""
        reason = None
        if self.geometry.has_opaque:
            reason = "a part of a request's memory lies outside the KV pool"
        elif any(layer.pools.keys() - {"keys", "values"} for layer in self.geometry.layers):
            reason = "their attention is indexed"
        if reason is None:
            return None
        return f"--device cuda: models of type {self.model_type!r} are computed on a CPU only so far, as {reason}."

    @property
    def keeps_snapshots(self) -> bool:
        return not self.geometry.has_opaque

    @property
    def state_layers(self) -> tuple[tuple[StateShape, ...], ...]:
        """The states of each layer that has some. Opaque layers need only the number of a slot."""
        shapes = tuple(
            tuple(StateShape(state.shape, keep_fp32=state.is_sum) for state in layer.states)
            for layer in self.geometry.layers
            if layer.states
        )
        return (*shapes, (StateShape((1,), keep_fp32=False),)) if self.geometry.has_opaque else shapes


def read_transformers_spec(directory: Path) -> TransformersSpec:
    """Read a model folder's configuration. Raise ModelError or UnsupportedModel."""
    config = read_hf_config(directory)
    return describe(empty_model(config), config, quantization_in(directory))


def describe(code: ModellingCode, config: Any, quantization: QuantizationSpec | None) -> TransformersSpec:
    """Describe an empty model. config: the folder's own; the body's may be a part of it.

    Raise ModelError or UnsupportedModel.
    """
    try:
        return _describe(code, config, quantization)
    except ModelError:
        raise
    except AttributeError as error:  # A configuration without an attribute that text decoders have.
        reason = " ".join(str(error).split())
        raise UnsupportedModel(f"Models of type {config.model_type!r} are not supported: {reason}.") from error
    except Exception as error:  # Values of types that modelling code does not expect.
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"The configuration of this {config.model_type} model is not valid: {reason}") from error


def _describe(code: ModellingCode, config: Any, quantization: QuantizationSpec | None) -> TransformersSpec:
    text, layers = code.config, experts_by_layer(code)
    geometry, top_k = find_geometry(code), top_k_of(text)
    return TransformersSpec(
        model_type=config.model_type,
        vocab_size=code.writer.get_output_embeddings().out_features,
        hidden_size=text.hidden_size,
        max_position=_max_position(text),
        sparse_layers=tuple(number in layers for number in range(text.num_hidden_layers)),
        moe=_moe(text, layers, top_k),
        geometry=geometry,
        eos_token_ids=token_ids(
            text.eos_token_id if text.eos_token_id is not None else getattr(config, "eos_token_id", None)
        ),
        bos_token_id=text.bos_token_id if isinstance(text.bos_token_id, int) else None,
        kinds=kinds_of_layers(code, geometry, top_k),
        parameters=count_parameters(code, top_k),
        widened=count_widened(code, set(layers.values())),
        quantization=quantization,
    )


def experts_by_layer(code: ModellingCode) -> dict[int, nn.Module]:
    """Return the modules of experts that our kernels compute, by their layers' numbers in the body.

    Where layers differ in the shapes of experts, these are of the shape that most layers have. Return none if a layer
    has several modules of experts.
    """
    of_shape: dict[Any, dict[int, nn.Module]] = {}
    for number, layer in enumerate(layers_of(code)):
        modules = [(module, form) for module in layer.modules() if (form := form_of(module)) is not None]
        if len(modules) > 1:
            return {}
        for module, form in modules:
            if _is_ours(module, form, top_k_of(code.config)):
                of_shape.setdefault((module.down_proj.shape, form), {})[number] = module
    return max(of_shape.values(), key=len, default={})


def _is_ours(module: Any, form: ExpertForm, top_k: int | None) -> bool:
    """Return whether our kernels compute experts."""
    is_called = module.down_proj.shape[0] and (not form.is_scaled or top_k == 1)
    return bool(is_called) and activation_of(module, form) is not None


def _moe(text: Any, layers: Mapping[int, nn.Module], top_k: int | None) -> MoeSpec | None:
    if not layers:
        return None
    if top_k is None:
        raise ModelError(
            f"The configuration of this {text.model_type} model does not say how many experts a token chooses."
        )
    experts: Any = next(iter(layers.values()))
    form = form_of(experts)
    assert form is not None
    _, hidden, width = experts.down_proj.shape
    if form.is_transposed:
        hidden, width = width, hidden
    return MoeSpec(
        num_experts=experts.down_proj.shape[0],
        intermediate_size=width,
        gate=GateSpec(top_k),
        activation=activation_of(experts, form) or Activation(),
        expert_bias=form.has_bias,
        hidden_size=hidden,
    )


def top_k_of(text: Any) -> int | None:
    """Return the number of experts that a token chooses, None if the configuration does not state it."""
    names = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
    for config, name in itertools.product((text, getattr(text, "ffn_config", None)), names):
        value = getattr(config, name, None)
        if isinstance(value, Sequence):
            value = max(value, default=None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def _max_position(text: Any) -> int:
    longest: int = text.max_position_embeddings
    parameters = getattr(text, "rope_parameters", None) or {}
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    for table in tables:
        if table.get("rope_type") in _SWITCHING_ROPE:
            longest = min(longest, int(table.get("original_max_position_embeddings") or longest))
    return longest
