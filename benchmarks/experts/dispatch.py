"""Rows that ranks send to each other, counted and timed in processes that run `benchmarks.experts.dispatch_rank`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from math import comb
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.experts.figures import Amount, Figure, Progress, Unavailable, at_least, at_most

_TIMEOUT = 600.0
_EXPERTS, _TOP_K, _HIDDEN = 64, 8, 64
_TARGETS = {2: 3.9, 4: 2.0}
_BASELINE = "one row per (token, expert), as DeepSpeed's AutoEP"
# Counts go as one int64 per rank, and the tensor has one for the sending rank too.
_SELF_BYTES = 8
_WITNESS = "the logger's sizes hold the 8 bytes of a rank's count for itself; without them they are ours"
# The timed layer has the demo's sizes.
_TIMED_EXPERTS, _TIMED_HIDDEN, _TIMED_TOP_K = 8, 576, 2


def rows_sent(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Rows that travel between ranks, with DeepSpeed's logger as the witness."""
    for num_ranks, target in _TARGETS.items():
        progress(f"{num_ranks} ranks")
        yield from rows_figures(counted(num_ranks, amount), num_ranks, target)


def counted(num_ranks: int, amount: Amount) -> list[dict[str, Any]]:
    """Return the counts summed over all ranks, by routing and seed."""
    job = {
        "experts": _EXPERTS,
        "top_k": _TOP_K,
        "hidden": _HIDDEN,
        "tokens": amount.of(2048, 512),
        "seeds": list(amount.seeds),
        "routings": ["uniform", "structured"],
        "timed_hidden": _TIMED_HIDDEN,
        "timed_top_k": _TIMED_TOP_K,
    }
    of_ranks = [answer["counts"] for answer in _run_ranks(num_ranks, job)]
    return [_summed(cases) for cases in zip(*of_ranks, strict=True)]


def rows_figures(cases: list[dict[str, Any]], num_ranks: int, target: float) -> Iterator[Figure]:
    """cases: from `counted`."""
    setup = f"R={num_ranks}, k={_TOP_K}, E={_EXPERTS}"
    for routing in ("uniform", "structured"):
        of_routing = [case for case in cases if case["routing"] == routing]
        fewer = tuple(case["plain_rows"] / case["rows"] for case in of_routing)
        note = f"{sum(case['rows'] / case['tokens'] for case in of_routing) / len(of_routing):.3f} rows per token"
        name = f"{setup}, {routing} routing, times fewer"
        yield Figure(name, _BASELINE, fewer, "x", at_least(target), note=note)
    uniform = [case for case in cases if case["routing"] == "uniform"]
    theory = rows_per_token(num_ranks)
    apart = tuple(abs(case["rows"] / case["tokens"] / theory - 1) for case in uniform)
    name = f"{setup}, rows per token apart from theory"
    yield Figure(name, f"{theory:.3f} for uniform routing", apart, "%", at_most(0.01))
    differing = tuple(float(case["differing"]) for case in cases)
    name = f"{setup}, bytes counted otherwise"
    yield Figure(name, "logger of deepspeed.comm", differing, "B", at_most(0), note=_WITNESS)


def rows_per_token(num_ranks: int) -> float:
    """Return the expected number of other ranks that hold at least one of k experts chosen at random."""
    elsewhere = _EXPERTS - _EXPERTS // num_ranks
    return (num_ranks - 1) * (1 - comb(elsewhere, _TOP_K) / comb(_EXPERTS, _TOP_K))


def _summed(cases: tuple[dict[str, Any], ...]) -> dict[str, Any]:
    """Sum the same case over all ranks. differing: bytes by which the logger and our counters differ, either way."""
    total = {name: sum(case[name] for case in cases) for name in ("rows", "plain_rows", "tokens")}
    differing = sum(
        abs(case[f"{kind}logged"] - case[f"{kind}bytes"] - _SELF_BYTES) for case in cases for kind in ("", "plain_")
    )
    return {"routing": cases[0]["routing"], "seed": cases[0]["seed"], "differing": differing, **total}


def time_of_a_layer(amount: Amount, progress: Progress) -> Iterator[Figure]:
    """Dispatch and combine of one layer on two ranks, in both shapes."""
    progress("dispatch of a layer")
    job = {
        "experts": _TIMED_EXPERTS,
        "top_k": _TIMED_TOP_K,
        "hidden": 64,
        "tokens": 64,
        "seeds": [],
        "routings": [],
        "timed_hidden": _TIMED_HIDDEN,
        "timed_top_k": _TIMED_TOP_K,
    }
    answers = [_run_ranks(2, job)[0] for _ in range(amount.of(5, 2))]
    for shape in answers[0]["seconds"]:
        seconds = tuple(answer["seconds"][shape] for answer in answers)
        name = f"dispatch and combine of a layer, {shape}, 16 rows per rank"
        yield Figure(name, "", seconds, "ms", note="median of 21 in each run, mean over ranks")


def _run_ranks(num_ranks: int, job: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the last line, JSON, of each rank's process. Raise Unavailable if one fails; the others are killed.

    Each has one thread.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        # They must find the same packages, also where they are not installed.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        rest = [str(num_ranks), str(Path(folder) / "rendezvous"), msgspec.json.encode(job).decode()]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.experts.dispatch_rank", str(rank), *rest],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            return [_answer(rank, process) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()


def _answer(rank: int, process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        output, errors = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"Rank {rank} has not ended in {_TIMEOUT:g} s.") from None
    lines = output.strip().splitlines()
    if process.returncode or not lines:
        raise Unavailable(f"Rank {rank} failed: {(errors.strip().splitlines() or ['no message'])[-1]}")
    answer: dict[str, Any] = msgspec.json.decode(lines[-1])
    return answer
