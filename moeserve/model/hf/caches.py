"""Transformers' caches over our memory: they write rows into their slots, and show a mixer what it may see."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer

from moeserve.model.hf.geometry import Geometry, LayerMemory, new_cache
from moeserve.model.hf.step import Step


class _StepLayer(DynamicLayer):
    """The layer of a step of many requests: rows are stored, attention finds them by block table."""

    indexer_position_ids = None

    def __init__(self, memory: LayerMemory, step: Step) -> None:
        super().__init__()
        self._memory, self._step = memory, step

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys [1, KV, T, Dk] and values [1, KV, T, Dv]."""
        step, pools = self._step, self._memory.pools
        step.pools[pools["keys"]].index_copy_(1, step.slots, key_states[0])
        if "values" in pools:
            step.pools[pools["values"]].index_copy_(1, step.slots, value_states[0])
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def step_cache(config: Any, geometry: Geometry, step: Step) -> Cache:
    """Return the cache of a step of many requests."""
    return cache_of(type(new_cache(config)), [_StepLayer(memory, step) for memory in geometry.layers])


def cache_of(cls: type[Cache], layers: list[Any]) -> Cache:
    """Return a cache of a class of transformers with layers of ours."""
    cache = cls.__new__(cls)
    Cache.__init__(cache, layers=layers)
    return cache
