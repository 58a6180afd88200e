"""Expert selection: from gate logits to the chosen experts and their weights."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import Structure, addressof, c_double, c_int64, c_void_p

import torch
from torch import Tensor

from kernels.activation import sigmoid
from kernels.linear import Linear, PanelLinear
from kernels.sampling import softmax
from kernels.specs import GateSpec as GateSpec

# Returns the largest `count` values of each row, in descending order, and their places.
_Top = Callable[[Tensor, int], tuple[Tensor, Tensor]]
# The order of `Score` in gate.cpp.
_SCORES = ("softmax of chosen", "softmax", "sigmoid")


def select_experts(logits: Tensor, spec: GateSpec, correction_bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Choose ``spec.top_k`` experts per token.

    logits: [T, E], any float dtype; all arithmetic is fp32.
    correction_bias: [E] fp32, added to the scores for the choice only, never to the weights.
    Returns ids [T, k] int64 and weights [T, k] fp32. Every row depends on its own logits only.
    """
    return _select(logits.float(), spec, correction_bias, torch.topk)


def native_choice(
    gate: Linear, spec: GateSpec, correction_bias: Tensor | None, expert_scales: Tensor | None = None
) -> NativeChoice | None:
    """Return a gate's product and its choice as one call; None where the compiled kernels do not compute both."""
    if not isinstance(gate, PanelLinear) or gate.order is not None or len(gate.matrices) != 1:
        return None
    if spec.num_groups > 1 or spec.score not in ("softmax", "sigmoid"):
        return None
    return NativeChoice(gate, spec, correction_bias, expert_scales)


class _Gate(Structure):
    """`Gate` of gate.cpp."""

    _fields_ = [
        ("product", c_void_p),
        ("top_k", c_int64),
        ("score", c_int64),
        ("bias", c_void_p),
        ("renormalises", c_int64),
        ("least_total", c_double),
        ("scale", c_double),
        ("scales", c_void_p),
    ]


class NativeChoice:
    """Chooses experts for rows x [T, H] float32 with the bits of `select_experts` on the gate's logits.

    expert_scales: [E] fp32, a factor on the weight of each expert. address: of its `Gate` of gate.cpp.
    """

    def __init__(
        self,
        gate: PanelLinear,
        spec: GateSpec,
        correction_bias: Tensor | None,
        expert_scales: Tensor | None = None,
    ) -> None:
        self._gate, self._correction_bias, self.top_k = gate, correction_bias, spec.top_k
        self._expert_scales = expert_scales
        of_chosen = softmax_of_chosen(spec, correction_bias is not None)
        self._record = _Gate(
            gate.address,
            spec.top_k,
            _SCORES.index("softmax of chosen" if of_chosen else spec.score),
            None if correction_bias is None else correction_bias.data_ptr(),
            spec.renormalise,
            spec.norm_min,
            spec.scale,
            None if expert_scales is None else expert_scales.data_ptr(),
        )
        self.address = addressof(self._record)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if x.dtype is not torch.float32:
            raise TypeError(f"x is {x.dtype}, the product is in float32")
        num_rows = x.shape[0]
        ids = x.new_empty((num_rows, self.top_k), dtype=torch.int64)
        weights = x.new_empty((num_rows, self.top_k))
        self._gate.kernels.choose_experts(
            self.address, x.data_ptr(), x.stride(0), num_rows, ids.data_ptr(), weights.data_ptr()
        )
        return ids, weights


class NativeForesight:
    """Names the experts that rows are sure to choose, by a gate's product on the norm of their state, in one call.

    Between two layers on a CPU every call costs, and those that release the interpreter lock wait for it.
    """

    def __init__(self, gate: PanelLinear, norm: Tensor, eps: float, top_k: int, sure: float) -> None:
        """norm: [H] float32, its weights. sure: see `__call__`."""
        self._gate, self._norm = gate, norm
        self._wanted = (c_int64 * gate.out_features)()
        self._rule = norm.data_ptr(), eps, top_k, sure, addressof(self._wanted)

    def takes(self, residual: Tensor, shared: Tensor | None) -> bool:
        """Return True if both are contiguous and in float32."""
        parts = (residual,) if shared is None else (residual, shared)
        return all(part.dtype is torch.float32 and part.is_contiguous() for part in parts)

    def __call__(self, residual: Tensor, shared: Tensor | None) -> list[int]:
        """residual, shared [T, H], as `takes` says. Return the experts that rows are sure to choose.

        An expert is sure if it is among the largest `top_k` and larger than all others by more than `sure` times the
        distance from the mean to the largest. Those of most rows come first; of one row the likeliest.
        """
        gate = self._gate
        num_wanted = gate.kernels.foresee(
            gate.address,
            residual.data_ptr(),
            None if shared is None else shared.data_ptr(),
            residual.shape[0],
            *self._rule,
        )
        return self._wanted[:num_wanted]


