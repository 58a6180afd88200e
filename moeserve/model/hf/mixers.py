"""The modules that mix tokens, and the ways in which they are called on a step of many requests.

- together: one call on all rows. Its cache stores keys and values, its attention finds them by block table; our kernels
  find states by the slots of the step's requests.
- apart: one call per request, with a cache that shows it that request alone and with an additive mask. Single tokens of
  layers that keep nothing but states share one call.
- one by one: apart, and a chunk that continues a request goes token by token.

Everything else in a model works row by row and runs once.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from kernels.ops import Ops
from moeserve.model.hf.attention import attach
from moeserve.model.hf.caches import StateLayer, cache_of, lane_layer
from moeserve.model.hf.fused import fuse
from moeserve.model.hf.geometry import Geometry, LayerMemory, new_cache, takes_cache
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.hf.scans import scan
from moeserve.model.hf.step import PAGED, Lane, RowMask, Step


@dataclass(frozen=True, slots=True)
class Ways:
    """A choice of how mixers are called.

    together: mixers that keep only keys and values take all rows in one call. scans: mixers whose states our kernels
    know take all rows in one call. whole_angles: a mixer that is called apart gets the rotary angles of all tokens of
    its request, not only of the new tokens. singly: other mixers that keep states take a continuation token by token.
    """

    together: bool = True
    scans: bool = True
    whole_angles: bool = False
    singly: bool = False

    def __str__(self) -> str:
        parts = ["mixers together" if self.together else "mixers apart"]
        if not self.scans:
            parts.append("states by transformers")
        if self.whole_angles:
            parts.append("angles of all tokens")
        if self.singly:
            parts.append("continued token by token")
        return ", ".join(parts)


# From the cheapest to the dearest.
ALL_WAYS = (
    Ways(),
    Ways(together=False),
    Ways(together=False, whole_angles=True),
    Ways(scans=False),
    Ways(together=False, scans=False),
    Ways(together=False, scans=False, whole_angles=True),
    Ways(scans=False, singly=True),
    Ways(together=False, scans=False, singly=True),
    Ways(together=False, scans=False, whole_angles=True, singly=True),
)


def find_mixers(body: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield (number of its layer in the cache, mixer): below a layer, the outermost modules that take a cache."""
    for layer in body.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            yield from _mixers_below(layer)


