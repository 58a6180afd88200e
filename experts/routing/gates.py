"""Apply the gates of later layers to the state at an earlier layer: plain gates, or maps fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experts.routing.files import Tap, TensorFileKind, Tensors
from kernels.linear import Linear, pack_linear
from kernels.moe_gate import NativeForesight, native_foresight
from kernels.norm import rms_norm

Float = NDArray[np.float32]
# (distances, state [T, H]) -> [T, E] for each: the scores of the gates at these distances.
_Judge = Callable[[range, Tensor], Sequence[Float]]

# A norm's weight below this share of the largest is too small to divide the state by.
_LEAST_SHARE = 1e-3
_EPSILON = 1e-5


class GatedBlock(Protocol):
    """A layer's gate, apart from its experts."""

    @property
    def product(self) -> Linear | None:
        """The product whose largest results name the gate's choice, None if it chooses otherwise."""

    def preview(self, x: Tensor) -> Tensor:
        """[T, E]: the gate's scores for a state x [T, H] that is not its own input, the larger the likelier."""


class MappedGate(Protocol):
    """A layer's gate as a linear map; see `experts.moe_layer.MoeLayer`."""

    @property
    def num_experts(self) -> int: ...

    def gate_map(self, dtype: torch.dtype) -> Tensor | None: ...


class GatePreview:
    """Applies the gate of layer l + d to the state at layer l (Eliseev and Mazur, arXiv 2312.17238).

    The state of the tap `EARLY` is the input of the gate of layer l: a norm of the residual stream, scaled by the
    weights of that layer's norm. The state of `SHARED` is the residual stream with layer l's shared expert. Both are
    scaled by the weights of the norm at layer l + d. The experts and layers in between have not added their part yet.
    `fitted` has learnt that part, as far as it is linear in the state, and replaces the gate at the same cost.
    """

    def __init__(
        self,
        layers: Sequence[GatedBlock],
        norms: Sequence[Tensor],
        max_distance: int,
        tap: Tap,
        fitted: FittedGates | None = None,
    ) -> None:
        """norms: [H], the weights of the norm in front of each layer's gate. fitted: for this tap and all
        distances up to max_distance, or ValueError."""
        self.max_distance = max_distance
        self.tap = tap
        # By layer, the product that ranks the experts of the next one, and the weights of the norm before it.
        self._next: list[tuple[Linear | None, Tensor]] = [
            (layer.product, norm) for layer, norm in zip(layers[1:], norms[1:], strict=True)
        ]
        if fitted is None:
            self._judges = [_gates(layers, norms, layer, max_distance, tap) for layer in range(len(layers))]
        else:
            maps = _maps(fitted, tap, max_distance, len(layers), norms)
            self._judges = [_stacked(of_layer, tap) for of_layer in maps]
            self._next = [(_packed(of_layer[:1]), torch.ones_like(norms[0])) for of_layer in maps[:-1]]

    def __call__(self, layer: int, distances: range, state: Tensor) -> Sequence[Float]:
        """state [T, H] -> [T, E] for each distance, the larger the likelier, for layers at consecutive distances, which
        must all exist. Fitted gates compute all distances in one product.
        """
        return self._judges[layer](distances, state)

    def foresights(self, top_k: int, sure: float) -> list[NativeForesight | None]:
        """Return by layer a single call that names the sure experts of the next layer, where there is one: at the tap
        `SHARED`, for a gate that the compiled kernels compute."""
        if self.tap is not Tap.SHARED:
            return []
        return [
            None if product is None else native_foresight(product, norm, _EPSILON, top_k, sure)
            for product, norm in self._next
        ]


def unit_norm(residual: Tensor) -> Tensor:
    """[T, H] -> [T, H]: rows of mean square 1."""
    found: Tensor = residual * residual.square().mean(-1, keepdim=True).add_(_EPSILON).rsqrt_()
    return found


def shared_state(residual: Tensor, shared: Tensor | None) -> Tensor:
    """[T, H] -> [T, H]: the state at the tap `SHARED`. shared: [T, H], the output of the shared expert, if any."""
    return residual if shared is None else residual + shared


def scale_between(norms: Sequence[Tensor], layer: int, distance: int, tap: Tap) -> Tensor:
    """[H]: the factor from the state at `layer` (for the tap `SHARED` of unit norm) to the input of the later gate."""
    return norms[layer + distance] if tap is Tap.SHARED else _ratio(norms[layer + distance], norms[layer])


def plain_maps(
    layers: Sequence[MappedGate], norms: Sequence[Tensor], max_distance: int
) -> dict[tuple[Tap, int, int], Tensor]:
    """Return the gates as maps of the state, by tap, layer and distance: [E, H + 1] float32, the constant last. Zeros
    for a gate that is no linear map.
    """
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


def _gates(layers: Sequence[GatedBlock], norms: Sequence[Tensor], layer: int, max_distance: int, tap: Tap) -> _Judge:
    last = min(max_distance, len(layers) - 1 - layer)
    scales = [scale_between(norms, layer, distance, tap) for distance in range(1, last + 1)]

    def input_of(distance: int, state: Tensor) -> Tensor:
        scale = scales[distance - 1]
        return rms_norm(state, scale, _EPSILON) if tap is Tap.SHARED else state * scale

    def judge(distances: range, state: Tensor) -> Sequence[Float]:
        said = [layers[layer + distance].preview(input_of(distance, state)) for distance in distances]
        # Most calls come between two layers on a CPU, where any conversion costs; a GPU is waited for once.
        return [_on_host(x) for x in said] if state.device.type == "cpu" else list(_on_host(torch.stack(said)))

    return judge


