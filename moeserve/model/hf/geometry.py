"""What the layers of a model keep of a request, found by a forward of a few tokens on the meta device.

A layer keeps rows of tokens (keys, values, keys of an indexer), which are paged, and states of fixed size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from moeserve.model.hf.modelling import ModellingCode
from moeserve.model.spec import KvLayerSpec, UnsupportedModel

# Attributes of a cache's layer that hold a row per token, and the dimension of the tokens. Heads are the other one.
_TOKEN_ROWS = {"keys": 2, "values": 2, "indexer_keys": 1, "idx_keys": 2}
_STATE_KINDS = ("conv_states", "recurrent_states")
_PROBE_TOKENS = 9


@dataclass(frozen=True, slots=True)
class StateShape:
    """A state of one request. name: `kind.index`, as transformers' caches number them."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """The memory of one layer.

    pools: for each kind of row per token its place in the KV memory. states: of fixed size. plain: the layer keeps keys
    and values that attention alone reads. opaque: transformers keeps it in a form of its own, which cannot be paged.
    """

    pools: Mapping[str, int] = field(default_factory=dict)
    states: tuple[StateShape, ...] = ()
    plain: bool = False
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Geometry:
    """layers: by the number that transformers' cache gives them. kv_layers: the KV memory, which `LayerMemory.pools`
    numbers."""

    layers: tuple[LayerMemory, ...]
    kv_layers: tuple[KvLayerSpec, ...]


def new_cache(config: Any) -> DynamicCache:
    """Return the cache that transformers itself would generate with."""
    return DynamicCache(config=config)


@torch.no_grad()
def find_geometry(code: ModellingCode) -> Geometry:
    """Run a few tokens through the empty model and look at what its cache keeps. Raises UnsupportedModel."""
    cache = new_cache(code.config)
    positions = torch.arange(_PROBE_TOKENS, device="meta")[None]
    try:
        with _experts_of_no_work(code.body):
            code.body(input_ids=positions, position_ids=positions, past_key_values=cache, use_cache=True)
    except Exception as error:  # Modelling code raises anything.
        reason = " ".join(str(error).split())
        raise UnsupportedModel(
            f"Models of type {code.config.model_type!r} are not supported: a first forward fails with {reason}"
        ) from error
    kv_layers: list[KvLayerSpec] = []
    layers = tuple(_memory_of(layer, kv_layers) for layer in cache.layers)
    return Geometry(layers, tuple(kv_layers))


def is_experts(module: nn.Module) -> bool:
    """Return whether the module is the experts of one layer behind transformers' experts interface."""
    return hasattr(module, "has_gate") and hasattr(module, "is_transposed") and hasattr(module, "down_proj")


@contextmanager
def _experts_of_no_work(body: nn.Module) -> Iterator[None]:
    """Experts answer with their input: on the meta device no row has chosen any."""
    experts = [module for module in body.modules() if is_experts(module)]
    for module in experts:
        module.forward = lambda rows, ids, weights: torch.empty_like(rows)
    try:
        yield
    finally:
        for module in experts:
            del module.forward


def _memory_of(layer: Any, kv_layers: list[KvLayerSpec]) -> LayerMemory:
    """Describe one layer of a cache; its pools are appended to `kv_layers`."""
    if isinstance(layer, DummyLayer):
        return LayerMemory()
    if type(layer).__module__ != "transformers.cache_utils" and not hasattr(layer, "idx_keys"):
        return LayerMemory(opaque=True)
    pools = {}
    for name, token_dim in _TOKEN_ROWS.items():
        rows = getattr(layer, name, None)
        if isinstance(rows, Tensor) and rows.dim() > 1 and rows.numel():
            num_heads = rows.shape[1] if token_dim == 2 else 1
            pools[name] = len(kv_layers)
            kv_layers.append(KvLayerSpec(num_heads, rows.shape[-1], 0))
    plain = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
    return LayerMemory(pools, tuple(_states_of(layer)), plain)


def _states_of(layer: Any) -> Iterator[StateShape]:
    if not isinstance(layer, LinearAttentionCacheLayerMixin):
        return
    for kind in _STATE_KINDS:
        for index, state in getattr(layer, kind).items():
            if isinstance(state, Tensor):
                yield StateShape(f"{kind}.{index}", tuple(state.shape[1:]), state.dtype)
