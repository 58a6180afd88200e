"""T8: how long steps take while a layer gets another placement, against steps without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from moeserve.bench.experts.figures import Figure, at_most
from moeserve.bench.experts.measuring import Amount
from moeserve.bench.experts.recording import BUILDS, folder_of
from moeserve.bench.experts.service import service
from moeserve.bench.experts.unavailable import Unavailable

_NUM_STREAMS = 8


def measure(amount: Amount, progress: Callable[[str], None]) -> Iterator[Figure]:
    """One service per pair: its own steps without and with a migration under way are compared."""
    folder = folder_of(BUILDS[0], amount, progress)
    options = ("--rebalance-interval", str(amount.of(32, 8)), "--rebalance-threshold", "0")
    found = []
    for number in range(amount.of(max(amount.num_pairs // 2, 1), 1)):
        progress(f"service {number + 1}")
        with service(folder, 2, 1, *options) as running:
            for round_number in range(amount.of(12, 3)):
                running.tokens_per_second(_NUM_STREAMS, amount.of(128, 48), 1000 * number + round_number)
            found.append(running.experts()["rebalancing"])
    yield figure(found)


def figure(found: list[dict[str, Any]]) -> Figure:
    """found: what each service said of its rebalancing. Unavailable if nothing migrated."""
    usable = [said for said in found if said["migrating_step_p99"] and said["steady_step_p99"]]
    if not usable:
        raise Unavailable("no layer was placed anew while it was measured")
    ratios = tuple(said["migrating_step_p99"] / said["steady_step_p99"] for said in usable)
    migrations = ", ".join(str(said["num_migrations"]) for said in usable)
    steady = ", ".join(f"{said['steady_step_p99'] * 1e3:.0f}" for said in usable)
    note = f"{migrations} migrations; steady p99 {steady} ms"
    name = f"{BUILDS[0].name}, R=2, p99 of steps during migration"
    return Figure("T8", name, "steps of the same service without", ratios, "x", at_most(1.2), note=note)
