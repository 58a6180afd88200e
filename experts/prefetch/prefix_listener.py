"""What is known of cached prefixes, told to those who load ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.memory.expert_memory import ExpertMemory
from experts.prediction.predictor import Ids
from experts.prefetch.prefetcher import LayerListener
from experts.prefetch.prefix_warmth import PrefixWarmth
from experts.routing.request_profiles import RequestProfiles
from experts.routing.signatures import decode_signature

# A profile forgets its older tokens: a prefix is worth no more than these.
_MOST_TOKENS = 64


class PrefixListener:
    """Around another listener: warms the experts of a hit's signature while that one prefetches at all.

    A layer's next event is asked for when the layer is computed, which shows in the next one's beginning; until then
    the slots are in use.
    """

    def __init__(
        self,
        inner: LayerListener,
        memory: ExpertMemory,
        warmth: PrefixWarmth,
        profiles: RequestProfiles | None,
        experts_here: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        """warmth: of the memory's control. profiles: of a predictor that goes by them. experts_here: those of a layer
        that this rank of several holds."""
        self._inner = inner
        self._memory = memory
        self._warmth = warmth
        self._profiles = profiles
        self._experts_here = experts_here
        self._num_rows: dict[int, int] = {}
        self._before: int | None = None

    @property
    def is_on(self) -> bool:
        return self._inner.is_on

    def recall(self, request: int, signature: bytes, num_tokens: int) -> None:
        """A request begins whose first `num_tokens` tokens were found in the cache. ValueError for no signature."""
        rates = decode_signature(signature, self._warmth.num_layers, self._warmth.num_experts)
        self._warmth.remember(request, rates)
        if self._profiles is not None:
            self._profiles.seed(request, rates, min(num_tokens, _MOST_TOKENS))

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        self._num_rows = self._warmth.known(requests.tolist())
        if self._num_rows:
            # What the others know of the next layers is newer and takes the place of this.
            self._ask(range(self._warmth.num_layers), self._num_rows)
        self._inner.begin_step(token_ids, requests)

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self._inner.observe(layer, x, expert_ids, weights)
        if self._num_rows:
            self._ask_again(layer)

    def after_layer(self, layer: int, residual: Tensor) -> None:
        self._inner.after_layer(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        ended = list(ended_requests)
        if self._num_rows:
            self._ask_again(None)
            self._warmth.forget([request for request, count in self._num_rows.items() if count == 1])
        self._warmth.forget(ended)
        self._inner.end_step(ended)

    def _ask_again(self, layer: int | None) -> None:
        """Of the layer before `layer`: one row of each request in its next event."""
        before, self._before = self._before, layer
        if before is not None:
            self._ask([before], dict.fromkeys(self._num_rows, 1))

    def _ask(self, layers: Iterable[int], num_rows: dict[int, int]) -> None:
        if not self._inner.is_on:
            return
        started = time.perf_counter()

        def decision(_: float) -> None:
            for layer in layers:
                here = None if self._experts_here is None else self._experts_here(layer)
                self._warmth.ask(layer, num_rows, here)

        self._memory.decide(decision)
        self._memory.predictor_seconds += time.perf_counter() - started
