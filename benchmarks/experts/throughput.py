"""T6: tokens/s with prefetching, against demand loads alone and LRU, at several residencies and concurrencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import fmean

from benchmarks.experts.bounded_memory import Contestant, Run, Setting, bandwidth_for, contest, in_turn
from benchmarks.experts.figures import Figure, at_least
from benchmarks.experts.measuring import Amount
from benchmarks.experts.recording import BUILDS, folder_of

_BETA = 1.0
_WANTED = at_least(0.98)


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    build = BUILDS[0]
    folder = folder_of(build, amount, progress)
    bandwidth = bandwidth_for(folder, _BETA)
    for residency in (0.5,) if amount.quick else (0.25, 0.5, 0.75, 1.0):
        demand = Setting(folder, residency, "lru", "off", bandwidth)
        ahead = Setting(folder, residency, "lfru", "auto", bandwidth)
        for num_streams in (1, 4) if amount.quick else (1, 4, 16):
            progress(f"{residency:.0%} resident, {num_streams} streams")
            with contest([demand, ahead]) as contestants:
                for contestant in contestants:
                    # Long enough for the switch to have judged.
                    contestant.run(num_streams, amount.of(96, 12))
                run = partial(_run, num_streams, amount.of(32, 12))
                rounds = in_turn(contestants, amount.num_pairs, run)
            yield figure(f"{build.name}, {residency:.0%} resident, {num_streams} at once", rounds)


def figure(case: str, rounds: list[tuple[Run, ...]]) -> Figure:
    """rounds: (demand loads and LRU, the service's defaults)."""
    ratios = tuple(ahead.tokens_per_second / demand.tokens_per_second for demand, ahead in rounds)
    before, after = (fmean(pair[index].tokens_per_second for pair in rounds) for index in (0, 1))
    beta = fmean(demand.beta for demand, _ in rounds)
    link = f"emulated link, beta {beta:.2f}" if beta else "no link: all experts in memory"
    note = f"{before:.1f} and {after:.1f} tokens/s; {link}"
    return Figure("T6", f"{case}, tokens/s", "demand loads alone, LRU", ratios, "x", _WANTED, note=note)


def _run(num_streams: int, num_tokens: int, contestant: Contestant) -> Run:
    return contestant.run(num_streams, num_tokens)
