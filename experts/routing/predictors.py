"""Predict which experts a step needs one to three layers ahead, from the gates' choices so far. Torch-free.

`AffinityPredictor` knows the tokens of a step and all their choices, and learns while serving. `RecallSample` measures
predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from experts.routing.choices import Affinity, RoutingStatistics

Float = NDArray[np.float32]
Ids = NDArray[np.integer]

# The layer "before" the first: only the tokens of the step are known.
BEFORE = -1
# The largest distance at which anything is predicted.
MAX_DISTANCE = 3
# The `max_distance` that routing statistics need for affinity.
AFFINITY_SPAN = 6

_FIRST_REFRESH = 16  # steps until the affinity is first computed; each next interval is twice as long
# The weight, in tokens, of the popularity of the first layer's experts against the observed choices of a token id.
_TOKEN_PSEUDO_COUNTS = np.float32(1.0)


class LearntAffinity:
    """Estimates from routing statistics which experts come next. The caller gathers the statistics.

    The affinity is recomputed at growing intervals of at most `refresh_steps`; the caller reports each step by
    `step_done`.
    """

    def __init__(self, statistics: RoutingStatistics, refresh_steps: int = 512) -> None:
        self.statistics = statistics
        self._refresh_steps = refresh_steps
        self._interval = min(_FIRST_REFRESH, refresh_steps)
        self._due_in = self._interval
        self._affinity = Affinity.of(statistics)
        self._lifts: dict[tuple[int, int], tuple[Float, Float]] = {}

    @property
    def current(self) -> Affinity:
        return self._affinity

    @property
    def steps_until_refresh(self) -> int:
        """The number of steps until `current` changes."""
        return self._due_in

    def step_done(self) -> None:
        self._due_in -= 1
        if self._due_in <= 0:
            self._affinity = Affinity.of(self.statistics)
            self._lifts.clear()
            self._interval = min(2 * self._interval, self._refresh_steps)
            self._due_in = self._interval

    def of_token_ids(self, token_ids: Ids, layer: int) -> Float | None:
        """[T, E]: the probability that a token chooses each expert of `layer`, by its id alone.

        For later layers, the experts expected in the first layer replace chosen ones. None if the layer is farther than
        the statistics reach.
        """
        first = self._first_experts(token_ids)
        if layer == 0:
            return first
        if layer not in self._affinity.distances():
            return None
        following = self._affinity.conditional(layer)[0]
        return np.minimum(first @ following / first.sum(axis=1, keepdims=True), 1)

    def of_choices(self, chosen: Mapping[int, Ids], layer: int, distance: int) -> Float | None:
        """[T, E]: the probability that a token chooses each expert of layer + distance; a row sums to about k.

        chosen[l]: [T, k], the experts that the tokens chose in layer l. None if `layer` is not in `chosen`, or if the
        statistics do not reach so far.

        Each expert chosen in `layer`, or in an earlier layer within the statistics' reach, multiplies an expert's
        popularity by a lift (`Affinity.log_lifts`, so that uninformative layers add no noise). A statistic over several
        layers sums over all routes between them. The k factors of a layer overlap, so each counts with exponent k^-½:
        less than if they were independent, more than their mean. Layers count as if they were independent.
        """
        distances = self._affinity.distances()
        if layer not in chosen or distance not in distances:
            return None
        popularity = self._logarithms(layer, distance)[0]
        num_tokens, top_k = chosen[layer].shape
        lifts = np.zeros((num_tokens, len(popularity)), np.float32)
        for earlier in range(layer, -1, -1):
            span = layer - earlier + distance
            if span not in distances:
                break
            if earlier in chosen:
                lifts += self._logarithms(earlier, span)[1][chosen[earlier]].sum(axis=1)
        odds = np.exp(popularity + lifts * np.float32(top_k**-0.5))
        odds *= np.float32(top_k) / odds.sum(axis=1, keepdims=True)
        return np.minimum(odds, 1, out=odds)

    def _logarithms(self, layer: int, distance: int) -> tuple[Float, Float]:
        """Logarithms of the popularity [E] at layer + distance and of its lifts [E, E] by the experts of `layer`.

        They are computed on first use, so that no step pays for all of a new affinity.
        """
        found = self._lifts.get((layer, distance))
        if found is None:
            popularity = np.log(self._affinity.popularity()[layer + distance])
            found = self._lifts[layer, distance] = popularity, self._affinity.log_lifts(layer, distance)
        return found

    def _first_experts(self, token_ids: Ids) -> Float:
        """[T, E]: the probability that a token id chooses each expert of the first layer."""
        popularity = self._affinity.popularity()[0]
        top_k = np.float32(self.statistics.spec.top_k)
        found = np.empty((len(token_ids), len(popularity)), np.float32)
        for row, token_id in enumerate(token_ids.tolist()):
            counts = self.statistics.first_experts(token_id)
            if counts is None:
                found[row] = popularity
                continue
            seen = counts.sum() / top_k
            found[row] = (counts + _TOKEN_PSEUDO_COUNTS * popularity) / (seen + _TOKEN_PSEUDO_COUNTS)
        return found


class AffinityPredictor:
    """Follows a step layer by layer and predicts by `LearntAffinity`: an expert is needed if any token chooses it.

    Calls within a step: `begin`, then for each layer in order `observe`, then `end_step`. `predict` may be called any
    time after the `observe` of its layer, and `predict(BEFORE, …)` after `begin`. Arrays belong to the caller and are
    copied if kept. A layer may be left out, or computed for some rows only (as the last one is); its choices are then
    unknown.

    A step longer than `max_rows` is predicted from an even sample of its tokens, so that the cost is bounded; the
    sample stands for all tokens.
    """

    def __init__(
        self,
        learnt: LearntAffinity,
        recall: RecallSample | None = None,
        max_rows: int = 32,
        experts_here: Callable[[int], Collection[int]] | None = None,
    ) -> None:
        """recall: measures the predictions, as source `affinity`. experts_here: returns the experts of a layer that
        this rank holds now, which alone are predicted; None if it holds all."""
        self._learnt = learnt
        self._experts_here = experts_here
        self._recall = recall
        self._num_experts = learnt.statistics.spec.num_experts
        self._max_rows = max_rows
        self._num_rows = 0
        self._rows: NDArray[np.int64] | None = None
        self._token_ids: Ids | None = None
        self._chosen: dict[int, Ids] = {}

    def begin(self, token_ids: Ids) -> None:
        """Begin a step of T tokens. token_ids: [T]."""
        self._num_rows = len(token_ids)
        self._rows = None
        if self._num_rows > self._max_rows:
            self._rows = np.linspace(0, self._num_rows - 1, self._max_rows).astype(np.int64)
        self._token_ids = self._sampled(token_ids)
        self._chosen.clear()

    def observe(self, layer: int, expert_ids: Ids) -> None:
        """Observe the choice of a layer's gate. expert_ids: [T, k], distinct within a token."""
        if len(expert_ids) == self._num_rows:
            self._chosen[layer] = self._sampled(expert_ids).astype(np.int64, copy=False)

    def predict(self, layer: int, distance: int) -> Float:
        """[E]: the probability that the step needs the expert at layer + distance, which must exist."""
        if self._token_ids is None:
            raise ValueError("no step has begun")
        if layer == BEFORE:
            rows = self._learnt.of_token_ids(self._token_ids, distance - 1)
        else:
            rows = self._learnt.of_choices(self._chosen, layer, distance)
        if rows is None or not len(rows):
            return np.zeros(self._num_experts, np.float32)
        if self._recall is not None:
            self._recall.rank("affinity", layer, distance, rows)
        needed = any_token(rows, self._num_rows)
        if self._experts_here is None:
            return needed
        here = [*self._experts_here(layer + distance)]
        found = np.zeros_like(needed)
        found[here] = needed[here]
        return found

    def end_step(self) -> None:
        if self._recall is not None and self._num_rows:
            self._recall.end_step(self._chosen)
        self._token_ids = None

    def _sampled(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows.copy() if self._rows is None else rows[self._rows]


def any_token(probabilities: Float, num_tokens: int) -> Float:
    """[E]: the probability that at least one of `num_tokens` chooses the expert; the rows [T, E] stand for them all."""
    if num_tokens == len(probabilities) == 1:
        return probabilities[0]
    spared = np.log1p(-np.minimum(probabilities, np.float32(1 - 1e-6))).mean(axis=0)
    found: Float = -np.expm1(spared * np.float32(num_tokens))
    return found


@dataclass(frozen=True, slots=True)
class SourceRecall:
    """num_chosen: experts that tokens chose in layers that `source` had ranked `distance` layers before. num_recalled:
    the number of these experts among the k that it ranked highest for the same token."""

    source: str
    distance: int
    num_chosen: int
    num_recalled: int


def num_recalled(scores: NDArray[np.floating], chosen: Ids) -> int:
    """Count the chosen experts [T, k] that are among the k highest scores [T, E] of their token."""
    top_k = chosen.shape[1]
    likeliest = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    return int((chosen[:, :, None] == likeliest[:, None, :]).sum())


class RecallSample:
    """Counts one step in `interval`, and at most `max_rows` of its tokens, so that it costs little.

    Sources of predictions are identified by name. If a source ranks a layer twice from the same distance, the last
    ranking counts. Another thread may call `counts`.
    """

    def __init__(self, interval: int = 64, max_rows: int = 8) -> None:
        self._interval = interval
        self._max_rows = max_rows
        self._num_steps = 0
        # The latest number of rows, which is the same throughout a step, and the rows that are counted.
        self._num_rows = 0
        self._sampled: NDArray[np.int64] = np.empty(0, np.int64)
        # By source, distance and target layer: the number of rows, and the scores of the sampled rows.
        self._ranked: dict[tuple[str, int, int], tuple[int, NDArray[np.floating]]] = {}
        self._counts: dict[tuple[str, int], tuple[int, int]] = {}

    @property
    def is_counting(self) -> bool:
        """True if the running step is counted; else rankings and choices need not be reported."""
        return self._num_steps % self._interval == 0

    def rank(self, source: str, layer: int, distance: int, scores: NDArray[np.floating]) -> None:
        """Record a source's scores at `layer` for layer + distance. scores: [T, E], the higher the likelier; copied."""
        if self.is_counting:
            self._ranked[source, distance, layer + distance] = len(scores), scores[self._rows(len(scores))]

    def end_step(self, chosen: Mapping[int, Ids]) -> None:
        """Count the step. chosen[layer]: [T, k], -1 for none; layers with another T than their ranking are left out."""
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
        """Return the counts since the start, by source and distance."""
        return [SourceRecall(*key, *count) for key, count in sorted(self._counts.copy().items())]

    def forget(self) -> None:
        """Start counting at zero, with the next step."""
        self._num_steps = 0
        self._ranked.clear()
        self._counts = {}

    def _rows(self, num_rows: int) -> NDArray[np.int64]:
        if num_rows != self._num_rows:
            chosen = np.linspace(0, num_rows - 1, min(num_rows, self._max_rows)).astype(np.int64)
            self._num_rows, self._sampled = num_rows, np.unique(chosen)
        return self._sampled
