"""Does a GPU compute what a CPU does? Kernels against their references, then tiny models against recorded tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from moeserve.device import current_gpu
from moeserve.engine.gpu_check.kernels import TOLERANCE, Compare, comparisons
from moeserve.engine.gpu_check.models import CONFIGS, answers, expected_tokens, write_model


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, the seconds that it took, and why it failed; empty where it passed."""

    name: str
    seconds: float
    fault: str = ""


def run_checks(wanted: Callable[[str], bool] = lambda _: True) -> Iterator[Check]:
    """Check the current GPU, and yield what was found. wanted: tells by its name whether to run a check.

    A fault ends no other check.
    """
    for name, fault_of in _checks():
        if wanted(name):
            yield _timed(name, fault_of)


def check_names() -> list[str]:
    """Return the names of all checks, in their order."""
    return [name for name, _ in _checks()]


def _checks() -> list[tuple[str, Callable[[], str]]]:
    expected = expected_tokens()
    checks: list[tuple[str, Callable[[], str]]] = []
    for name, error_of in comparisons(current_gpu()):
        checks.append((name, partial(_judged, error_of)))
    for name, config in CONFIGS.items():
        checks.append((f"tokens of a tiny {name}", partial(_compared, config, expected[name])))
    return checks


def _timed(name: str, fault_of: Callable[[], str]) -> Check:
    began = time.monotonic()
    try:
        fault = fault_of()
    except Exception as error:
        fault = f"{type(error).__name__}: {error}"
    return Check(name, time.monotonic() - began, fault)


@torch.inference_mode()
def _judged(error_of: Compare) -> str:
    error = error_of()
    return "" if error <= TOLERANCE else f"relative error {error:.1e}, {TOLERANCE:.0e} allowed"


def _compared(config: Mapping[str, object], expected: list[list[int]]) -> str:
    with TemporaryDirectory(prefix="moeserve-gpu-check-") as folder:
        found = answers(write_model(config, Path(folder) / "model"), "cuda")
    return "" if found == expected else f"tokens {found} instead of {expected}"
