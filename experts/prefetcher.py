"""Predictions at work: follows the computation through the layers and asks for the experts to come."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from experts.expert_memory import ExpertMemory
from experts.gates import GatesAhead
from experts.observer import AnyObserver
from experts.predictors import BEFORE, Ids, LearntAffinity, Predictor, RankPredictor, RecallSample
from experts.prefetch_planning import PrefetchPlanner
from experts.prefix_warmth import PrefixWarmth
from experts.routing import NOT_COMPUTED, RoutingRecorder
from experts.signatures import decode_signature


class LayerListener(AnyObserver):
    """Observes the layers of steps, and may ask for experts. Whoever knows the plans tells it where steps begin and
    end. See `Prefetcher`."""

    @property
    def is_on(self) -> bool:
        """Whether it asks for any in the step that runs."""
        return True

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None: ...

    def end_step(self, ended_requests: Iterable[int]) -> None: ...


class Prefetcher(LayerListener):
    """Called by the computing thread, which pays for predictions: `ExpertMemory.predictor_seconds` counts that.

    A wrong prediction costs time and never changes what is computed. Layers must be told in order within a step.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        predictor: Predictor,
        planner: PrefetchPlanner,
        learnt: LearntAffinity,
    ) -> None:
        """planner: asks this predictor and tells the control of this memory. learnt: what the predictor learns from."""
        self._memory = memory
        self._predictor = predictor
        self._planner = planner
        self._learnt = learnt
        self._recorder = RoutingRecorder(learnt.statistics)
        self._token_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._ids: NDArray[np.int16] = np.empty((0, 0, 0), np.int16)

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        """A step of T tokens begins: token_ids, requests [T]."""
        started = time.perf_counter()
        spec = self._learnt.statistics.spec
        self._token_ids = token_ids
        self._ids = np.full((spec.num_layers, len(token_ids), spec.top_k), NOT_COMPUTED, np.int16)
        self._predictor.begin(token_ids)
        self._plan(BEFORE)
        self._memory.predictor_seconds += time.perf_counter() - started

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """The gate of a layer chose for the rows that are followed: x [T, H] is what it saw."""
        started = time.perf_counter()
        chosen = expert_ids.cpu().numpy()
        if len(chosen) == len(self._token_ids):
            self._ids[layer] = chosen
        self._predictor.observe(layer, chosen)
        self._plan(layer)
        self._memory.predictor_seconds += time.perf_counter() - started

    def end_step(self, ended_requests: Iterable[int]) -> None:
        """The step is computed, and these requests are over."""
        started = time.perf_counter()
        self._recorder.add(self._ids, self._token_ids.tolist())
        self._learnt.step_done()
        self._predictor.end_step()
        self._memory.predictor_seconds += time.perf_counter() - started

    def _plan(self, layer: int) -> None:
        expected = self._planner.expect(layer)
        if expected:
            self._memory.decide(lambda loads: self._planner.request(layer, expected, loads))


# Predictions on one rank of several: they follow the rows at home, and hear of others that come to be computed.


