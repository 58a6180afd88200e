"""The form of a module of experts in transformers' modelling code: the order of its weights, and its arguments."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

_ROUTED = ["hidden_states", "top_k_index", "top_k_weights"]


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """is_transposed: matrices are [in, out]. is_concatenated: gate rows before up rows, else they alternate.
    is_scaled: it is called with the rows of all experts, of which those that were not chosen are zeros."""

    has_gate: bool = True
    is_transposed: bool = False
    is_concatenated: bool = True
    has_bias: bool = False
    has_post_expert_norm: bool = False
    is_scaled: bool = False


def form_of(module: Any) -> ExpertForm | None:
    """Return the form of the experts of one layer; None for any other module."""
    if not hasattr(module, "down_proj"):
        return None
    if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):  # Behind transformers' experts interface.
        return ExpertForm(
            module.has_gate,
            module.is_transposed,
            module.is_concatenated,
            module.has_bias,
            module.has_post_expert_norm,
        )
    gate_up, down = getattr(module, "gate_up_proj", None), module.down_proj
    if not isinstance(gate_up, nn.Parameter) or gate_up.dim() != 3 or len(dict(module.named_parameters())) != 2:
        return None
    experts, hidden, width = down.shape
    takes = list(inspect.signature(type(module).forward).parameters)[1:]
    if takes == _ROUTED and hasattr(module, "_apply_gate") and gate_up.shape == (experts, 2 * width, hidden):
        return ExpertForm()
    is_scaled = takes == _ROUTED[:1] and hasattr(module, "act_fn") and gate_up.shape == (experts, width, 2 * hidden)
    return ExpertForm(is_transposed=True, is_scaled=True) if is_scaled else None
