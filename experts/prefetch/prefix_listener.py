"""What is known of cached prefixes, told to those who load ahead."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

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
    """Around another listener: warms the experts of a hit's signature, in steps in which that one prefetches at all.

    While no request is between its admission and its first decode this is one comparison per layer.
    """

    def __init__(
        self, inner: LayerListener, memory: ExpertMemory, warmth: PrefixWarmth, profiles: RequestProfiles | None
    ) -> None:
        """warmth: of the memory's control. profiles: of a predictor that goes by them."""
        self._inner = inner
        self._memory = memory
        self._warmth = warmth
        self._profiles = profiles

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
        self._inner.begin_step(token_ids, requests)
        if not self._warmth.is_idle:
            may_ask, of_rows = self._inner.is_on, requests.tolist()
            self._tell(lambda: self._warmth.begin_step(of_rows, may_ask=may_ask))

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self._inner.observe(layer, x, expert_ids, weights)
        if not self._warmth.is_idle:
            chosen = set(expert_ids.flatten().tolist())
            self._tell(lambda: self._warmth.observed(layer, chosen))

    def after_layer(self, layer: int, residual: Tensor) -> None:
        self._inner.after_layer(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        ended = list(ended_requests)
        if not self._warmth.is_idle:
            self._tell(lambda: self._warmth.end_step(ended))
        self._inner.end_step(ended)

    def _tell(self, news: Callable[[], None]) -> None:
        started = time.perf_counter()
        self._memory.decide(lambda _: news())
        self._memory.predictor_seconds += time.perf_counter() - started
