"""What a prediction of experts is: the one protocol of all predictors, and from tokens to a step. Pure.

A predictor follows a step layer by layer and says, for a layer 1 … 3 ahead, which experts the step will need. It is
told everything and asked anything; who asks (the prefetcher, the simulator) decides what to do about the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Float = NDArray[np.float32]
Ids = NDArray[np.integer]

# The layer "before" the first: what is known of a step when its tokens are.
BEFORE = -1


class Tap(Enum):
    """Where the state is taken from which a later layer's gate is computed ahead of time.

    EARLY: the input of this layer's gate; the experts of this layer and the attention of the next are still to come.
    LATE: the residual after this layer; nearer to the truth, with the next layer's attention alone to hide behind.
    """

    EARLY = "early"
    LATE = "late"


class Predictor(Protocol):
    """Follows steps and predicts which experts they need.

    Calls within a step: `begin`, then for each layer in order `observe` and any `observe_gate`, and `predict` for a
    layer any time after its `observe`; `predict(BEFORE, …)` after `begin`. All arrays are the caller's and are copied
    if kept. A layer may be left out; what follows from it is then unknown and predicted by what is left.
    """

    def begin(self, token_ids: Ids, requests: Ids) -> None:
        """A step of T tokens begins. token_ids: [T]. requests: [T], a number for each running request."""

    def observe(self, layer: int, expert_ids: Ids, weights: Float) -> None:
        """The gate of a layer chose. expert_ids: [T, k], distinct within a token. weights: [T, k].

        A layer that computes only some rows (the last one, where only they are sampled from) counts as left out.
        """

    def observe_gate(self, tap: Tap, layer: int, distance: int, logits: Float) -> None:
        """The gate of layer + distance, applied to the state at `layer`. logits: [T, E], as the gate ranks them."""

    def predict(self, layer: int, distance: int) -> Float:
        """[E]: the probability that the step needs the expert at layer + distance, which must exist."""

    def end(self, requests: Iterable[int]) -> None:
        """These requests are over; their numbers may be used again."""


@dataclass(slots=True)
class ObservedStep:
    """What is known of a step so far, for the tokens that are followed.

    token_ids, requests: [T]. ids[layer]: [T, k] int64. weights[layer]: [T, k]. gates[tap, layer, distance]: [T, E].
    """

    token_ids: Ids
    requests: Ids
    ids: dict[int, NDArray[np.int64]] = field(default_factory=dict)
    weights: dict[int, Float] = field(default_factory=dict)
    gates: dict[tuple[Tap, int, int], Float] = field(default_factory=dict)


class Source(Protocol):
    """One reason to expect experts. Sources are combined (`experts.predictors`) or stand alone."""

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        """[T, E]: the probability that the token chooses the expert at layer + distance, each expert by itself.

        A row sums to about k. None where the source knows nothing. The caller does not write into it.
        """

    def learn(self, step: ObservedStep) -> None:
        """The step is complete. Called once for each step, before the next begins."""

    def end(self, requests: Iterable[int]) -> None:
        """These requests are over; what is kept of them alone may go."""


class StepPredictor:
    """A `Predictor` from a `Source`: an expert is needed if any token chooses it.

    Of a step longer than `max_rows` an even sample is followed, so that its cost is bounded; the sampled tokens then
    stand for the others.
    """

    __slots__ = ("_max_rows", "_num_experts", "_num_rows", "_rows", "_step", "source")

    def __init__(self, source: Source, num_experts: int, max_rows: int = 32) -> None:
        self.source = source
        self._num_experts = num_experts
        self._max_rows = max_rows
        self._num_rows = 0
        self._rows: NDArray[np.int64] | None = None
        self._step: ObservedStep | None = None

    def begin(self, token_ids: Ids, requests: Ids) -> None:
        self._finish_step()
        self._num_rows = len(token_ids)
        self._rows = None
        if self._num_rows > self._max_rows:
            self._rows = np.linspace(0, self._num_rows - 1, self._max_rows).astype(np.int64)
        self._step = ObservedStep(self._sampled(token_ids), self._sampled(requests))

    def observe(self, layer: int, expert_ids: Ids, weights: Float) -> None:
        step = self._current()
        if len(expert_ids) != self._num_rows:
            return
        step.ids[layer] = self._sampled(expert_ids).astype(np.int64, copy=False)
        step.weights[layer] = self._sampled(weights)

    def observe_gate(self, tap: Tap, layer: int, distance: int, logits: Float) -> None:
        if len(logits) == self._num_rows:
            self._current().gates[tap, layer, distance] = self._sampled(logits)

    def gate(self, tap: Tap, layer: int, distance: int) -> Float | None:
        """[T, E] of the followed tokens, as observed; None if it was not."""
        return self._current().gates.get((tap, layer, distance))

    def predict(self, layer: int, distance: int) -> Float:
        rows = self.token_probabilities(layer, distance)
        if rows is None or not len(rows):
            return np.zeros(self._num_experts, np.float32)
        return any_token(rows, self._num_rows)

    def token_probabilities(self, layer: int, distance: int) -> Float | None:
        """[T, E] of the followed tokens, as `Source.probabilities`."""
        return self.source.probabilities(self._current(), layer, distance)

    def end(self, requests: Iterable[int]) -> None:
        self._finish_step()
        self.source.end(requests)

    def _finish_step(self) -> None:
        if self._step is not None:
            self.source.learn(self._step)
            self._step = None

    def _current(self) -> ObservedStep:
        if self._step is None:
            raise ValueError("no step has begun")
        return self._step

    def _sampled(self, rows: NDArray[Any]) -> NDArray[Any]:
        return rows.copy() if self._rows is None else rows[self._rows]


def any_token(probabilities: Float, num_tokens: int) -> Float:
    """[E]: the probability that at least one of `num_tokens` chooses the expert; the rows [T, E] stand for them all."""
    if num_tokens == len(probabilities) == 1:
        return probabilities[0]
    spared = np.log1p(-np.minimum(probabilities, np.float32(1 - 1e-6))).mean(axis=0)
    found: Float = -np.expm1(spared * np.float32(num_tokens))
    return found


# Which of a step's choices each source of predictions had ranked first, counted on a sample of the steps. Pure.


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
