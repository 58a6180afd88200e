"""Where experts are placed, on traces: remote ranks of a token, balance of load.

Structure is learnt on half of the requests and measured on the other half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts.figures import Amount, Figure, Progress, at_least, over_seeds, within
from benchmarks.experts.lab_traces import LabTrace
from benchmarks.experts.lab_traces import remote_ranks as remote_ranks_by_token
from benchmarks.experts.synthetic_traces import MIXTRAL_LIKE, SPARSE, SyntheticSpec, synthetic_trace
from benchmarks.experts.traces import BUILDS, halves, recorded_trace, with_controls
from experts.placement.balanced import load_balanced, with_replicas
from experts.placement.coactivation import coactivation_placement, token_sets
from experts.placement.placement import Placement, balancedness, contiguous, from_first_ranks, round_robin

Load = NDArray[np.float64]

# The limit of controls: a placement fitted to chance may gain that much on other requests.
_NOTHING = within(0.03)

_NUM_RANKS = 4
_REMOTE_BASELINE = "better of contiguous and round-robin"
_REMOTE_TARGET = at_least(0.15)
_SPECS: dict[str, SyntheticSpec] = {"24 x 64 experts, k=4": SPARSE, "32 x 8, k=2": MIXTRAL_LIKE}
# Half of them, at 100 tokens each, are about as many as the statistics of a service remember.
_NUM_REQUESTS = 80
_SERVED = "homes in turn"
_AS_BUSY = "ranks as busy as in the plain placement"
_REPLICAS = (4, 8)
_HINDSIGHT = "fitted to the requests measured, as busy"
_OPTIMUM = "optimum for the requests measured, loads left aside"
_TARGETED = (_SERVED, _AS_BUSY)
_FEW_EXPERTS = 8

_BALANCE_LAYERS, _BALANCE_EXPERTS, _NUM_SPARE = 24, 64, 8
_NUM_CHOICES = 200_000
_RECORDED_RANKS = 4
_BALANCE_TARGET = at_least(0.90)


def remote_ranks(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Remote ranks that a token is sent to, with experts placed by co-activation."""
    for name, spec in _SPECS.items():
        progress(name)
        found = [remote_ranks_of_trace(synthetic_trace(spec, _NUM_REQUESTS, 100, seed), seed) for seed in amount.seeds]
        yield from _remote_figures(f"synthetic {name}", found, is_target=True)
    for build in BUILDS:
        if build.experts % _NUM_RANKS == 0:
            trace = recorded_trace(build, amount, progress)
            found = [remote_ranks_of_trace(trace, seed) for seed in amount.seeds]
            yield from _remote_figures(build.name, found, is_target=False)


def remote_ranks_of_trace(trace: LabTrace, seed: int) -> dict[str, RemoteRanksFigure]:
    """Return the saving of a service and the possible saving on held-out requests, and both in the controls."""
    found = {}
    for control, routing in with_controls(trace, seed):
        figure = partial(remote_ranks_figure, *halves(routing, seed), _NUM_RANKS)
        found[f"{control} control" if control else _SERVED] = figure()
        if control != "uniform":
            found[f"{control} control, as busy" if control else _AS_BUSY] = figure(max_load=None)
        if control != "uniform":
            for count in _REPLICAS:
                name = f"{count} replicas per layer"
                found[f"{name}, {control}" if control else name] = figure(num_redundant=count)
    held_out = halves(trace, seed)[1]
    found[_HINDSIGHT] = remote_ranks_figure(held_out, held_out, _NUM_RANKS, max_load=None)
    if trace.num_experts <= _FEW_EXPERTS:
        best = fewest_touched(held_out.ids, trace.num_experts, _NUM_RANKS)
        found[_OPTIMUM] = remote_ranks_of(best, held_out)
    return found


def _remote_figures(name: str, of_seeds: list[dict[str, RemoteRanksFigure]], *, is_target: bool) -> Iterator[Figure]:
    for variant in of_seeds[0]:
        found = [of_seed[variant] for of_seed in of_seeds]
        limit = _REMOTE_TARGET if is_target and variant in _TARGETED else None
        if "control" in variant:
            limit = _NOTHING
        before = fmean(figure.plain_balance for figure in found)
        after = fmean(figure.learnt_balance for figure in found)
        saved = tuple(figure.saved for figure in found)
        note = f"balance of ranks {after:.2f}, was {before:.2f}"
        yield Figure(f"{name}, {variant}", _REMOTE_BASELINE, saved, "%", limit, note=note)


