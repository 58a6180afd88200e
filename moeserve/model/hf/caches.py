"""Transformers' caches over our memory: they write rows into their slots, and show a mixer the rows it may see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, LinearAttentionLayer

from moeserve.model.hf.geometry import Geometry, LayerMemory
from moeserve.model.hf.step import Lane, Step


class _StepLayer(DynamicLayer):
    """The layer of a step of many requests: rows are stored, attention finds them by block table."""

    indexer_position_ids = None

    def __init__(self, memory: LayerMemory, step: Step) -> None:
        super().__init__()
        self._memory, self._step = memory, step

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store keys [1, KV, T, Dk] and values [1, KV, T, Dv]."""
        step, pools = self._step, self._memory.pools
        slots = step.paged(self._memory).slots
        step.pools[pools["keys"]].index_copy_(1, slots, key_states[0])
        if "values" in pools:
            step.pools[pools["values"]].index_copy_(1, slots, value_states[0])
        step.written[id(key_states)] = key_states, self._memory
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


class _StepStateLayer(LinearAttentionLayer, _StepLayer):  # type: ignore[misc,override]
    """The layer of a step of many requests that keeps states.

    It holds no state and stores none, so a mixer computes as if there were no past; `moeserve.model.hf.scans` reads and
    updates the states of the requests.
    """

    def __init__(self, memory: LayerMemory, step: Step) -> None:
        LinearAttentionLayer.__init__(self, _num_states([state.name for state in memory.states]))
        device, dtype = self.device, self.dtype
        _StepLayer.__init__(self, memory, step)
        self.device, self.dtype = device, dtype

    def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return conv_states

    def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return recurrent_states


class LaneLayer(DynamicLayer):
    """One request's keys, values and indexer keys, for a mixer that sees only that request."""

    indexer_position_ids = None

    def __init__(self, memory: LayerMemory, step: Step, lane: Lane) -> None:
        super().__init__()
        self._memory, self._step, self._lane, self._seen = memory, step, lane, lane.start
        self.is_initialized = True

    def _store(self, name: str, rows: Tensor) -> Tensor:
        """rows [heads, t, D] -> all rows of the request [heads, L, D]."""
        pool = self._step.pools[self._memory.pools[name]]
        slots = self._lane.slots_in(self._memory)
        pool.index_copy_(1, slots[self._lane.start :], rows)
        return pool.index_select(1, slots)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        self._seen = self._lane.end
        self.keys = self._store("keys", key_states[0])[None]
        if "values" in self._memory.pools:
            self.values = self._store("values", value_states[0])[None]
        else:
            self.values = self.keys.new_empty((*self.keys.shape[:-1], 0))
        return self.keys, self.values

    def update_indexer(self, states: Tensor) -> Tensor:
        self.indexer_keys = self._store("indexer_keys", states)
        return self.indexer_keys

    def update_index(self, states: Tensor) -> Tensor:
        return self._store("idx_keys", states[0])[None]

    def get_seq_length(self) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._seen + query_length, 0


class StateLayer(LinearAttentionLayer):
    """The states of some requests (dimension 0), as views of their slots or gathered from them."""

    def __init__(self, states: Mapping[str, Tensor], *, started: bool) -> None:
        """states: by `NamedState.name`. started: True if they hold the states after earlier tokens."""
        places = [(name, *name.split(".")) for name in states]
        super().__init__(number_of_states=_num_states(states))
        for name, kind, number in places:
            place, state = int(number), states[name]
            getattr(self, kind)[place] = state
            getattr(self, f"is_{kind}_initialized")[place] = True
            self.has_previous_state[place] = started
            if kind == "conv_states":
                self.conv_kernel_size[place] = state.shape[-1]
            self.device, self.dtype = state.device, state.dtype  # type: ignore[assignment]


class LaneStateLayer(StateLayer, LaneLayer):  # type: ignore[misc,override]
    """A layer that keeps both rows of tokens and states."""

    def __init__(self, memory: LayerMemory, step: Step, lane: Lane, states: Mapping[str, Tensor]) -> None:
        StateLayer.__init__(self, states, started=lane.start > 0)
        device, dtype = self.device, self.dtype
        LaneLayer.__init__(self, memory, step, lane)
        self.device, self.dtype = device, dtype


def lane_layer(memory: LayerMemory, step: Step, lane: Lane, states: Mapping[str, Tensor]) -> Any:
    """Return the cache's layer that shows a mixer one request."""
    if states and memory.pools:
        return LaneStateLayer(memory, step, lane, states)
    return StateLayer(states, started=lane.start > 0) if states else LaneLayer(memory, step, lane)


def _num_states(names: Iterable[str]) -> int:
    """names: as `NamedState.name`."""
    return 1 + max(int(name.split(".")[1]) for name in names)


def step_cache(geometry: Geometry, step: Step) -> Cache:
    """Return the cache of a step of many requests."""
    layers = [(_StepStateLayer if memory.states else _StepLayer)(memory, step) for memory in geometry.layers]
    return cache_of(geometry.cache_class, layers)


def cache_of(cls: type[Cache], layers: list[Any]) -> Cache:
    """Return a cache of the transformers class `cls` with our `layers`."""
    cache = cls.__new__(cls)
    Cache.__init__(cache, layers=layers)
    return cache
