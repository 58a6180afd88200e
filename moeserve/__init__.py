"""Serve mixture-of-experts models. `LLM` is a model for scripts; all else is the command `moeserve`."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "LLM":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # On demand: it starts a service, and the parts of a service, which are in this package, do not need it.
    from launcher.offline import LLM

    return LLM
