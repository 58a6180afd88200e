"""Experts that transformers holds in a form of a type's own, brought to the common form while the model is empty.

Conversions like those of transformers say where the new parameters lie in a checkpoint. Everything else takes these
experts for ones of the common form.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
)
from transformers.models.mixtral.configuration_mixtral import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from moeserve.model.hf.modules import replace_module


class StackedExperts(WeightConverter):
    """A conversion of tensors [E, rows, columns] that are stored as [E * rows, columns]."""

    __slots__ = ()


class CommonExperts(nn.Module):
    """Stands where modelling code calls experts of its own form, and calls experts of the common form."""

    def __init__(self, num_experts: int, hidden: int, width: int, act_fn: Any) -> None:
        super().__init__()
        config = MixtralConfig(num_local_experts=num_experts, hidden_size=hidden, intermediate_size=width)
        self.common = MixtralExperts(config).requires_grad_(False)
        self.common.register_module("act_fn", act_fn)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """[..., H], [T, k], [T, k] -> [..., H]."""
        out: Tensor = self.common(hidden_states.flatten(0, -2), top_k_index, top_k_weights)
        return out.view(hidden_states.shape)


def bring_to_common_form(outer: nn.Module) -> tuple[WeightTransform, ...]:
    """Exchange such experts of an empty model; return the conversions that go before those of transformers."""
    conversions: tuple[WeightTransform, ...] = ()
    for name, module in list(outer.named_modules()):
        part: Any = module
        if type(module).__name__ == "DbrxExperts":
            own = part.mlp
            experts = CommonExperts(own.moe_num_experts, own.hidden_size, own.ffn_hidden_size, own.activation_fn)
            replace_module(outer, name, experts)
            conversions = _of_dbrx()
        elif type(module).__name__ == "Ernie4_5_VLMoeMoeBlock":
            part.register_module("vision_moe", None)  # Texts never pass it.
            conversions = _of_texts(part.num_experts)
    return conversions


def _of_dbrx() -> tuple[WeightTransform, ...]:
    """Return the conversions of DBRX: all experts of a projection are one tensor, that of the last one transposed.
    Quantised files have a matrix for each expert, and for queries, keys and values."""
    return (
        StackedExperts(["experts.mlp.w1", "experts.mlp.v1"], "experts.common.gate_up_proj", [Concatenate(1)]),
        StackedExperts("experts.mlp.w2", "experts.common.down_proj", [Transpose(1, 2)]),
        WeightConverter(
            ["experts.mlp.*.w1.weight", "experts.mlp.*.v1.weight"],
            "experts.common.gate_up_proj",
            [MergeModulelist(), Concatenate(1)],
        ),
        WeightConverter("experts.mlp.*.w2.weight", "experts.common.down_proj", [MergeModulelist()]),
        WeightConverter(
            [f"attn.{part}_proj.weight" for part in "qkv"],
            "attn.Wqkv.weight",
            [Concatenate()],
        ),
    )


def _of_texts(num_experts: int) -> tuple[WeightTransform, ...]:
    """Return the conversions of Ernie, whose files list the experts of images behind those of texts."""
    of_images = "|".join(map(str, range(num_experts, 2 * num_experts)))
    return (
        WeightRenaming(rf"experts\.(?:{of_images})\.", "of_images."),
        WeightConverter(
            ["experts.*.gate_proj.weight", "experts.*.up_proj.weight"],
            "text_moe.experts.gate_up_proj",
            [MergeModulelist(), Concatenate(1)],
        ),
        WeightConverter("experts.*.down_proj.weight", "text_moe.experts.down_proj", [MergeModulelist()]),
    )
