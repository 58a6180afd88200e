"""T9: bounded expert memory gives the same bits, several ranks the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from moeserve.bench.experts.bounded_memory import Contestant, Setting, contest
from moeserve.bench.experts.figures import Figure, at_least
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.migration import BUILD
from moeserve.bench.experts.recording import BUILDS, folder_of
from moeserve.bench.experts.service import service
from moeserve.llm import Completion

_NUM_LOGPROBS = 20
_RESTLESS = ("--rebalance-interval", "4", "--rebalance-threshold", "0")


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    progress("memory")
    yield _memory(folder_of(BUILDS[0], amount, progress), amount)
    folder = folder_of(BUILD, amount, progress)
    num_requests, num_tokens = amount.of(32, 8), amount.of(64, 16)
    progress("one rank")
    with service(folder, 1, 1) as one:
        expected = one.answers(num_requests, num_tokens)
    variants: dict[str, tuple[str, ...]] = {", placed anew while serving": _RESTLESS}
    if not amount.quick:
        variants[", contiguous"] = ()
        variants[", round-robin"] = ("--placement", "round-robin")
        variants[", 4 replicas per layer"] = ("--num-redundant-experts", "4")
    for variant, options in variants.items():
        progress(f"two ranks{variant}")
        with service(folder, 2, 1, *options) as two:
            if options is _RESTLESS:
                # Counts enough for a first decision, so that answers are given while layers migrate.
                two.run(8, amount.of(64, 24), 0)
            found = two.answers(num_requests, num_tokens)
            moved = two.experts().get("rebalancing", {}).get("num_migrations")
        same = sum(text == other for text, other in zip(found, expected, strict=True)) / num_requests
        note = f"{num_requests} requests of {num_tokens} tokens, 8 at a time"
        if moved is not None:
            note += f"; {moved} migrations"
        name = f"{BUILD.name}, R=2{variant}, requests with the same text"
        yield Figure("T9", name, "one rank", (same,), "%", at_least(0.99), exact=True, note=note)


def _memory(folder: Path, amount: Amount) -> Figure:
    """Tokens and logprobs as they are, float for float, one stream at a time and several together."""
    bounded = [Setting(folder, 0.25, "lru", "off"), Setting(folder, 0.5, "lfru", "gate")]
    if not amount.quick:
        bounded += [Setting(folder, 0.75, "lfu", "auto"), Setting(folder, 0.5, "affinity", "affinity")]
    num_tokens = amount.of(48, 12)
    with contest([Setting(folder)]) as (resident,):
        expected = _answers(resident, num_tokens)
    shares = []
    for setting in bounded:
        with contest([setting]) as (contestant,):
            found = _answers(contestant, num_tokens)
        same = [
            one.token_ids == other.token_ids and one.logprobs == other.logprobs
            for one, other in zip(found, expected, strict=True)
        ]
        shares.append(sum(same) / len(same))
    note = "; ".join(f"{setting.residency:.0%} {setting.policy}, prefetch {setting.prefetch}" for setting in bounded)
    name = f"{BUILDS[0].name}, answers with the same tokens and logprobs, bit for bit"
    return Figure("T9", name, "all experts in memory", tuple(shares), "%", at_least(1), exact=True, note=note)


def _answers(contestant: Contestant, num_tokens: int) -> list[Completion]:
    """Of one stream, then of several together, so that events are small and large."""
    return [answer for count in (1, 6) for answer in contestant.complete(count, num_tokens, _NUM_LOGPROBS)]
