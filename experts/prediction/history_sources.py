"""Expecting what a request did before, or what requests like it did. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import BEFORE, Float, ObservedStep
from experts.prediction.sources import LearntAffinity
from experts.routing.request_profiles import RequestProfiles


class SignatureSource:
    """A request goes on as it, and the prefix that it was admitted with, went so far.

    Its profile is smoothed with popularity, which is worth `prior_tokens` tokens. `profiles` is where a signature kept
    with a cached prefix is seeded.
    """

    __slots__ = ("_learnt", "_prior_tokens", "profiles")

    def __init__(self, learnt: LearntAffinity, half_life: float = 64, prior_tokens: float = 4) -> None:
        spec = learnt.statistics.spec
        self._learnt = learnt
        self._prior_tokens = np.float32(prior_tokens)
        self.profiles = RequestProfiles(spec.num_layers, spec.num_experts, half_life)

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        counts, tokens = self.profiles.rows(step.requests, layer + distance)
        popularity = self._learnt.current.popularity()[layer + distance]
        found: Float = (counts + self._prior_tokens * popularity) / (tokens + self._prior_tokens)[:, None]
        return found

    def learn(self, step: ObservedStep) -> None:
        self.profiles.add(step)

    def end(self, requests: Iterable[int]) -> None:
        self.profiles.end(requests)


class ActivationMatrixSource:
    """MoE-Infinity's predictor (Xue et al., arXiv 2401.14361): what the most similar finished request used.

    A request is its matrix of counts [L, E]; likeness is the mean over the layers seen of the cosine of rows. The
    prediction is the row of the likest, discounted with the distance. Of a full collection the matrix that was used
    least gives way.
    """

    __slots__ = ("_filled", "_profiles", "_rates", "_seen", "_similarity", "_step", "_top_k", "_units", "_uses")

    def __init__(self, num_layers: int, num_experts: int, top_k: int, capacity: int = 64) -> None:
        self._profiles = RequestProfiles(num_layers, num_experts)
        self._top_k = top_k
        self._rates: Float = np.zeros((capacity, num_layers, num_experts), np.float32)
        self._units: Float = np.zeros_like(self._rates)
        self._uses = np.zeros(capacity, np.int64)
        self._filled = 0
        self._step: ObservedStep | None = None
        self._similarity: Float = np.zeros((0, 0), np.float32)
        self._seen: set[int] = set()

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        if layer == BEFORE or not self._filled:
            return None
        self._compare(step, layer)
        likest = self._similarity.argmax(axis=1)
        num_layers = self._rates.shape[1]
        discount = np.float32(1 - distance / (num_layers + 1))
        return np.minimum(self._rates[likest, layer + distance] * discount, 1)

    def learn(self, step: ObservedStep) -> None:
        if step is self._step and len(self._similarity):
            np.add.at(self._uses, self._similarity.argmax(axis=1), 1)
        self._profiles.add(step)
        self._step = None

    def end(self, requests: Iterable[int]) -> None:
        for request in requests:
            if request in self._profiles:
                self._collect(self._profiles.of(request)[0])
                self._profiles.end([request])

    def _compare(self, step: ObservedStep, layer: int) -> None:
        """Adds to the similarities [T, N] the layers up to `layer` that were not yet compared."""
        if step is not self._step:
            self._step = step
            self._similarity = np.zeros((len(step.requests), self._filled), np.float32)
            self._seen = set()
        for known in sorted(step.ids.keys() - self._seen):
            if known <= layer:
                rows = self._profiles.rows(step.requests, known)[0]
                np.put_along_axis(rows, step.ids[known], np.take_along_axis(rows, step.ids[known], 1) + 1, 1)
                self._similarity += _unit(rows) @ self._units[: self._similarity.shape[1], known].T
                self._seen.add(known)

    def _collect(self, counts: Float) -> None:
        if self._filled < len(self._rates):
            place = self._filled
            self._filled += 1
        else:
            place = int(self._uses.argmin())
        totals = np.maximum(counts.sum(axis=1, keepdims=True), 1e-6)
        self._rates[place] = counts * (self._top_k / totals)
        self._units[place] = _unit(counts)
        self._uses[place] = 0


def _unit(rows: NDArray[np.float32]) -> Float:
    found: Float = rows / np.maximum(np.linalg.norm(rows, axis=-1, keepdims=True), 1e-6)
    return found
