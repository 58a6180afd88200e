"""What is measured and how much of it, and which module measures it. Nothing is imported before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from benchmarks.experts.figures import Figure

Measure = Callable[["Amount", Callable[[str], None]], Iterator[Figure]]

# target: modules whose `measure` yields its figures
GROUPS: dict[str, tuple[str, ...]] = {
    "T1": ("rows_sent",),
    "T2": ("remote_ranks",),
    "T3": ("hops",),
    "T4": ("recall",),
    "T5": ("stall", "prefix_signature", "measured_stall"),
    "T6": ("throughput",),
    "T7": ("balance",),
    "T8": ("migration",),
    "T9": ("exactness",),
    "T10": ("two_ranks",),
}


@dataclass(frozen=True, slots=True)
class Amount:
    """seeds: of which each figure has a value. num_pairs: runs with and without, in turn, of what is timed.

    quick: little text and few cases, to see that all works. cache: where recorded traces are kept, and models are
    looked for; the usual place if None.
    """

    seeds: tuple[int, ...]
    num_pairs: int
    quick: bool = False
    cache: Path | None = None

    def of(self, full: int, quick: int) -> int:
        return quick if self.quick else full


def measure_of(group: str) -> Measure:
    """The function of a group's module."""
    measure: Measure = import_module(f"benchmarks.experts.{group}").measure
    return measure


def groups_of(targets: Sequence[str]) -> list[tuple[str, str]]:
    """(target, group) in the order of the targets' numbers."""
    return [(target, group) for target in GROUPS if target in targets for group in GROUPS[target]]
