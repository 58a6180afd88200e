"""T7: how evenly ranks are loaded with a few replicas of the busiest experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.experts.controls import halves
from benchmarks.experts.figures import Figure, at_least, over_seeds, within
from benchmarks.experts.measuring import Amount
from benchmarks.experts.recording import BUILDS, recorded_trace
from experts.placement.load_balance import load_balanced
from experts.placement.metrics import balancedness
from experts.placement.placement import contiguous
from experts.routing.traces import RoutingTrace

_NUM_LAYERS, _NUM_EXPERTS, _NUM_SPARE = 24, 64, 8
_NUM_CHOICES = 200_000
_RECORDED_RANKS = 4
_WANTED = at_least(0.90)
_NOTHING = within(0.03)
Load = NDArray[np.float64]


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    for num_ranks in (4, 8):
        name = f"64 experts, {_NUM_SPARE} spare, R={num_ranks}"
        skewed = over_seeds(amount.seeds, partial(_of_zipf, 1.0, num_ranks))
        yield Figure("T7", f"Zipf(1), {name}", _baseline(skewed), skewed["replicas"], "", _WANTED)
        even = over_seeds(amount.seeds, partial(_of_zipf, 0.0, num_ranks))
        gain = tuple(np.subtract(even["replicas"], even["contiguous"]).tolist())
        yield Figure("T7", f"gain on uniform loads, {name}", _baseline(even), gain, "", _NOTHING)
    for build in BUILDS:
        num_spare = max(build.experts // 8, _RECORDED_RANKS)
        trace = recorded_trace(build, amount, progress)
        found = over_seeds(amount.seeds, partial(_of_recorded, trace, num_spare))
        name = f"{build.name}, {num_spare} spare, R={_RECORDED_RANKS}"
        yield Figure("T7", name, _baseline(found), found["replicas"])


def _of_zipf(exponent: float, num_ranks: int, seed: int) -> dict[str, float]:
    return balanced(*zipf_loads(exponent, seed), num_ranks, _NUM_SPARE)


def _of_recorded(trace: RoutingTrace, num_spare: int, seed: int) -> dict[str, float]:
    learning, held_out = halves(trace, seed)
    return balanced(learning.load(), held_out.load(), _RECORDED_RANKS, num_spare)


def _baseline(found: dict[str, tuple[float, ...]]) -> str:
    return f"contiguous {np.mean(found['contiguous']):.3f}, by load without replicas {np.mean(found['plain']):.3f}"


def zipf_loads(exponent: float, seed: int) -> tuple[Load, Load]:
    """[L, E] each: two samples of one distribution, Zipf's law in another order in each layer."""
    random = np.random.default_rng(seed)
    shares = 1 / np.arange(1, _NUM_EXPERTS + 1) ** exponent
    shares /= shares.sum()
    layers = [random.permutation(shares) for _ in range(_NUM_LAYERS)]
    learning, held_out = (np.stack([random.multinomial(_NUM_CHOICES, layer) for layer in layers]) for _ in range(2))
    return learning.astype(np.float64), held_out.astype(np.float64)


def balanced(learning: Load, held_out: Load, num_ranks: int, num_spare: int) -> dict[str, float]:
    """Balancedness on the held-out load, mean over layers: contiguous, placed by load, and that with replicas."""
    num_layers, num_experts = learning.shape
    placements = {
        "contiguous": contiguous(num_layers, num_experts, num_ranks),
        "plain": load_balanced(learning, num_ranks),
        "replicas": load_balanced(learning, num_ranks, num_redundant=num_spare),
    }
    return {name: float(balancedness(held_out, placement).mean()) for name, placement in placements.items()}
