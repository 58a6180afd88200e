"""One probability out of several, learnt while serving: logistic regression on the log odds of the sources. Pure.

For each layer and distance the log odds of the prediction are a weighted sum of those of the sources. After each step
the weights move by one Newton step on what the step showed (as in the online Newton step of Hazan, Agarwal and Kale,
2007), with a Hessian that slowly forgets: there is no learning rate to tune. With one source this is a calibration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.prediction.predictor import Float, ObservedStep, Source

# Sources are not believed to be surer than this.
_LEAST = np.float32(1 / (1 + np.exp(6.0)))
_MEMORY = 0.999
# What the first weights are worth, as so much curvature.
_PRIOR = 1.0
_MAX_ROWS_LEARNT = 8
# A layer and a distance.
Pair = tuple[int, int]


@dataclass(frozen=True, slots=True)
class _Asked:
    """M pairs of a layer and a distance, [M] each. features: [T, M, E, F]. expected: [T, M, E], to be filled."""

    layers: NDArray[np.int64]
    distances: NDArray[np.int64]
    features: Float
    expected: Float

    @classmethod
    def of(cls, features: Mapping[Pair, Float]) -> _Asked:
        layers, distances = np.array(list(features)).T
        by_token = np.ascontiguousarray(np.stack(list(features.values()), axis=1))
        return cls(layers, distances, by_token, np.empty(by_token.shape[:-1], np.float32))


class CombinedSource:
    """Believes its sources as they deserve, in the mean over them at first."""

    __slots__ = ("_curvature", "_pending", "_sources", "_weights")

    def __init__(self, sources: Sequence[Source], num_layers: int, max_distance: int) -> None:
        num_features = len(sources) + 1
        self._sources = list(sources)
        # By layer, of which BEFORE is the last, and distance.
        self._weights = np.full((num_layers + 1, max_distance + 1, num_features), 1 / len(sources))
        self._weights[..., -1] = 0
        self._curvature = np.broadcast_to(
            _PRIOR * np.eye(num_features), (num_layers + 1, max_distance + 1, num_features, num_features)
        ).copy()
        self._pending: dict[Pair, Float] = {}

    def weights(self, layer: int, distance: int) -> NDArray[np.float64]:
        """[sources + 1]: the weight of each source, and the constant."""
        return self._weights[layer, distance]

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        features = self.features(step, layer, distance)
        if features is None:
            return None
        self._pending[layer, distance] = features
        return _sigmoid(features @ self._weights[layer, distance].astype(np.float32))

    def features(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        """[T, E, sources + 1]: what is weighted for layer + distance. None where no source knows anything."""
        found = [source.probabilities(step, layer, distance) for source in self._sources]
        known = [rows for rows in found if rows is not None]
        if not known:
            return None
        features: Float = np.zeros((*known[0].shape, len(found) + 1), np.float32)
        features[..., -1] = 1
        # Sources that know nothing leave their part of the sum to the others.
        share = np.float32(len(found) / len(known))
        for place, rows in enumerate(found):
            if rows is not None:
                features[..., place] = share * _log_odds(rows)
        return features

    def if_all_said(self, layer: int, distance: int, rows: Float) -> Float:
        """[T, E]: what it would make of it if each of its sources said `rows`, [T, E], of layer + distance."""
        weights = self._weights[layer, distance]
        return _sigmoid(np.float32(weights[:-1].sum()) * _log_odds(rows) + np.float32(weights[-1]))

    def one_by_one(self, moments: Sequence[Mapping[Pair, Float]], step: ObservedStep) -> list[dict[Pair, Float]]:
        """What `probabilities` would have said of the T tokens of a step, had each been a step of its own; learns them.

        Bit for bit, if no source says anything else of a token once it has learnt those before it in the step.

        moments: `features` by layer and distance, for each moment that predictions are wanted at; the last knows most,
        and is learnt from. step: complete. Returns [T, E] by moment, layer and distance.
        """
        asked = [_Asked.of(of_moment) for of_moment in moments if of_moment]
        if asked:
            last = asked[-1]
            chosen = np.stack([step.ids[target] for target in (last.layers + last.distances).tolist()], axis=1)
            for token in range(len(chosen)):
                for each in asked:
                    weights = self._weights[each.layers, each.distances].astype(np.float32)
                    each.expected[token] = _sigmoid(np.matmul(each.features[token], weights[..., None])[..., 0])
                self._newton_step(last.layers, last.distances, last.features[token, :, None], chosen[token, :, None])
        for source in self._sources:
            source.learn(step)
        found = (each.expected.swapaxes(0, 1) for each in asked)
        return [dict(zip(of_moment, next(found), strict=True)) if of_moment else {} for of_moment in moments]

    def learn(self, step: ObservedStep) -> None:
        pending = {key: features for key, features in self._pending.items() if sum(key) in step.ids}
        if pending:
            layers, distances = np.array(list(pending)).T
            features = np.stack(list(pending.values()))
            rows = np.unique(np.linspace(0, features.shape[1] - 1, _MAX_ROWS_LEARNT).astype(np.int64))
            chosen = np.stack([step.ids[target][rows] for target in (layers + distances).tolist()])
            self._newton_step(layers, distances, features[:, rows], chosen)
        self._pending.clear()
        for source in self._sources:
            source.learn(step)

    def end(self, requests: Iterable[int]) -> None:
        requests = list(requests)
        for source in self._sources:
            source.end(requests)

    def _newton_step(
        self, layers: NDArray[np.int64], distances: NDArray[np.int64], features: Float, chosen: NDArray[np.int64]
    ) -> None:
        """features: [M, T, E, F] of M pairs of a layer and a distance, chosen: [M, T, k] at their targets."""
        weights = self._weights[layers, distances]
        expected = _sigmoid(np.einsum("mtef,mf->mte", features, weights.astype(np.float32)))
        errors = expected.astype(np.float32)
        np.put_along_axis(errors, chosen, np.take_along_axis(errors, chosen, 2) - 1, 2)
        slope = np.einsum("mte,mtef->mf", errors, features)
        weighted = features * (expected * (1 - expected))[..., None]
        # The prior is renewed as it fades: a source that never speaks must not leave a singular matrix.
        prior = (1 - _MEMORY) * _PRIOR * np.eye(features.shape[-1])
        curvature: NDArray[np.float64] = _MEMORY * self._curvature[layers, distances] + prior
        curvature += np.einsum("mtef,mteg->mfg", weighted, features)
        self._curvature[layers, distances] = curvature
        self._weights[layers, distances] = weights - np.linalg.solve(curvature, slope[..., None])[..., 0]


def _log_odds(probabilities: Float) -> Float:
    clipped = np.minimum(np.maximum(probabilities, _LEAST), 1 - _LEAST)
    found: Float = np.log(clipped / (1 - clipped))
    return found


def _sigmoid(log_odds: Float) -> Float:
    # Beyond these bounds exp would overflow.
    found: Float = np.divide(1, 1 + np.exp(-log_odds.clip(-30, 30)), dtype=np.float32)
    return found