def _mixers_below(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    for child in module.children():
        if takes_cache(child):
            yield _layer_number(child), child
        else:
            yield from _mixers_below(child)


def _layer_number(mixer: nn.Module) -> int:
    numbered: Any = next(module for module in mixer.modules() if hasattr(module, "layer_idx"))
    return int(numbered.layer_idx)


class Mixers:
    """All mixers of a model, called in the chosen ways while a step runs, and as they are otherwise."""

    def __init__(self, code: ModellingCode, geometry: Geometry, step: Step, ops: Ops) -> None:
        self._code, self._geometry, self._step, self._ops = code, geometry, step, ops
        self._mixers = list(find_mixers(code.body))
        for number, mixer in self._mixers:
            for module in mixer.modules():
                attach(module, self._memory_of(number), step, ops)
        scanned = ((mixer, scan(mixer, number, self._memory_of(number), step, ops)) for number, mixer in self._mixers)
        self._scanned = {mixer: forward for mixer, forward in scanned if forward is not None}
        self.num_together = 0

    @property
    def has_scans(self) -> bool:
        """True if our kernels know the states of some mixer."""
        return bool(self._scanned)

    @property
    def num_apart(self) -> int:
        return len(self._mixers) - self.num_together

    def use(self, ways: Ways) -> None:
        self.num_together = 0
        for number, mixer in self._mixers:
            vars(mixer).pop("forward", None)
            if ways.scans and mixer in self._scanned:
                self.num_together += 1
                mixer.forward = self._scanned[mixer]
            elif ways.together and self._goes_together(number, mixer):
                self.num_together += 1
                fused = fuse(mixer, self._memory_of(number), self._step, self._ops)
                if fused is not None:
                    mixer.forward = fused
            else:
                memory, cls = self._memory_of(number), self._geometry.cache_class
                mixer.forward = _Apart(self._code, self._step, mixer, number, memory, cls, ways)

    def _memory_of(self, number: int) -> LayerMemory:
        """Return the memory of a layer; one that attends over the keys of another layer may be unknown to caches."""
        layers = self._geometry.layers
        return layers[number] if number < len(layers) else LayerMemory()

    def _goes_together(self, number: int, mixer: nn.Module) -> bool:
        memory = self._memory_of(number)
        reads_another = not (memory.pools or memory.states or memory.opaque)
        nested = any(takes_cache(module) and not hasattr(module, "layer_idx") for module in mixer.modules())
        return (memory.plain or reads_another) and not nested


class PerLane(list[Any]):
    """An answer whose parts do not fit into one tensor; the next mixer gets its own part."""


@dataclass(slots=True)
class _Opaque:
    """The cache of one request in a form of transformers' own, after `num_tokens` tokens; None if it is broken."""

    cache: Cache
    num_tokens: int | None


class _Apart:
    """Stands in for the forward of a mixer that is called once per request."""

    def __init__(
        self,
        code: ModellingCode,
        step: Step,
        mixer: nn.Module,
        number: int,
        memory: LayerMemory,
        cache_class: type[Cache],
        ways: Ways,
    ) -> None:
        """number: the layer's number in caches. cache_class: the class of the cache that the model makes for itself."""
        self._code, self._step, self._ways, self._number = code, step, ways, number
        self._cache_class = cache_class
        self._memory = memory
        self._forward = mixer.forward
        self._signature = inspect.signature(mixer.forward)
        self._dtype = next((p.dtype for p in mixer.parameters() if p.is_floating_point()), torch.float32)
        # For an opaque layer: each request's cache, by state slot.
        self._opaque: dict[int, _Opaque] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step = self._step
        if not step.running:
            return self._forward(*args, **kwargs)
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        arguments.update(arguments.pop("kwargs", {}))
        config = self._code.config
        config._attn_implementation_internal = "eager"
        try:
            lanes, memory = step.lanes, self._memory
            if memory.states and not memory.pools and len(lanes) > 1:
                return self._with_shared_decodes(arguments, lanes)
            return _join([self._one(arguments, place, lane) for place, lane in enumerate(lanes)])
        finally:
            config._attn_implementation_internal = PAGED

    def _one(self, arguments: Mapping[str, Any], place: int, lane: Lane) -> Any:
        """Return the output for one request's rows. place: the index of its lane in the step."""
        continues = lane.start > 0 and lane.count > 1
        if self._ways.singly and continues and (self._memory.states or self._memory.opaque):
            rows = range(lane.first, lane.last)
            singles = (replace(lane, first=row, last=row + 1, start=lane.start + row - lane.first) for row in rows)
            return _join([self._one(arguments, place, single.cut()) for single in singles])
        opaque = self._opaque_of(lane) if self._memory.opaque else None
        cache = self._cache_of(lane) if opaque is None else opaque.cache
        own = {name: self._part(value, place, lane, cache) for name, value in arguments.items()}
        if self._ways.whole_angles and "position_embeddings" in own:
            positions = torch.arange(lane.end, device=lane.slots.device)[None]
            rows = next(value for name, value in own.items() if name == "hidden_states")
            own["position_embeddings"] = self._code.body.rotary_emb(rows, positions)
        answer = self._forward(**own)
        if opaque is not None:
            opaque.num_tokens = lane.end
        return answer

    def _cache_of(self, lane: Lane) -> Cache:
        """Return the cache that shows the mixer one request."""
        states = {
            shape.name: self._step.state_pools[self._number][shape.name][lane.state : lane.state + 1]
            for shape in self._memory.states
        }
        return cache_of(Cache, [None] * self._number + [lane_layer(self._memory, self._step, lane, states)])

    def _opaque_of(self, lane: Lane) -> _Opaque:
        """Return transformers' own cache of a request. It counts as broken until the lane is computed.

        Raise RuntimeError unless it covers exactly the tokens before the lane. The engine then restarts, and computes
        its open requests anew.
        """
        if lane.start == 0:
            self._opaque[lane.state] = _Opaque(new_cache(self._cache_class, self._code.config), 0)
        opaque = self._opaque.get(lane.state)
        if opaque is None or opaque.num_tokens != lane.start:
            raise RuntimeError(
                f"layer {self._number} does not have the state of a request's first {lane.start} tokens any more"
            )
        opaque.num_tokens = None
        return opaque

    def _with_shared_decodes(self, arguments: Mapping[str, Any], lanes: Sequence[Lane]) -> Any:
        """Compute a layer that keeps only states: all requests that continue with one token form one batch."""
        decodes = [place for place, lane in enumerate(lanes) if lane.count == 1 and lane.start > 0]
        answers: dict[int, Any] = {}
        if len(decodes) > 1:
            device = lanes[0].slots.device
            rows = torch.tensor([lanes[place].first for place in decodes], device=device)
            slots = torch.tensor([lanes[place].state for place in decodes], device=device)
            pools = self._step.state_pools[self._number]
            layer = StateLayer({name: pool.index_select(0, slots) for name, pool in pools.items()}, started=True)
            cache = cache_of(Cache, [None] * self._number + [layer])
            out = self._forward(**{name: self._batch(value, rows, cache) for name, value in arguments.items()})
            for name, pool in pools.items():
                kind, number = name.split(".")
                pool.index_copy_(0, slots, getattr(layer, kind)[int(number)])
            answers = {place: _row(out, number) for number, place in enumerate(decodes)}
        return _join([answers[p] if p in answers else self._one(arguments, p, lane) for p, lane in enumerate(lanes)])

    def _part(self, value: Any, place: int, lane: Lane, cache: Cache) -> Any:
        """Return a lane's part of an argument."""
        if isinstance(value, Cache):
            return cache
        if isinstance(value, RowMask):
            first_key = 0
            if self._memory.opaque and cache.layers:
                first_key = cache.get_mask_sizes(lane.count, self._number)[1]
            return value.additive(lane, self._dtype, first_key)
        if isinstance(value, PerLane):
            return value[place]
        if isinstance(value, Tensor):
            return _rows_of(value, lane, self._step.num_rows)
        if isinstance(value, Mapping) and not value:  # Layers pass data to each other within one forward.
            return lane.shared.setdefault("told", type(value)())
        if isinstance(value, dict):
            return {name: self._part(part, place, lane, cache) for name, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._part(part, place, lane, cache) for part in value)
        return value

    def _batch(self, value: Any, rows: Tensor, cache: Cache) -> Any:
        """Return rows of a ragged [1, T, ...] as a batch [B, 1, ...]."""
        if isinstance(value, Cache):
            return cache
        if isinstance(value, RowMask):
            return None
        if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[:2] == (1, self._step.num_rows):
            return value[0].index_select(0, rows).unsqueeze(1)
        if isinstance(value, dict):
            return {name: self._batch(part, rows, cache) for name, part in value.items()}
        if isinstance(value, tuple | list):
            return type(value)(self._batch(part, rows, cache) for part in value)
        return value


def _rows_of(value: Tensor, lane: Lane, num_rows: int) -> Tensor:
    if value.dim() >= 2 and value.shape[0] == 1 and value.shape[1] == num_rows:
        return value[:, lane.first : lane.last]
    if value.dim() >= 2 and value.shape[-1] == num_rows and value.shape[-2] == 1:  # Positions [3, 1, T].
        return value[..., lane.first : lane.last]
    return value


def _row(out: Any, number: int) -> Any:
    if isinstance(out, Tensor):
        return out[number : number + 1]
    return tuple(_row(part, number) for part in out) if isinstance(out, tuple) else out


def _join(parts: list[Any]) -> Any:
    """Join the outputs for lanes, [1, t, ...] each, into one [1, T, ...]."""
    first = parts[0]
    if isinstance(first, tuple):
        return tuple(_join(list(column)) for column in zip(*parts, strict=True))
    if not isinstance(first, Tensor):
        return first
    if first.dim() >= 2 and first.shape[0] == 1 and len({(*p.shape[:1], *p.shape[2:]) for p in parts}) == 1:
        return torch.cat(parts, 1)
    return PerLane(parts)
