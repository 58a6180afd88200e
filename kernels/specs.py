"""Plain parameters that kernels take beside their tensors. Torch-free, so that torch-free code may build them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ActivationKind = Literal["silu", "gelu", "gelu_tanh", "relu", "swigluoai", "relu2", "clamped_silu"]
GateScore = Literal["softmax", "sigmoid", "sparsemixer", "ones"]
GroupScore = Literal["top2", "max"]


@dataclass(frozen=True, slots=True)
class Activation:
    """The activation between the two projections of a feed-forward block.

    kind: names the function of the gate channels, which multiplies the up channels. ``swigluoai``, from gpt-oss, is
        ``(up + 1) * gate * sigmoid(alpha * gate)``. ``relu2``, the square of relu (https://arxiv.org/abs/2109.08668),
        has no gate. ``clamped_silu``, from Step 3.5, clamps the silu in place of its gate.
    limit: gates are clamped to at most limit, up channels to [-limit, limit]; 0 for none.
    """

    kind: ActivationKind = "silu"
    alpha: float = 1.0
    limit: float = 0.0

    @property
    def is_gated(self) -> bool:
        return self.kind != "relu2"


@dataclass(frozen=True, slots=True)
class GateSpec:
    """The rule by which a mixture-of-experts gate turns logits into experts and weights.

    top_k: experts per token.
    score: the function of the logits; ``sparsemixer`` is the sequential masked softmax of https://arxiv.org/abs/2409.12136,
        with ``ones`` the logits only choose, and every chosen expert has weight 1.
    softmax_after_top_k: softmax over the chosen logits instead of over all.
    renormalise: divide the chosen weights by their sum (at least ``norm_min``).
    scale: factor on the final weights.
    num_groups, top_groups, group_score: experts are chosen from the best ``top_groups`` of ``num_groups`` equal groups,
        by the score of a group's best expert (``max``) or the sum of its two best (``top2``).
    jitter: half the relative distance to the best logit within which sparsemixer keeps an expert.
    """

    top_k: int
    score: GateScore = "softmax"
    softmax_after_top_k: bool = False
    renormalise: bool = False
    norm_min: float = 0.0
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = "top2"
    jitter: float = 0.0
