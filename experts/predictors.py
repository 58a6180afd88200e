"""Reasons to expect experts: how popular they are, what was chosen before, what a later gate says early. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from experts.predictor import (
    BEFORE,
    CountedSteps,
    Ids,
    ObservedStep,
    RankedSource,
    RecallSample,
    Source,
    StepPredictor,
    Tap,
)
from experts.routing import Affinity, RoutingStatistics, StatisticsSpec
from experts.signatures import RequestProfiles

Float = NDArray[np.float32]

_FIRST_REFRESH = 16
# Tokens that the popularity of the first layer's experts is worth against what a token id was seen to choose.
_TOKEN_PSEUDO_COUNTS = np.float32(1.0)


class LearntAffinity:
    """The affinity behind routing statistics that somebody else gathers, computed anew at growing intervals.

    refresh_steps: the longest interval. A single one serves all sources of a predictor; whoever runs the steps calls
    `step_done`.
    """

    __slots__ = ("_affinity", "_due_in", "_interval", "_refresh_steps", "statistics")

    def __init__(self, statistics: RoutingStatistics, refresh_steps: int = 512) -> None:
        self.statistics = statistics
        self._refresh_steps = refresh_steps
        self._interval = min(_FIRST_REFRESH, refresh_steps)
        self._due_in = self._interval
        self._affinity = Affinity.of(statistics)

    @property
    def current(self) -> Affinity:
        return self._affinity

    @property
    def steps_until_refresh(self) -> int:
        """`current` stays what it is until so many more steps are done."""
        return self._due_in

    def step_done(self) -> None:
        self._due_in -= 1
        if self._due_in <= 0:
            self._affinity = Affinity.of(self.statistics)
            self._interval = min(2 * self._interval, self._refresh_steps)
            self._due_in = self._interval


class PopularitySource:
    """Every token may choose what tokens choose most."""

    __slots__ = ("_learnt",)

    def __init__(self, learnt: LearntAffinity) -> None:
        self._learnt = learnt

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        popularity = self._learnt.current.popularity()[layer + distance]
        return np.broadcast_to(popularity, (len(step.token_ids), len(popularity)))

    def learn(self, step: ObservedStep) -> None:
        """The statistics learn."""

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""


class AffinitySource:
    """What follows the experts that a token has chosen; before the first layer, what its token id says.

    Each chosen expert, of this layer and of those before it that lie within the statistics' greatest distance,
    multiplies an expert's popularity by how much likelier it makes it (`Affinity.log_lifts`, so that layers that say
    nothing do not add their noise). The k factors of a layer overlap, so each counts with exponent k^-½: less than if
    they were independent, more than their mean. Layers count as if they were.

    With `BEFORE` and a distance beyond the first layer, the experts expected there stand in for chosen ones.
    """

    __slots__ = ("_learnt", "_lifts", "_lifts_of")

    def __init__(self, learnt: LearntAffinity) -> None:
        self._learnt = learnt
        self._lifts: dict[tuple[int, int], tuple[Float, Float]] = {}
        self._lifts_of = learnt.current

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        affinity = self._learnt.current
        if layer == BEFORE:
            first = self._first_experts(step.token_ids)
            if distance == 1:
                return first
            if distance - 1 not in affinity.distances():
                return None
            following = affinity.conditional(distance - 1)[0]
            return np.minimum(first @ following / first.sum(axis=1, keepdims=True), 1)
        if layer not in step.ids or distance not in affinity.distances():
            return None
        popularity = self._logarithms(layer, distance)[0]
        top_k = step.ids[layer].shape[1]
        lifts = np.zeros((len(step.token_ids), len(popularity)), np.float32)
        for earlier in range(layer, -1, -1):
            span = layer - earlier + distance
            if span not in affinity.distances():
                break
            if earlier in step.ids:
                lifts += self._logarithms(earlier, span)[1][step.ids[earlier]].sum(axis=1)
        odds = np.exp(popularity + lifts * np.float32(top_k**-0.5))
        odds *= np.float32(top_k) / odds.sum(axis=1, keepdims=True)
        return np.minimum(odds, 1, out=odds)

    def learn(self, step: ObservedStep) -> None:
        """The statistics learn."""

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""

    def _logarithms(self, layer: int, distance: int) -> tuple[Float, Float]:
        """[E] of popularity at layer + distance and [E, E] of what an expert of `layer` multiplies it by.

        They are taken when first asked for, so that no step pays for all of a new affinity.
        """
        affinity = self._learnt.current
        if affinity is not self._lifts_of:
            self._lifts_of = affinity
            self._lifts.clear()
        found = self._lifts.get((layer, distance))
        if found is None:
            popularity = np.log(affinity.popularity()[layer + distance])
            found = popularity, affinity.log_lifts(layer, distance)
            self._lifts[layer, distance] = found
        return found

    def _first_experts(self, token_ids: Ids) -> Float:
        """[T, E]."""
        popularity = self._learnt.current.popularity()[0]
        top_k = np.float32(self._learnt.statistics.spec.top_k)
        found = np.empty((len(token_ids), len(popularity)), np.float32)
        for row, token_id in enumerate(token_ids.tolist()):
            counts = self._learnt.statistics.first_experts(token_id)
            if counts is None:
                found[row] = popularity
                continue
            seen = counts.sum() / top_k
            found[row] = (counts + _TOKEN_PSEUDO_COUNTS * popularity) / (seen + _TOKEN_PSEUDO_COUNTS)
        return found


class GateSource:
    """What the gate of a later layer says of an earlier state (Eliseev and Mazur 2023; Fate, arXiv 2502.12224).

    An expert's margin is how far its logit lies above the middle between the k-th and the next one, in standard
    deviations of the token's logits. slope: the log odds per standard deviation, before anything is learnt.
    """

    __slots__ = ("_slope", "_tap", "_top_k")

    def __init__(self, tap: Tap, top_k: int, slope: float = 4.0) -> None:
        self._tap = tap
        self._top_k = top_k
        self._slope = np.float32(slope)

    def probabilities(self, step: ObservedStep, layer: int, distance: int) -> Float | None:
        logits = step.gates.get((self._tap, layer, distance))
        return None if logits is None else self.of_logits(logits)

    def of_logits(self, logits: Float) -> Float:
        """[T, E] of a gate's logits [T, E]."""
        logits = logits.astype(np.float32, copy=False)
        found: Float = 1 / (1 + np.exp(-self._slope * gate_margin(logits, self._top_k)))
        return found

    def learn(self, step: ObservedStep) -> None:
        """There is nothing to learn: the gate was trained."""

    def end(self, requests: Iterable[int]) -> None:
        """Nothing is kept of a request."""


