"""The modules that mix tokens, found by their signature: below a layer, the outermost ones that take a cache."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

_CACHE_ARGUMENTS = ("past_key_values", "cache_params", "past_key_value")


def find_mixers(body: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    """Yield (number of its layer in the cache, mixer)."""
    for layer in body.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            yield from _mixers_below(layer)


def _mixers_below(module: nn.Module) -> Iterator[tuple[int, nn.Module]]:
    for child in module.children():
        if takes_cache(child):
            yield _layer_number(child), child
        else:
            yield from _mixers_below(child)


def takes_cache(module: nn.Module) -> bool:
    if isinstance(module, nn.ModuleList):
        return False
    parameters = inspect.signature(type(module).forward).parameters
    return any(name in parameters for name in _CACHE_ARGUMENTS)


def _layer_number(mixer: nn.Module) -> int:
    numbered: Any = next(module for module in mixer.modules() if hasattr(module, "layer_idx"))
    return int(numbered.layer_idx)
