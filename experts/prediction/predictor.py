"""What a prediction of experts is: the one protocol of all predictors, and from tokens to a step. Pure.

A predictor follows a step layer by layer and says, for a layer 1 … 3 ahead, which experts the step will need. It is
told everything and asked anything; who asks (the prefetcher, the simulator) decides what to do about the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    """One reason to expect experts. Sources are combined (`experts.prediction.combined`) or stand alone."""

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