def gate_margin(logits: Float, top_k: int) -> Float:
    """[T, E]: how far above the edge of being chosen, in standard deviations of the row. logits: [T, E]."""
    num_experts = logits.shape[1]
    if top_k == num_experts:
        return np.ones_like(logits)
    split = num_experts - top_k
    ordered = np.sort(logits, axis=1)
    edge = (ordered[:, split - 1] + ordered[:, split]) / 2
    centred = logits - logits.sum(axis=1, keepdims=True) / num_experts
    spread = np.sqrt(np.einsum("te,te->t", centred, centred) / num_experts) + np.float32(1e-6)
    found: Float = (logits - edge[:, None]) / spread[:, None]
    return found


# Expecting the experts on the most probable routes: a spanning tree grown from what a token has chosen. Pure.


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


# Expecting what a request did before, or what requests like it did. Pure.


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


# One probability out of several, learnt while serving: logistic regression on the log odds of the sources. Pure. For
# each layer and distance the log odds of the prediction are a weighted sum of those of the sources. After each step
# the weights move by one Newton step on what the step showed (as in the online Newton step of Hazan, Agarwal and
# Kale, 2007), with a Hessian that slowly forgets: there is no learning rate to tune. With one source this is a
# calibration.


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


# Predictors by name, as operators give them: sources joined with `+`. Pure.


