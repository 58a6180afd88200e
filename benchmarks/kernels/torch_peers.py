"""Torch's compiler on what torch computes in several steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiled anew for each shape, at its first call, on a GPU; elsewhere as it is, which only checks it."""
    fast = torch.compile(function, dynamic=False)

    def run(*args: Any) -> Any:
        on_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in args)
        return (fast if on_gpu else function)(*args)

    return run


def forget_compiled() -> None:
    """Torch compiles only so many shapes of a function, then runs it as it is: to be called before further ones."""
    torch.compiler.reset()
