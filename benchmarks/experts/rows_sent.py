"""T1: rows that travel between ranks, against one row per token and expert, with DeepSpeed's logger as the witness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import comb
from typing import Any

from benchmarks.experts.figures import Figure, at_least, at_most
from benchmarks.experts.measuring import Amount
from benchmarks.experts.rank_process import run_ranks

_EXPERTS, _TOP_K, _HIDDEN = 64, 8, 64
_WANTED = {2: 3.9, 4: 2.0}
_BASELINE = "one row per (token, expert), as DeepSpeed's AutoEP"
# Counts go as one int64 for each rank, and the one for the rank itself is in the tensor too.
_SELF_BYTES = 8
_WITNESS = "the logger's sizes hold the 8 bytes of a rank's count for itself; without them they are ours"


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    for num_ranks, wanted in _WANTED.items():
        progress(f"{num_ranks} ranks")
        yield from figures(counted(num_ranks, amount), num_ranks, wanted)


def counted(num_ranks: int, amount: Amount) -> list[dict[str, Any]]:
    """Counts over all ranks, by routing and seed."""
    job = {
        "experts": _EXPERTS,
        "top_k": _TOP_K,
        "hidden": _HIDDEN,
        "tokens": amount.of(2048, 512),
        "seeds": list(amount.seeds),
        "routings": ["uniform", "structured"],
        "timed_hidden": 576,
        "timed_top_k": 2,
    }
    of_ranks = [answer["counts"] for answer in run_ranks("benchmarks.experts.dispatch_rank", num_ranks, job)]
    return [_summed(cases, num_ranks) for cases in zip(*of_ranks, strict=True)]


def figures(cases: list[dict[str, Any]], num_ranks: int, wanted: float) -> Iterator[Figure]:
    """cases: see `counted`."""
    setup = f"R={num_ranks}, k={_TOP_K}, E={_EXPERTS}"
    for routing in ("uniform", "structured"):
        of_routing = [case for case in cases if case["routing"] == routing]
        fewer = tuple(case["plain_rows"] / case["rows"] for case in of_routing)
        note = f"{sum(case['rows'] / case['tokens'] for case in of_routing) / len(of_routing):.3f} rows per token"
        yield Figure(
            "T1", f"{setup}, {routing} routing, times fewer", _BASELINE, fewer, "x", at_least(wanted), note=note
        )
    uniform = [case for case in cases if case["routing"] == "uniform"]
    theory = rows_per_token(num_ranks)
    apart = tuple(abs(case["rows"] / case["tokens"] / theory - 1) for case in uniform)
    name = f"{setup}, rows per token apart from theory"
    yield Figure("T1", name, f"{theory:.3f} for uniform routing", apart, "%", at_most(0.01))
    differing = tuple(float(case["differing"]) for case in cases)
    yield Figure(
        "T1", f"{setup}, bytes counted otherwise", "logger of deepspeed.comm", differing, "B", at_most(0), note=_WITNESS
    )


def rows_per_token(num_ranks: int) -> float:
    """Other ranks that hold at least one of k experts chosen at random."""
    elsewhere = _EXPERTS - _EXPERTS // num_ranks
    return (num_ranks - 1) * (1 - comb(elsewhere, _TOP_K) / comb(_EXPERTS, _TOP_K))


def _summed(cases: tuple[dict[str, Any], ...], num_ranks: int) -> dict[str, Any]:
    """The same case on all ranks. differing: bytes by which the logger and our counters differ, either way."""
    total = {name: sum(case[name] for case in cases) for name in ("rows", "plain_rows", "tokens")}
    differing = sum(
        abs(case[f"{kind}logged"] - case[f"{kind}bytes"] - _SELF_BYTES) for case in cases for kind in ("", "plain_")
    )
    return {"routing": cases[0]["routing"], "seed": cases[0]["seed"], "differing": differing, **total}