_SOURCES: dict[str, Callable[[LearntAffinity], Source]] = {
    "popularity": PopularitySource,
    "affinity": AffinitySource,
    "routes": RouteSource,
    "signature": SignatureSource,
    "gate-early": lambda learnt: GateSource(Tap.EARLY, learnt.statistics.spec.top_k),
    "gate-late": lambda learnt: GateSource(Tap.LATE, learnt.statistics.spec.top_k),
    "activation-matrix": lambda learnt: ActivationMatrixSource(
        learnt.statistics.spec.num_layers, learnt.statistics.spec.num_experts, learnt.statistics.spec.top_k
    ),
}
SOURCE_NAMES = tuple(_SOURCES)
# Those that remember what a request did before.
_FOLLOW_REQUESTS = frozenset({"signature", "activation-matrix"})
# What several sources together are called where their recall is told.
COMBINED = "combined"


def source_names(choice: str) -> list[str]:
    """The sources of a choice like `gate-early+affinity`. ValueError for an unknown or repeated one."""
    names = choice.split("+")
    for name in names:
        if name not in _SOURCES:
            raise ValueError(f"there is no predictor {name!r}; there are {', '.join(SOURCE_NAMES)}")
    if len(set(names)) != len(names):
        raise ValueError(f"{choice!r} names a predictor twice")
    return names


def taps_of(choice: str) -> frozenset[Tap]:
    """The taps that the predictor of a choice listens to; nobody needs to compute others."""
    return frozenset(tap for tap in Tap if f"gate-{tap.value}" in source_names(choice))


def follows_requests(choice: str) -> bool:
    """Whether what is said of a token, after a layer, depends on the tokens before it, but for what all have learnt."""
    return not _FOLLOW_REQUESTS.isdisjoint(source_names(choice))


def only_gates(choice: str) -> bool:
    """Whether nothing is said before a gate was heard, and nothing but what gates say."""
    return all(name.startswith("gate-") for name in source_names(choice))


def make_source(choice: str, learnt: LearntAffinity) -> CombinedSource:
    """The calibrated source behind the predictor of a choice."""
    return _combined(_sources(choice, learnt), learnt.statistics.spec)


def make_predictor(
    choice: str, learnt: LearntAffinity, recall: RecallSample | None = None
) -> tuple[StepPredictor, dict[str, Source]]:
    """The predictor of a choice, and its sources by name.

    Probabilities are calibrated online, also those of a single source. Statistics are learnt by whoever owns them;
    `learnt.step_done` is the caller's to call. recall: counts what each source and, of several, `COMBINED` ranks first.
    """
    return open_predictor(choice, learnt, recall)[:2]


def open_predictor(
    choice: str, learnt: LearntAffinity, recall: RecallSample | None = None
) -> tuple[StepPredictor, dict[str, Source], CombinedSource]:
    """As `make_predictor`, and what brings its sources together."""
    spec = learnt.statistics.spec
    sources = _sources(choice, learnt)
    if recall is None:
        combined = _combined(sources, spec)
        return StepPredictor(combined, spec.num_experts), sources, combined
    combined = _combined({name: RankedSource(name, source, recall) for name, source in sources.items()}, spec)
    whole: Source = combined if len(sources) == 1 else RankedSource(COMBINED, combined, recall)
    return StepPredictor(CountedSteps(whole, recall), spec.num_experts), sources, combined


def _sources(choice: str, learnt: LearntAffinity) -> dict[str, Source]:
    return {name: _SOURCES[name](learnt) for name in source_names(choice)}


def _combined(sources: Mapping[str, Source], spec: StatisticsSpec) -> CombinedSource:
    return CombinedSource(list(sources.values()), spec.num_layers, spec.max_distance)
