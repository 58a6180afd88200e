"""Expecting the experts on the most probable routes: a spanning tree grown from what a token has chosen. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from experts.prediction.predictor import BEFORE, Float, ObservedStep
from experts.prediction.sources import AffinitySource, LearntAffinity


class RouteSource:
    """An expert is as probable as the best route to it, layer by layer.

    The best routes form a tree, and probabilities only fall along a route; so the likeliest experts, however many a
    budget allows, are connected to what was chosen.
    """

    __slots__ = ("_first", "_layer", "_learnt", "_reached", "_step")

    def __init__(self, learnt: LearntAffinity) -> None:
        self._learnt = learnt
        self._first = AffinitySource(learnt)
        self._step: ObservedStep | None = None
        self._layer = BEFORE
        # [T, E] by distance, from 1 on, of the latest step and layer.
        self._reached: list[Float] = []

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        if step is not self._step or layer != self._layer:
            self._step, self._layer, self._reached = step, layer, []
        if 1 not in self._learnt.current.distances() or (layer != BEFORE and layer not in step.ids):
            return None
        while len(self._reached) < distance:
            self._reached.append(self._extend(step, layer, len(self._reached) + 1))
        return self._reached[distance - 1]

    def learn(self, step: ObservedStep) -> None:
        self._step, self._reached = None, []

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""

    def _extend(self, step: ObservedStep, layer: int, distance: int) -> Float:
        if layer == BEFORE and distance == 1:
            first = self._first.probabilities(step, BEFORE, 1)
            assert first is not None
            return first
        following = self._learnt.current.conditional(1)[layer + distance - 1]
        if distance == 1:
            return np.minimum(following[step.ids[layer]].max(axis=1), 1)
        # By token, so that [T, E, E] never exists.
        return np.stack([np.minimum((row[:, None] * following).max(axis=0), 1) for row in self._reached[-1]])
