"""transformers' own modelling code of a model type, as a model without weights.

Only classes of the installed package are used; code in a model folder never runs.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.core_model_loading import WeightTransform
from transformers.initialization import no_init_weights
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moeserve.model.config_bounds import check_counts, check_tree, with_special_floats
from moeserve.model.families import read_config
from moeserve.model.hf.common_experts import bring_to_common_form
from moeserve.model.spec import ModelError, UnsupportedModel

_META = torch.device("meta")
# Types of text decoders that transformers has as a part of a model alone, and the type of that model.
_PART_OF = {"deepseek_ocr2_text": "deepseek_ocr2", "step3p5": "step3p7"}
# Fields that a decoder and the model around it have both.
_OF_BOTH = frozenset(("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config"))
_MAPPINGS = ("MODEL_FOR_CAUSAL_LM_MAPPING", "MODEL_FOR_MULTIMODAL_LM_MAPPING", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING")


@dataclass(frozen=True, slots=True)
class ModellingCode:
    """A model on transformers' code.

    outer: the whole model, whose parameters a checkpoint names. writer: the part of it that turns states into logits.
    body: the text decoder in it. config: of the body, which its modules share. conversions: of stored tensors, before
    those that transformers has for the model.
    """

    outer: Any
    writer: Any
    body: Any
    config: Any
    conversions: tuple[WeightTransform, ...] = ()


def read_hf_config(directory: Path) -> Any:
    """Return the configuration object of a model folder. Raise ModelError, UnsupportedModel for an unknown type."""
    raw = with_special_floats(read_config(directory))
    model_type = raw.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise UnsupportedModel("The configuration names no model_type.")
    if model_type not in CONFIG_MAPPING:
        raise UnsupportedModel(
            f"Models of type {model_type!r} are not supported: transformers {transformers.__version__} has none either."
        )
    check_tree(raw)
    check_counts(raw)
    raw.pop("auto_map", None)
    attention = raw.get("attn_config")
    if isinstance(attention, dict) and "rope_theta" in attention and "rope_parameters" not in raw:
        # DBRX: transformers looks for the base of its rotation beside this dictionary alone.
        raw.setdefault("rope_theta", attention["rope_theta"])
    if model_type in _PART_OF:
        whole = _PART_OF[model_type]
        raw = {"model_type": whole, "text_config": raw, **{name: raw[name] for name in _OF_BOTH & raw.keys()}}
        model_type = whole
    try:
        return CONFIG_MAPPING[model_type].from_dict(raw)
    except Exception as error:  # Each configuration class has its own validators with their own exception types.
        reason = " ".join(str(error).split())
        file = directory / "config.json"
        raise ModelError(f"{file} is not a valid {model_type} configuration: {reason}") from error


def empty_model(config: Any) -> ModellingCode:
    """Return the model of `own_model` with its experts in the common form."""
    code = own_model(config)
    with _META, no_init_weights():
        return replace(code, conversions=bring_to_common_form(code.outer))


def own_model(config: Any) -> ModellingCode:
    """Build the model on the meta device. Raise UnsupportedModel if transformers has no text decoder of this type."""
    cls = _model_class(config)
    try:
        with warnings.catch_warnings(), _META, no_init_weights():
            warnings.simplefilter("ignore")
            outer = cls(config).eval()
    except Exception as error:  # Modelling code checks its configuration with any exception type.
        reason = " ".join(str(error).split())
        raise ModelError(f"transformers cannot build this {config.model_type} model: {reason}") from error
    outer.requires_grad_(False)
    writer, body = outer, outer.get_decoder()
    while body.get_output_embeddings() is not None and (inner := _decoder_in(body)) is not None:
        writer, body = body, inner
    if body is writer or writer.get_output_embeddings() is None:
        raise UnsupportedModel(f"Models of type {config.model_type!r} are not supported: they have no text decoder.")
    _drop_other_towers(outer, body, writer.get_output_embeddings())
    return ModellingCode(outer, writer, body, body.config)


def _decoder_in(model: Any) -> Any:
    """Return the text decoder in a model with an output projection, None if the model is one itself."""
    inner = model.get_decoder()
    if inner is model:
        inner = getattr(model, "model", None)
    return inner if isinstance(inner, transformers.PreTrainedModel) else None


def _model_class(config: Any) -> Any:
    """Return the class that generates text with this configuration; a checkpoint's own choice goes first."""
    named = getattr(config, "architectures", None)
    for name in named if isinstance(named, list) else ():
        cls = getattr(transformers, str(name), None)
        if _generates_with(cls, config):
            return cls
    for mapping in _MAPPINGS:
        classes = getattr(modeling_auto, mapping)
        if type(config) in classes:
            found = classes[type(config)]
            cls = found[0] if isinstance(found, tuple) else found
            if _generates_with(cls, config):
                return cls
    raise UnsupportedModel(
        f"Models of type {config.model_type!r} are not supported: transformers has no model of theirs that writes text."
    )


def _generates_with(cls: Any, config: Any) -> bool:
    if not isinstance(cls, type) or not issubclass(cls, transformers.PreTrainedModel):
        return False
    return isinstance(config, cls.config_class or ()) and cls.can_generate()


def _drop_other_towers(outer: nn.Module, body: nn.Module, head: nn.Module) -> None:
    """Remove the modules that text never passes: all beside the body on the way to it from `outer`, but the head."""
    parent = outer
    while parent is not body:
        on_the_way = None
        for name, child in list(parent.named_children()):
            if _contains(child, body):
                on_the_way = child
            elif not _contains(child, head) and next(child.parameters(), None) is not None:
                setattr(parent, name, None)
        if on_the_way is None:
            return
        parent = on_the_way


def _contains(module: nn.Module, wanted: nn.Module) -> bool:
    return any(child is wanted for child in module.modules())
