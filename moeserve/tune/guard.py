"""Runs a kernel so that what it leaves unwritten, writes beside its output or computes by chance shows."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

_MARGIN = 2
_CANARY = 77.0


class WrongResultError(Exception):
    """What is wrong beside the numbers themselves."""


def run_guarded(run: Callable[[Tensor], object], like: Tensor) -> Tensor:
    """Runs twice into outputs of `like`'s shape and dtype, full of NaN and between rows that nobody may write.

    Gives the result. Raises WrongResultError where those rows change or the two differ in a bit, as they do in a race.
    NaN that is still there is left to be found by a comparison.
    """
    results = []
    for _ in range(2):
        rows = like.shape[0]
        whole = torch.full((rows + 2 * _MARGIN, *like.shape[1:]), _CANARY, dtype=like.dtype, device=like.device)
        out = whole[_MARGIN : _MARGIN + rows]
        out.fill_(math.nan)
        run(out)
        if not bool((whole[:_MARGIN] == _CANARY).all() & (whole[_MARGIN + rows :] == _CANARY).all()):
            raise WrongResultError("writes beside its output")
        results.append(out)
    if not torch.equal(results[0].nan_to_num(), results[1].nan_to_num()):
        raise WrongResultError("two runs differ")
    return results[0]


def relative_error(found: Tensor, expected: Tensor) -> float:
    """By the L2 norm; NaN if anything found is."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm())
