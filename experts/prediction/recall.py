"""Which of a step's choices each source of predictions had ranked first, counted on a sample of the steps. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import Float, Ids, ObservedStep, Source


@dataclass(frozen=True, slots=True)
class SourceRecall:
    """num_chosen: experts that tokens chose in layers that `source` had ranked `distance` layers before; num_recalled:
    how many of them were among the k that it thought likeliest for the same token."""

    source: str
    distance: int
    num_chosen: int
    num_recalled: int


def num_recalled(scores: NDArray[np.floating], chosen: Ids) -> int:
    """Of the experts that each token chose, [T, k], how many are among the k of its highest scores, [T, E]."""
    top_k = chosen.shape[1]
    likeliest = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    return int((chosen[:, :, None] == likeliest[:, None, :]).sum())


class RecallSample:
    """Counts one step in `interval`, and `max_rows` tokens of it, so that it costs little however much is predicted.

    Sources are told apart by name. What is ranked twice for a layer from the same distance counts as it was last said.
    `counts` may be called by another thread.
    """

    __slots__ = ("_counts", "_interval", "_max_rows", "_num_rows", "_num_steps", "_ranked", "_sampled")

    def __init__(self, interval: int = 64, max_rows: int = 8) -> None:
        self._interval = interval
        self._max_rows = max_rows
        self._num_steps = 0
        # The latest number of rows, which is the same all through a step, and those of them that are counted.
        self._num_rows = 0
        self._sampled: NDArray[np.int64] = np.empty(0, np.int64)
        # By source, distance and target: how many rows there were, and the scores of the sampled ones.
        self._ranked: dict[tuple[str, int, int], tuple[int, NDArray[np.floating]]] = {}
        self._counts: dict[tuple[str, int], tuple[int, int]] = {}

    @property
    def is_counting(self) -> bool:
        """Whether the step that runs is of the sample; if not, nobody needs to tell what was ranked and chosen."""
        return self._num_steps % self._interval == 0

    def rank(self, source: str, layer: int, distance: int, scores: NDArray[np.floating]) -> None:
        """A source was asked at `layer` for layer + distance. scores: [T, E], the higher the likelier; copied."""
        if self.is_counting:
            self._ranked[source, distance, layer + distance] = len(scores), scores[self._rows(len(scores))]

    def end_step(self, chosen: Mapping[int, Ids]) -> None:
        """chosen[layer]: [T, k], -1 for none, of what was ranked; layers that computed fewer tokens are left out."""
        found: dict[tuple[str, int], list[tuple[NDArray[np.floating], Ids]]] = {}
        for (source, distance, target), (num_rows, scores) in self._ranked.items():
            ids = chosen.get(target)
            if ids is not None and len(ids) == num_rows:
                found.setdefault((source, distance), []).append((scores, ids[self._rows(num_rows)]))
        for key, of_layers in found.items():
            scores, ids = map(np.concatenate, zip(*of_layers, strict=True))
            num_chosen, recalled = self._counts.get(key, (0, 0))
            self._counts[key] = num_chosen + int((ids >= 0).sum()), recalled + num_recalled(scores, ids)
        self._ranked.clear()
        self._num_steps += 1

    def counts(self) -> list[SourceRecall]:
        """Since the start, by source and distance."""
        return [SourceRecall(*key, *count) for key, count in sorted(self._counts.copy().items())]

    def forget(self) -> None:
        """Starts counting at zero, with the next step."""
        self._num_steps = 0
        self._ranked.clear()
        self._counts = {}

    def _rows(self, num_rows: int) -> NDArray[np.int64]:
        if num_rows != self._num_rows:
            chosen = np.linspace(0, num_rows - 1, min(num_rows, self._max_rows)).astype(np.int64)
            self._num_rows, self._sampled = num_rows, np.unique(chosen)
        return self._sampled


class RankedSource:
    """A source whose rankings are counted under a name."""

    __slots__ = ("_inner", "_name", "_recall")

    def __init__(self, name: str, inner: Source, recall: RecallSample) -> None:
        self._name = name
        self._inner = inner
        self._recall = recall

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        rows = self._inner.probabilities(step, layer, distance)
        if rows is not None:
            self._recall.rank(self._name, layer, distance, rows)
        return rows

    def learn(self, step: ObservedStep) -> None:
        self._inner.learn(step)

    def end(self, requests: Iterable[int]) -> None:
        self._inner.end(requests)


class CountedSteps:
    """The source in which all ranked ones come together: a sample's step ends when it is learnt."""

    __slots__ = ("_inner", "_recall")

    def __init__(self, inner: Source, recall: RecallSample) -> None:
        self._inner = inner
        self._recall = recall

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        return self._inner.probabilities(step, layer, distance)

    def learn(self, step: ObservedStep) -> None:
        self._recall.end_step(step.ids)
        self._inner.learn(step)

    def end(self, requests: Iterable[int]) -> None:
        self._inner.end(requests)
