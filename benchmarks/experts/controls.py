"""Held-out requests by seed, and the same routing without its structure. Pure."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from experts.routing.traces import RoutingTrace, shuffled_control, uniform_control


def halves(trace: RoutingTrace, seed: int) -> tuple[RoutingTrace, RoutingTrace]:
    """To learn from, and held out: whole requests, dealt by the seed."""
    requests, of_token = np.unique(trace.requests, return_inverse=True)
    is_learnt = np.random.default_rng(seed).permutation(len(requests)) % 2 == 0
    return trace.select(is_learnt[of_token]), trace.select(~is_learnt[of_token])


def with_controls(trace: RoutingTrace, seed: int) -> Iterator[tuple[str, RoutingTrace]]:
    """The trace itself, under an empty name, then those in which there is nothing to be gained."""
    yield "", trace
    yield "uniform", uniform_control(trace, seed)
    yield "shuffled", shuffled_control(trace, seed)