def _maps(
    fitted: FittedGates, tap: Tap, max_distance: int, num_layers: int, norms: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Return the maps of each layer: [E, H + 1] for each distance; the last layer has none."""
    hidden_size = len(norms[0])
    of_layer: list[list[Tensor]] = [[] for _ in range(num_layers)]
    for distance in range(1, min(max_distance, num_layers - 1) + 1):
        maps = fitted.maps.get((tap, distance))
        if maps is None or maps.shape[0] != num_layers - distance or maps.shape[2] != hidden_size + 1:
            raise ValueError(f"the fitted gates are not of this model and tap {tap.value!r} at distance {distance}")
        for layer, found in enumerate(torch.from_numpy(maps).to(norms[0])):
            of_layer[layer].append(found)
    return of_layer


def _packed(maps: Sequence[Tensor]) -> Linear:
    """Return maps [E, H + 1] as one product, side by side."""
    together = torch.cat(list(maps))
    return pack_linear(together[:, :-1], together[:, -1])


def _stacked(maps: Sequence[Tensor], tap: Tap) -> _Judge:
    """maps: of a layer."""
    if not maps:
        return lambda distances, state: ()
    product, ones = _packed(maps), torch.ones_like(maps[0][0, :-1])

    def judge(distances: range, state: Tensor) -> Sequence[Float]:
        x = rms_norm(state, ones, _EPSILON) if tap is Tap.SHARED else state
        of_all = _on_host(product(x)).reshape(len(x), len(maps), -1)
        return [of_all[:, distance - 1] for distance in distances]

    return judge


def _on_host(x: Tensor) -> Float:
    """Return x as float32 on the host."""
    if x.dtype is torch.float32 and x.device.type == "cpu":
        return x.numpy()
    return x.float().cpu().numpy()


def _ratio(wanted: Tensor, given: Tensor) -> Tensor:
    is_small = given.abs() < _LEAST_SHARE * given.abs().max()
    return torch.where(is_small, 0.0, wanted / given)


class GatesAhead:
    """Applies the gates of all layers within reach. name: the name of the preview's tap as a source of predictions."""

    def __init__(self, preview: GatePreview, num_layers: int) -> None:
        self._preview = preview
        self._num_layers = num_layers
        self.name = f"gate-{preview.tap.value}"

    def __call__(self, layer: int, state: Tensor) -> list[tuple[int, NDArray[np.float32]]]:
        """Return distances and logits [T, E] for a state [T, H] at the layer, T > 0."""
        distances = range(1, min(self._preview.max_distance, self._num_layers - 1 - layer) + 1)
        if not distances:
            return []
        return list(zip(distances, self._preview(layer, distances, state), strict=True))


class FittedGatesError(Exception):
    """A file of fitted gates that cannot be used; the message is one sentence for the operator."""


@dataclass(frozen=True, slots=True)
class FittedGates:
    """Linear maps from the state at one layer to the scores of a later layer's gate, learnt from text.

    maps[tap, distance]: [L - distance, E, H + 1] float; map l gives the scores of layer l + distance, its last column
    is the constant. A map is as wide as the gate that it replaces, so a fitted preview costs as much as a plain one.
    num_tokens: the number of tokens that the maps were learnt from.
    """

    maps: Mapping[tuple[Tap, int], NDArray[np.floating]]
    num_tokens: int

    def max_distance(self, tap: Tap) -> int:
        """Return the largest distance of this tap such that all distances from 1 on have maps; 0 without maps."""
        distance = 0
        while (tap, distance + 1) in self.maps:
            distance += 1
        return distance


_KIND = TensorFileKind("file of fitted gates", {"kind": "fitted gates", "format": "2"}, FittedGatesError, "; remove it")


def save_fitted_gates(path: Path, fitted: FittedGates, key: str) -> None:
    """Replace the file in one move. key: `experts.routing.files.model_key` of the model."""
    tensors: Tensors = {
        f"{tap.value}.{distance}": np.ascontiguousarray(maps, np.float16)
        for (tap, distance), maps in fitted.maps.items()
    }
    _KIND.save(path, tensors, {"model": key, "num_tokens": str(fitted.num_tokens)})


def load_fitted_gates(path: Path, key: str) -> FittedGates:
    """Return the maps in the file. FittedGatesError if it is missing, torn, of another model or of another format."""
    return _KIND.load(path, _restore, key)


def _restore(tensors: Tensors, metadata: dict[str, str]) -> FittedGates:
    maps = {_tap_and_distance(name): tensor for name, tensor in tensors.items()}
    return FittedGates(maps, int(metadata["num_tokens"]))  # type: ignore[arg-type]


def _tap_and_distance(name: str) -> tuple[Tap, int]:
    tap, distance = name.split(".")
    return Tap(tap), int(distance)
