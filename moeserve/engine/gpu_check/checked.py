"""The result of one check of a device, as processes report it."""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec


class Checked(msgspec.Struct, tag=True):
    name: str
    seconds: float
    fault: str = ""  # why the check failed; empty if it passed


def timed(name: str, fault_of: Callable[[], str]) -> Checked:
    """Run a check. A fault of any kind is its result."""
    began = time.monotonic()
    try:
        fault = fault_of()
    except Exception as error:
        fault = f"{type(error).__name__}: {error}".partition("\n")[0]  # CUDA has advice for programmers behind it
    return Checked(name, time.monotonic() - began, fault)