def native_foresight(gate: Linear, norm: Tensor, eps: float, top_k: int, sure: float) -> NativeForesight | None:
    """Return None where the compiled kernels do not compute the product, or the state is not in float32."""
    if not isinstance(gate, PanelLinear) or gate.order is not None or len(gate.matrices) != 1:
        return None
    if norm.dtype is not torch.float32:
        return None
    return NativeForesight(gate, norm.contiguous(), eps, top_k, sure)


def select_experts_reference(
    logits: Tensor, spec: GateSpec, correction_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose like `select_experts`, but among equal scores or groups the lowest first; torch.topk has no such order."""
    return _select(logits.float(), spec, correction_bias, _top_lowest_first)


def softmax_of_chosen(spec: GateSpec, has_bias: bool) -> bool:
    """Return True if the weights are a softmax over the chosen logits.

    A full softmax followed by renormalising also gives exp(l_i) / sum over the chosen of exp(l_j).
    """
    if spec.score != "softmax" or spec.num_groups > 1 or has_bias:
        return False
    return spec.softmax_after_top_k or (spec.renormalise and spec.norm_min == 0.0)


def _select(logits: Tensor, spec: GateSpec, correction_bias: Tensor | None, top: _Top) -> tuple[Tensor, Tensor]:
    if spec.score == "sparsemixer":
        return _sparsemixer(logits, spec)
    if spec.score == "ones":
        _, ids = top(logits if correction_bias is None else logits + correction_bias, spec.top_k)
        return ids, torch.ones(ids.shape, dtype=torch.float32, device=ids.device)
    if softmax_of_chosen(spec, correction_bias is not None):
        values, ids = top(logits, spec.top_k)
        weights = softmax(values)
    else:
        scores = sigmoid(logits) if spec.score == "sigmoid" else softmax(logits)
        choice = scores if correction_bias is None else scores + correction_bias
        if spec.num_groups > 1:
            choice = _mask_groups(choice, spec, top)
        _, ids = top(choice, spec.top_k)
        weights = scores.gather(-1, ids)
        if spec.renormalise:
            # Rounded from fp64 a sum of few numbers has the same bits in any order.
            total = weights.double().sum(-1, keepdim=True).float()
            weights.div_(total.clamp_min_(spec.norm_min) if spec.norm_min else total)
    return ids, weights if spec.scale == 1.0 else weights.mul_(spec.scale)


def _mask_groups(choice: Tensor, spec: GateSpec, top: _Top) -> Tensor:
    grouped = choice.view(choice.shape[0], spec.num_groups, -1)
    worth = grouped.amax(-1) if spec.group_score == "max" else grouped.topk(2, dim=-1).values.sum(-1)
    _, best = top(worth, spec.top_groups)
    dropped = torch.ones_like(worth, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(dropped.unsqueeze(-1), -torch.inf).flatten(-2)


def _sparsemixer(logits: Tensor, spec: GateSpec) -> tuple[Tensor, Tensor]:
    ids, weights = [], []
    magnitude = logits.abs()
    remaining = logits
    for _ in range(spec.top_k):
        best, index = remaining.max(-1, keepdim=True)
        far = (best - logits) / magnitude.clamp(min=best) > 2 * spec.jitter
        weights.append(softmax(remaining.masked_fill(far, -torch.inf)).gather(-1, index))
        ids.append(index)
        remaining = remaining.scatter(-1, index, -torch.inf)
    return torch.cat(ids, -1), torch.cat(weights, -1)


def _top_lowest_first(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    ordered, places = values.sort(dim=-1, descending=True, stable=True)
    return ordered[..., :count], places[..., :count]
