"""T10: two ranks with one thread each against one rank with two threads, on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import fmean

from benchmarks.experts.figures import Figure, at_least
from benchmarks.experts.measuring import Amount
from benchmarks.experts.rank_process import run_ranks
from benchmarks.experts.recording import BUILDS, folder_of
from benchmarks.experts.service import service

_NUM_STREAMS = 16
_HIDDEN, _TOP_K, _NUM_EXPERTS = 576, 2, 8


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    progress("dispatch of a layer")
    yield from _dispatch_figures(amount)
    folder = folder_of(BUILDS[0], amount, progress)
    num_tokens = amount.of(64, 8)
    progress("loading")
    with service(folder, 1, 2) as one, service(folder, 2, 1) as two:
        rates = []
        for number in range(-1, amount.num_pairs):
            progress(f"pair {number + 1} of {amount.num_pairs}")
            order = (one, two) if number % 2 else (two, one)
            of_pair = {running: running.run(_NUM_STREAMS, num_tokens, number)["tokens_per_s"] for running in order}
            if number >= 0:  # The first one warms up.
                rates.append((of_pair[one], of_pair[two]))
    ratios = tuple(split / whole for whole, split in rates)
    whole, split = (fmean(pair[index] for pair in rates) for index in (0, 1))
    note = f"{split:.1f} and {whole:.1f} tokens/s over HTTP, gloo"
    name = f"{BUILDS[0].name}, {_NUM_STREAMS} streams, tokens/s of two ranks"
    yield Figure("T10", name, "one rank with two threads", ratios, "x", at_least(0.7), note=note)


def _dispatch_figures(amount: Amount) -> Iterator[Figure]:
    job = {
        "experts": _NUM_EXPERTS,
        "top_k": _TOP_K,
        "hidden": 64,
        "tokens": 64,
        "seeds": [],
        "routings": [],
        "timed_hidden": _HIDDEN,
        "timed_top_k": _TOP_K,
    }
    answers = [run_ranks("benchmarks.experts.dispatch_rank", 2, job)[0] for _ in range(amount.of(5, 2))]
    for shape in answers[0]["seconds"]:
        seconds = tuple(answer["seconds"][shape] for answer in answers)
        name = f"dispatch and combine of a layer, {shape}, 16 rows per rank"
        yield Figure("T10", name, "", seconds, "ms", note="median of 21 in each run, mean over ranks")
