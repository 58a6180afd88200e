"""T8: how long tokens and steps take while layers get another placement, against a service whose layers stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.experts.figures import Figure, at_most
from benchmarks.experts.measuring import Amount
from benchmarks.experts.recording import BUILDS, folder_of
from benchmarks.experts.service import service
from benchmarks.experts.unavailable import Unavailable

# Tied experts come in pairs with equal load, of which each of two ranks has one: nothing would migrate.
BUILD = BUILDS[2]
_NUM_STREAMS = 8
_RESTLESS = ("--rebalance-interval", "8", "--rebalance-threshold", "0")


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    """Both services are there all the time and take turns with the same texts."""
    folder = folder_of(BUILD, amount, progress)
    num_tokens = amount.of(128, 32)
    progress("loading")
    with service(folder, 2, 1) as still, service(folder, 2, 1, *_RESTLESS) as moving:
        pairs = []
        for number in range(-1, amount.num_pairs):
            progress(f"pair {number + 1} of {amount.num_pairs}")
            order = (still, moving) if number % 2 else (moving, still)
            of_pair = {running: running.run(_NUM_STREAMS, num_tokens, number)["itl_p99"] for running in order}
            if number >= 0:  # The first one warms up, and fills the window of what is decided by.
                pairs.append((of_pair[still], of_pair[moving]))
        said = moving.experts()["rebalancing"]
    yield from figures(pairs, said)


def figures(pairs: list[tuple[float, float]], said: dict[str, Any]) -> Iterator[Figure]:
    """pairs: p99 between tokens in seconds, of the service that stays and of the one that migrates. said: of
    rebalancing by the latter. Unavailable if nothing migrated."""
    if not said["num_migrations"]:
        raise Unavailable("no layer was placed anew while it was measured")
    ratios = tuple(moving / still for still, moving in pairs)
    name = f"{BUILD.name}, R=2, {_NUM_STREAMS} streams, p99 between tokens"
    note = f"{said['num_migrations']} migrations of one layer each"
    yield Figure("T8", name, "the same without rebalancing", ratios, "x", at_most(1.2), note=note)
    migrating, steady = said["migrating_step_p99"], said["steady_step_p99"]
    if migrating and steady:
        name = "p99 of its own steps with a migration under way"
        note = f"{migrating * 1e3:.0f} ms and {steady * 1e3:.0f} ms; prompts are computed in either kind of step"
        yield Figure("T8", name, "its own steps without", (migrating / steady,), "x", note=note)
