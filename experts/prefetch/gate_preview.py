"""What the gates of later layers say of the state at an earlier one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from experts.prediction.predictor import Float, Tap
from experts.prefetch.fitted_gates import FittedGates
from kernels.linear import pack_linear

# A norm's weight below this share of the largest cannot be taken back out of the state.
_LEAST_SHARE = 1e-3
_EPSILON = 1e-5


class GatedBlock(Protocol):
    """A layer's gate, apart from its experts."""

    def preview(self, x: Tensor) -> Tensor:
        """What the gate would rank for a state x [T, H] that is not its own input: [T, E], the larger the likelier."""


class MappedGate(Protocol):
    """A layer's gate as a linear map; see `experts.moe_layer.MoeLayer`."""

    @property
    def num_experts(self) -> int: ...

    def gate_map(self, dtype: torch.dtype) -> Tensor | None: ...


class GatePreview:
    """Has the gate of layer l + d judge the state at layer l (Eliseev and Mazur, arXiv 2312.17238).

    The state of the tap `EARLY` is the input of the gate of layer l: a norm of the residual stream, scaled by the
    weights of that layer's norm. That of `LATE` is the residual stream after layer l. Both are scaled by the weights of
    the norm at layer l + d. What the layers in between will add is not known yet: `fitted` has learnt it, as far as it
    is linear in the state, and judges in place of the gate at the same cost.
    """

    def __init__(
        self,
        layers: Sequence[GatedBlock],
        norms: Sequence[Tensor],
        max_distance: int,
        tap: Tap = Tap.EARLY,
        fitted: FittedGates | None = None,
    ) -> None:
        """norms: [H], the weights of the norm in front of each layer's gate. fitted: for this tap and all
        distances up to max_distance, or ValueError."""
        self.max_distance = max_distance
        self.tap = tap
        if fitted is None:
            self._judges = [_gates(layers, norms, layer, max_distance, tap) for layer in range(len(layers))]
        else:
            self._judges = _maps(fitted, tap, max_distance, len(layers), norms)

    def __call__(self, layer: int, distances: range, state: Tensor) -> Float:
        """state [T, H] -> [D, T, E], the larger the likelier, for layers at consecutive distances, all of which must
        exist.

        Fitted gates say what they say of all distances in one product.
        """
        x = state if self.tap is Tap.EARLY else unit_norm(state)
        return self._judges[layer](distances, x)


def unit_norm(residual: Tensor) -> Tensor:
    """[T, H] -> [T, H]: rows of mean square 1."""
    found: Tensor = residual * residual.square().mean(-1, keepdim=True).add_(_EPSILON).rsqrt_()
    return found


def scale_between(norms: Sequence[Tensor], layer: int, distance: int, tap: Tap) -> Tensor:
    """[H]: from the state at `layer` (of the tap `LATE`: of unit norm) to that in front of the later gate."""
    return norms[layer + distance] if tap is Tap.LATE else _ratio(norms[layer + distance], norms[layer])


def plain_maps(
    layers: Sequence[MappedGate], norms: Sequence[Tensor], max_distance: int
) -> dict[tuple[Tap, int, int], Tensor]:
    """By tap, layer and distance [E, H + 1] float32: what the gates say of a state, the constant last. Zeros for a gate
    that is no linear map."""
    found = {}
    for later, layer_ahead in enumerate(layers):
        gate = layer_ahead.gate_map(norms[0].dtype)
        if gate is None:
            gate = torch.zeros(layer_ahead.num_experts, len(norms[0]) + 1)
        for distance in range(1, min(max_distance, later) + 1):
            for tap in Tap:
                scale = scale_between(norms, later - distance, distance, tap).float()
                found[tap, later - distance, distance] = gate * torch.cat([scale, torch.ones(1)])
    return found


# Asked for distances and a state [T, H], says [D, T, E].
_Judge = Callable[[range, Tensor], Float]


def _gates(layers: Sequence[GatedBlock], norms: Sequence[Tensor], layer: int, max_distance: int, tap: Tap) -> _Judge:
    last = min(max_distance, len(layers) - 1 - layer)
    scales = [scale_between(norms, layer, distance, tap) for distance in range(1, last + 1)]

    def judge(distances: range, x: Tensor) -> Float:
        said = [layers[layer + distance].preview(x * scales[distance - 1]) for distance in distances]
        return _on_host(torch.stack(said))

    return judge


def _maps(fitted: FittedGates, tap: Tap, max_distance: int, num_layers: int, norms: Sequence[Tensor]) -> list[_Judge]:
    hidden_size = len(norms[0])
    of_layer: list[list[Tensor]] = [[] for _ in range(num_layers)]
    for distance in range(1, min(max_distance, num_layers - 1) + 1):
        maps = fitted.maps.get((tap, distance))
        if maps is None or maps.shape[0] != num_layers - distance or maps.shape[2] != hidden_size + 1:
            raise ValueError(f"the fitted gates are not of this model and tap {tap.value!r} at distance {distance}")
        for layer, found in enumerate(torch.from_numpy(maps).to(norms[0])):
            of_layer[layer].append(found)
    return [_stacked(found) for found in of_layer]


def _stacked(maps: Sequence[Tensor]) -> _Judge:
    """maps: of a layer, [E, H + 1] for each distance; none of the last layer, which nobody asks."""
    if not maps:
        return lambda distances, x: np.empty((0, len(x), 0), np.float32)
    together = torch.cat(list(maps))
    product = pack_linear(together[:, :-1], together[:, -1])

    def judge(distances: range, x: Tensor) -> Float:
        of_all = _on_host(product(x)).reshape(len(x), len(maps), -1)
        return of_all[:, distances.start - 1 : distances.stop - 1].transpose(1, 0, 2)

    return judge


def _on_host(x: Tensor) -> Float:
    """Most calls are on a CPU between two layers, where what changes nothing takes time as well."""
    if x.dtype is torch.float32 and x.device.type == "cpu":
        return x.numpy()
    return x.float().cpu().numpy()


def _ratio(wanted: Tensor, given: Tensor) -> Tensor:
    is_small = given.abs() < _LEAST_SHARE * given.abs().max()
    return torch.where(is_small, 0.0, wanted / given)
