"""One comparison of a kernel with what it should compute."""

from __future__ import annotations

import math
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeserve.tune.guard import WrongResultError

# The relative error (L2) of 16-bit kernels is to be below it.
TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Check:
    """`error` is relative (L2); NaN where something was not written; 1 where bits or tokens differ that must not."""

    name: str
    error: float

    @property
    def passed(self) -> bool:
        return self.error < TOLERANCE


def checked(name: str, error: Callable[[], float]) -> Check:
    """The check of that error, or one that did not pass and says why in its name: a kernel that does not run leaves
    the others to be checked."""
    try:
        return Check(name, error())
    except WrongResultError as wrong:
        return Check(f"{name} ({wrong})", 1.0)
    except Exception as failure:
        traceback.print_exc(file=sys.stderr)
        return Check(f"{name} ({type(failure).__name__}: {failure})".replace("\n", " ")[:200], math.nan)


def same_bits(found: Tensor, expected: Tensor) -> float:
    """0 if they have the same bits, else 1."""
    return float(not torch.equal(found, expected))
