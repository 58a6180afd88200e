"""Does a GPU compute what a CPU does? Kernels against their references, then tiny models against recorded tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from moeserve.device import current_gpu
from moeserve.engine.gpu_check.checked import Checked, timed
from moeserve.engine.gpu_check.kernels import TOLERANCE, Compare, comparisons
from moeserve.engine.gpu_check.models import CONFIGS, wrong_tokens


def run_checks(wanted: Callable[[str], bool] = lambda _: True) -> Iterator[Checked]:
    """Check the current GPU, and yield the findings. wanted: tells by its name whether to run a check.

    A fault ends no other check.
    """
    for name, fault_of in _checks():
        if wanted(name):
            yield timed(name, fault_of)


def check_names() -> list[str]:
    """Return the names of all checks, in their order."""
    return [name for name, _ in _checks()]


def _checks() -> list[tuple[str, Callable[[], str]]]:
    checks: list[tuple[str, Callable[[], str]]] = []
    for name, error_of in comparisons(current_gpu()):
        checks.append((name, partial(_judged, error_of)))
    for name in CONFIGS:
        checks.append((f"tokens of a tiny {name}", partial(wrong_tokens, name, "cuda")))
    return checks


@torch.inference_mode()
def _judged(error_of: Compare) -> str:
    error = error_of()
    return "" if error <= TOLERANCE else f"relative error {error:.1e}, {TOLERANCE:.0e} allowed"
