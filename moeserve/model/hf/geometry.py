"""Find the memory that each layer of a model keeps of a request, by a forward of a few tokens on the meta device.

A layer keeps rows of tokens (keys, values, keys of an indexer), which are paged, and states of fixed size.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental import _config as meta_config
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from moeserve.model.hf.expert_form import form_of
from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.spec import KvLayerSpec, UnsupportedModel

# Attributes of a cache's layer that hold a row per token, and the dimension of the tokens. Dimension 2 leaves dimension
# 1 for heads.
_TOKEN_ROWS = {"keys": 2, "values": 2, "indexer_keys": 1, "idx_keys": 2}
_STATE_KINDS = ("conv_states", "recurrent_states")
_PROBE_TOKENS = 9
_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "past_key_value")


@dataclass(frozen=True, slots=True)
class NamedState:
    """A state of one request. name: `kind.index`, as transformers' caches number them."""

    name: str
    shape: tuple[int, ...]

    @property
    def is_sum(self) -> bool:
        """True if all tokens so far have been added to it."""
        return self.name.startswith("recurrent")


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The memory of one layer.

    pools: by kind of row per token, its index in the KV memory. states: the states of fixed size. plain: True if the
    layer keeps keys and values that only attention reads. opaque: True if transformers keeps the memory in a form of
    its own, which cannot be paged. windowed: True if transformers itself keeps only the rows of the last tokens.
    """

    pools: Mapping[str, int] = field(default_factory=dict)
    states: tuple[NamedState, ...] = ()
    plain: bool = False
    opaque: bool = False
    windowed: bool = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """layers: by their numbers in transformers' cache. kv_layers: the KV memory, indexed by `LayerMemory.pools`.
    cache_class: the class of the cache that the model makes for itself."""

    layers: tuple[LayerMemory, ...]
    kv_layers: tuple[KvLayerSpec, ...]
    cache_class: type[Cache]

    @property
    def has_states(self) -> bool:
        """True if some layer keeps more than rows of tokens."""
        return any(layer.states or layer.opaque for layer in self.layers)

    def name_states(self, pools: Sequence[Tensor]) -> list[dict[str, Tensor]]:
        """Return the states of each layer by name. pools: of all states, in order."""
        remaining = iter(pools)
        return [{state.name: next(remaining) for state in layer.states} for layer in self.layers]

    @property
    def has_opaque(self) -> bool:
        return any(layer.opaque for layer in self.layers)


def new_cache(cls: type[Cache], config: Any) -> Cache:
    """Return an empty cache of the class that a model makes for itself."""
    try:
        return cls(config=config)  # type: ignore[call-arg]
    except TypeError:
        return cls()


def find_geometry(code: ModellingCode) -> Geometry:
    """Run a few tokens through the empty model and describe the contents of its cache.

    If the model cannot run like this, all its layers are opaque.
    """
    try:
        cache = run_empty(code)
    except UnsupportedModel:
        return Geometry((LayerMemory(opaque=True),) * code.config.num_hidden_layers, (), DynamicCache)
    kv_layers: list[KvLayerSpec] = []
    if type(cache) is DynamicCache:
        layers = [_memory_of(layer, kv_layers) for layer in cache.layers]
    else:
        layers = [LayerMemory(opaque=True)] * code.config.num_hidden_layers
    return Geometry(tuple(layers), tuple(kv_layers), type(cache))


@torch.no_grad()
def run_empty(code: ModellingCode) -> Any:
    """Run a prompt and one more token through an empty model; return the cache. Raise UnsupportedModel."""
    positions = torch.arange(_PROBE_TOKENS, device="meta")[None]
    try:
        # torch's own module of settings gets `patch` when it is imported.
        assume: Any = meta_config
        with _no_work_without_tokens(code.body), assume.patch(meta_nonzero_assume_all_nonzero=True):
            cache = code.body(input_ids=positions, position_ids=positions, use_cache=True).past_key_values
            one = torch.full((1, 1), _PROBE_TOKENS, device="meta")
            code.body(input_ids=one, position_ids=one, past_key_values=cache, use_cache=True)
    except Exception as error:  # Modelling code may raise any exception.
        reason = " ".join(str(error).split())
        raise UnsupportedModel(
            f"Models of type {code.config.model_type!r} are not supported: a first forward fails with {reason}"
        ) from error
    return cache


@contextmanager
def _no_work_without_tokens(body: nn.Module) -> Iterator[None]:
    """Let modules that mix no tokens return their input where the meta device cannot compute them.

    Experts look for the rows that chose them, and on the meta device no row has chosen any.
    """
    changed = [module for module in body.modules() if not any(map(takes_cache, module.modules()))]
    known = {module: frozenset(vars(module)) for module in body.modules()}
    for module in changed:
        module.forward = _Lenient(module)
    try:
        yield
    finally:
        for module in changed:
            del module.forward
        for module, before in known.items():
            # Such as frequencies that a rotary embedding computes when it first needs them.
            for name in vars(module).keys() - before:
                delattr(module, name)


class _Lenient:
    """Stands in for a module in a forward on the meta device, which serves only to find the memory of the layers.

    It skips experts. If a forward fails because it needs numbers, it returns rows of the input's shape.
    """

    def __init__(self, module: nn.Module) -> None:
        self._forward, self._is_experts = module.forward, form_of(module) is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_experts:
            return torch.empty_like(args[0])
        try:
            return self._forward(*args, **kwargs)
        except (NotImplementedError, RuntimeError):
            rows = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
            if rows is None or not rows.is_floating_point():
                raise
            return torch.empty_like(rows)


def takes_cache(module: nn.Module) -> bool:
    """Return whether a module mixes tokens: its forward takes a cache."""
    if isinstance(module, nn.ModuleList):
        return False
    parameters = inspect.signature(type(module).forward).parameters
    return any(name in parameters for name in _CACHE_ARGUMENTS)


def _memory_of(layer: Any, kv_layers: list[KvLayerSpec]) -> LayerMemory:
    """Describe one layer of a cache; its pools are appended to `kv_layers`."""
    if isinstance(layer, DummyLayer):
        return LayerMemory()
    if type(layer).__module__ != "transformers.cache_utils" and not hasattr(layer, "idx_keys"):
        return LayerMemory(opaque=True)
    pools = {}
    # A layer may keep more than keys and values; then only that fact is known.
    window = layer.sliding_window if type(layer) is DynamicSlidingWindowLayer else None
    for name, token_dim in _TOKEN_ROWS.items():
        rows = getattr(layer, name, None)
        if isinstance(rows, Tensor) and rows.dim() > 1 and rows.numel():
            num_heads = rows.shape[1] if token_dim == 2 else 1
            pools[name] = len(kv_layers)
            kv_layers.append(KvLayerSpec(num_heads, rows.shape[-1], 0, window))
    plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
    return LayerMemory(pools, tuple(_states_of(layer)), plain, windowed=window is not None)


def _states_of(layer: Any) -> Iterator[NamedState]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return
    for kind in _STATE_KINDS:
        for index, state in getattr(layer, kind).items():
            if isinstance(state, Tensor):
                yield NamedState(f"{kind}.{index}", tuple(state.shape[1:]))
