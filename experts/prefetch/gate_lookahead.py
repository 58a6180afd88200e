"""The cheapest way to load ahead: what the gate of a later layer would choose now is taken for what it will choose."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from math import ceil

from torch import Tensor

from experts.memory.expert_memory import ExpertMemory
from experts.memory.residency_control import ResidencyControl
from experts.memory.transfers import Priority
from experts.prediction.predictor import Ids
from experts.prefetch.gate_preview import GatePreview
from experts.prefetch.judge import PrefetchJudge


class GateLookahead:
    """Looks one distance ahead, so that each layer is predicted once per step: as far as a load takes, and one layer.

    No probabilities, no learning: on a CPU every microsecond between two layers counts. The calls are those of
    `experts.prefetch.prefetcher.Prefetcher`.
    """

    def __init__(
        self,
        memory: ExpertMemory,
        control: ResidencyControl,
        preview: GatePreview,
        top_k: int,
        judge: PrefetchJudge | None,
        experts_here: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        """control: that of the memory. judge: None to predict in every step. experts_here: those of a layer that this
        rank holds now, None if all."""
        self._memory = memory
        self._control = control
        self._preview = preview
        self._top_k = top_k
        self._judge = judge
        self._experts_here = experts_here
        self._is_on = True
        self._distance = 1

    @property
    def is_on(self) -> bool:
        return self._is_on

    def begin_step(self, token_ids: Ids, requests: Ids) -> None:
        self._is_on = self._judge is None or self._judge.begin_step()
        self._distance = min(ceil(1 / self._memory.loads_per_layer()) + 1, self._preview.max_distance)

    def observe(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        target = layer + self._distance
        if not self._is_on or target >= len(self._control.layers):
            return
        started = time.perf_counter()
        chosen = self._preview(layer, self._distance, x).topk(self._top_k).indices
        wanted = [expert for expert, _ in Counter(chosen.flatten().tolist()).most_common()]
        if self._experts_here is not None:
            here = self._experts_here(target)
            wanted = [expert for expert in wanted if expert in here]
        self._memory.decide(lambda _: self._control.predict(target, wanted, Priority.NEXT_LAYER))
        self._memory.predictor_seconds += time.perf_counter() - started

    def end_step(self, ended_requests: Iterable[int]) -> None:
        if self._judge is not None:
            self._judge.end_step()