def balance(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """How evenly ranks are loaded with a few replicas of the busiest experts."""
    for num_ranks in (4, 8):
        name = f"64 experts, {_NUM_SPARE} spare, R={num_ranks}"
        skewed = over_seeds(amount.seeds, partial(_balance_of_zipf, 1.0, num_ranks))
        yield Figure(f"Zipf(1), {name}", _balance_baseline(skewed), skewed["replicas"], "", _BALANCE_TARGET)
        even = over_seeds(amount.seeds, partial(_balance_of_zipf, 0.0, num_ranks))
        gain = tuple(np.subtract(even["replicas"], even["contiguous"]).tolist())
        yield Figure(f"gain on uniform loads, {name}", _balance_baseline(even), gain, "", _NOTHING)
    for build in BUILDS:
        num_spare = max(build.experts // 8, _RECORDED_RANKS)
        trace = recorded_trace(build, amount, progress)
        found = over_seeds(amount.seeds, partial(_balance_of_trace, trace, num_spare))
        name = f"{build.name}, {num_spare} spare, R={_RECORDED_RANKS}"
        yield Figure(name, _balance_baseline(found), found["replicas"])


def _balance_of_zipf(exponent: float, num_ranks: int, seed: int) -> dict[str, float]:
    return balanced(*zipf_loads(exponent, seed), num_ranks, _NUM_SPARE)


def _balance_of_trace(trace: LabTrace, num_spare: int, seed: int) -> dict[str, float]:
    learning, held_out = halves(trace, seed)
    return balanced(learning.load(), held_out.load(), _RECORDED_RANKS, num_spare)


def _balance_baseline(found: dict[str, tuple[float, ...]]) -> str:
    return f"contiguous {np.mean(found['contiguous']):.3f}, by load without replicas {np.mean(found['plain']):.3f}"


def zipf_loads(exponent: float, seed: int) -> tuple[Load, Load]:
    """Draw two samples [L, E] of one distribution: Zipf's law, in another order in each layer."""
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, _BALANCE_EXPERTS + 1) ** exponent
    shares /= shares.sum()
    layers = [random.permutation(shares) for _ in range(_BALANCE_LAYERS)]
    learning, held_out = (np.stack([random.multinomial(_NUM_CHOICES, layer) for layer in layers]) for _ in range(2))
    return learning.astype(np.float64), held_out.astype(np.float64)


def balanced(learning: Load, held_out: Load, num_ranks: int, num_spare: int) -> dict[str, float]:
    """Return balancedness on the held-out load, mean over layers: contiguous, placed by load, and with replicas."""
    num_layers, num_experts = learning.shape
    placements = {
        "contiguous": contiguous(num_layers, num_experts, num_ranks),
        "plain": load_balanced(learning, num_ranks),
        "replicas": load_balanced(learning, num_ranks, num_redundant=num_spare),
    }
    return {name: float(balancedness(held_out, placement).mean()) for name, placement in placements.items()}


def fewest_touched(routing: NDArray[np.integer], num_experts: int, num_ranks: int) -> Placement:
    """Return the placement under which tokens touch the fewest ranks, whatever load it gives them.

    routing: [L, T, k]. Exact: each layer by itself, over all ways to share its experts.
    """
    shares = np.array(list(_shares(range(num_experts), num_ranks)))
    # The names of ranks do not matter: each takes its first expert after the rank before it has one.
    first = [(share[:, None] == np.arange(num_ranks)).argmax(axis=0) for share in shares]
    shares = shares[[bool((np.diff(of_share) > 0).all()) for of_share in first]]
    best = []
    for ids in routing:
        sets = token_sets(ids, num_experts, num_ranks)
        best.append(min(shares, key=sets.ranks_touched))
    return from_first_ranks(np.stack(best), num_ranks)


def _shares(experts: Sequence[int], num_ranks: int) -> Iterator[list[int]]:
    """Yield the rank of each expert, in every way that gives all ranks equally many."""
    share = len(experts) // num_ranks

    def fill(left: tuple[int, ...], rank: int, ranks: list[int]) -> Iterator[list[int]]:
        if not left:
            yield ranks.copy()
            return
        for chosen in combinations(left, share):
            for expert in chosen:
                ranks[expert] = rank
            yield from fill(tuple(expert for expert in left if expert not in chosen), rank + 1, ranks)

    yield from fill(tuple(experts), 0, [0] * len(experts))


@dataclass(frozen=True, slots=True)
class RemoteRanksFigure:
    """Remote ranks to which a token is sent, mean over tokens and layers, and the balance of the ranks.

    plain: of contiguous and round-robin the one with fewer remote ranks. The balances are mean over greatest load of
    the ranks, mean over layers.
    """

    num_ranks: int
    plain: float
    learnt: float
    plain_balance: float
    learnt_balance: float

    @property
    def saved(self) -> float:
        """Share saved against the plain placement."""
        return 1 - self.learnt / self.plain


def remote_ranks_figure(
    learning: LabTrace, held_out: LabTrace, num_ranks: int, *, max_load: float | None = 1.1, num_redundant: int = 0
) -> RemoteRanksFigure:
    """Return the figure of co-activation placement with `num_redundant` replicas per layer.

    Requests are dealt to ranks in turn. max_load: see `coactivation_placement`. Raise PlacementError if the ranks
    cannot share the experts equally.
    """
    learnt = coactivation_placement(learning.ids, learning.num_experts, num_ranks, max_load=max_load)
    if num_redundant:
        learnt = with_replicas(learnt, learning.load(), num_redundant)
    return remote_ranks_of(learnt, held_out)


def remote_ranks_of(learnt: Placement, held_out: LabTrace) -> RemoteRanksFigure:
    num_ranks = learnt.num_ranks
    homes = held_out.homes(num_ranks)
    sizes = learnt.num_layers, learnt.num_experts, num_ranks
    found = [
        (
            float(remote_ranks_by_token(held_out.ids, homes, placement).mean()),
            served_balance(held_out.ids, homes, placement),
        )
        for placement in (contiguous(*sizes), round_robin(*sizes), learnt)
    ]
    plain = min(found[:2])
    return RemoteRanksFigure(num_ranks, plain[0], found[2][0], plain[1], found[2][1])


def served_balance(ids: NDArray[np.integer], homes: NDArray[np.integer], placement: Placement) -> float:
    """Return the mean over layers of the ranks' mean over greatest load, as tokens choose among replicas."""
    loads = np.stack(
        [
            np.bincount(placement.serving(layer).ranks(homes, of_layer).reshape(-1), minlength=placement.num_ranks)
            for layer, of_layer in enumerate(ids)
        ]
    )
    return float((loads.mean(axis=1) / loads.max(axis=1)).mean())