class RankPrefetcher(LayerListener):
    """Tells the prefetcher of the rank's own rows, once the loads that the layer needs have begun, and the predictor of
    the rows that are computed here too."""

    def __init__(self, memory: ExpertMemory, prefetcher: Prefetcher, predictor: RankPredictor) -> None:
        """predictor: the prefetcher's."""
        self._memory = memory
        self._prefetcher = prefetcher
        self._predictor = predictor
        self._is_in_step = False
        self._home: tuple[Tensor, Tensor, Tensor] | None = None

    @property
    def is_on(self) -> bool:
        return self._prefetcher.is_on

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        self._is_in_step = True
        self._prefetcher.begin_step(token_ids, requests)

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        if self._is_in_step:
            self._home = x, expert_ids, weights

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        """Rows may arrive while steps are prepared that nobody begins: then there are none at home."""
        home, self._home = self._home, None
        if home is None:
            return
        started = time.perf_counter()
        self._predictor.observe_computed(layer, home[1].cpu().numpy(), expert_ids.cpu().numpy())
        self._memory.predictor_seconds += time.perf_counter() - started
        self._prefetcher.arrived(layer, *home)

    def after(self, layer: int, residual: Tensor) -> None:
        if self._is_in_step:
            self._prefetcher.after(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        self._is_in_step = False
        self._prefetcher.end_step(ended_requests)


# How much gates know, counted on one rank of several.


_MAX_ROWS = 8


class HomeRecall(LayerListener):
    """Around a listener that believes gates: counts what these say of the rows at home, at all distances.

    The listener itself hears of rows of all ranks, and not of the same in each layer.
    """

    def __init__(self, inner: LayerListener, gates: GatesAhead, recall: RecallSample) -> None:
        """gates: of the tap `EARLY`, those that the listener goes by."""
        self._inner = inner
        self._gates = gates
        self._recall = recall
        self._num_rows = 0
        self._is_counting = False
        self._chosen: dict[int, Ids] = {}

    @property
    def is_on(self) -> bool:
        return self._inner.is_on

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        self._inner.begin_step(token_ids, requests)
        self._num_rows = len(token_ids)
        self._is_counting = self._inner.is_on and self._num_rows > 0 and self._recall.is_counting

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        if not self._is_counting or len(x) != self._num_rows:
            return
        every = -(-self._num_rows // _MAX_ROWS)
        self._chosen[layer] = expert_ids[::every].cpu().numpy()
        for distance, logits in self._gates(layer, x[::every]):
            self._recall.rank(self._gates.name, layer, distance, logits)

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self._inner.arrived(layer, x, expert_ids, weights)

    def after(self, layer: int, residual: Tensor) -> None:
        self._inner.after(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        if self._inner.is_on and self._num_rows:
            self._recall.end_step(self._chosen)
            self._chosen.clear()
        self._is_counting = False
        self._inner.end_step(ended_requests)


# What is known of cached prefixes, told to those who load ahead.


class PrefixListener(LayerListener):
    """Around another listener: warms the experts of a hit's signature, in steps in which that one prefetches at all.

    While no request is between its admission and its first decode this is one comparison per layer.
    """

    def __init__(self, inner: LayerListener, memory: ExpertMemory, warmth: PrefixWarmth) -> None:
        """warmth: of the memory's control."""
        self._inner = inner
        self._memory = memory
        self._warmth = warmth

    @property
    def is_on(self) -> bool:
        return self._inner.is_on

    def recall(self, request: int, signature: bytes) -> None:
        """A request begins whose prefix was found in the cache. ValueError for no signature."""
        rates = decode_signature(signature, self._warmth.num_layers, self._warmth.num_experts)
        self._warmth.remember(request, rates)

    def begin_step(self, token_ids: NDArray[np.int64], requests: Ids) -> None:
        self._inner.begin_step(token_ids, requests)
        if not self._warmth.is_idle:
            may_ask, of_rows = self._inner.is_on, requests.tolist()
            self._tell(lambda: self._warmth.begin_step(of_rows, may_ask=may_ask))

    def chose(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self._inner.chose(layer, x, expert_ids, weights)

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self._inner.arrived(layer, x, expert_ids, weights)
        if len(x) and not self._warmth.is_idle:
            chosen = set(expert_ids.flatten().tolist())
            self._tell(lambda: self._warmth.observed(layer, chosen))

    def after(self, layer: int, residual: Tensor) -> None:
        self._inner.after(layer, residual)

    def end_step(self, ended_requests: Iterable[int]) -> None:
        ended = list(ended_requests)
        if not self._warmth.is_idle:
            self._tell(lambda: self._warmth.end_step(ended))
        self._inner.end_step(ended)

    def _tell(self, news: Callable[[], None]) -> None:
        started = time.perf_counter()
        self._memory.decide(lambda _: news())
        self._memory.predictor_seconds += time.perf_counter() - started
