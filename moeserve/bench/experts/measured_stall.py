"""T5: exposed stall that prefetching hides, with the real copying thread behind an emulated link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from moeserve.bench.experts.bounded_memory import Run, Setting, bandwidth_for, contest, in_turn
from moeserve.bench.experts.figures import Figure, at_least, at_most
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.recording import BUILDS, folder_of
from moeserve.experts.fit import TextReader, fit_gates, half_of_topics, pieces
from moeserve.experts.prefetch import find_fitted_gates, keep_fitted_gates

_PREDICTORS = ("gate", "fitted")
_FITTED_TOKENS = 8192


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    build = BUILDS[0]
    folder = folder_of(build, amount, progress)
    with _fitted_gates(folder, progress):
        for beta in (1.0,) if amount.quick else (0.5, 1.0, 2.0):
            progress(f"{build.name}, beta {beta:g}")
            rounds = _rounds(folder, beta, amount)
            for arm, prefetch in enumerate(_PREDICTORS, start=1):
                case = f"{build.name}, emulated link, {prefetch}"
                yield from figures(case, [(of_round[0], of_round[arm]) for of_round in rounds])


def _rounds(folder: Path, beta: float, amount: Amount) -> list[tuple[Run, ...]]:
    """Each: on demand, then by each of the predictors."""
    bandwidth = bandwidth_for(folder, beta)
    arms = [Setting(folder, 0.5, "lfru", prefetch, bandwidth) for prefetch in ("off", *_PREDICTORS)]
    with contest(arms) as contestants:
        for contestant in contestants:
            contestant.run(1, amount.of(64, 12))
        return in_turn(contestants, amount.num_pairs, lambda arm: arm.run(1, amount.of(64, 16)))


@contextmanager
def _fitted_gates(folder: Path, progress: Callable[[str], None]) -> Iterator[None]:
    """As `moeserve experts fit` finds them, from other text than what is measured on. Gone at the end if they were not
    there before: services would use them."""
    if find_fitted_gates(folder) is not None:
        yield
        return
    progress("fitting gates")
    reader = TextReader(folder)
    path = keep_fitted_gates(folder, fit_gates(reader, pieces(reader, half_of_topics(0), _FITTED_TOKENS)))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def figures(case: str, rounds: list[tuple[Run, ...]]) -> Iterator[Figure]:
    """rounds: (on demand, prefetching)."""
    saved = tuple(1 - (ahead.stall + ahead.prediction) / demand.stall for demand, ahead in rounds)
    wasted = tuple(ahead.wasted for _, ahead in rounds)
    stalled, predicted = (fmean(getattr(ahead, name) / ahead.num_tokens for _, ahead in rounds) for name in
                          ("stall", "prediction"))  # fmt: skip
    demanded = fmean(demand.stall / demand.num_tokens for demand, _ in rounds)
    note = (
        f"beta {fmean(demand.beta for demand, _ in rounds):.2f}; per token {demanded * 1e3:.1f} ms of stall, with "
        f"prefetches {stalled * 1e3:.1f} ms and {predicted * 1e3:.1f} ms of prediction"
    )
    baseline = "demand loads alone, LFRU"
    yield Figure("T5", f"{case}, stall saved, prediction counted", baseline, saved, "%", at_least(0.40), note=note)
    yield Figure("T5", f"{case}, bytes moved for nothing", "all bytes moved", wasted, "%", at_most(0.25))
