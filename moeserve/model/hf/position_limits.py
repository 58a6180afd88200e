"""Numbers of tokens at which modelling code changes its behaviour, set low for the check at load.

A window, an attention chunk or a temperature that grows with the position begins thousands of tokens into a text. The
check's texts have two dozen: with low limits they cross all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moeserve.model.hf.modelling import ModellingCode

# Fields of configurations, and of modules that copy them.
_LIMITS = ("sliding_window", "attention_chunk_size", "floor_scale")
# Tokens; above the block size of the check, below the length of its texts.
_LOW = 6


def has_far_limits(code: ModellingCode) -> bool:
    """Return whether the model has limits that short texts do not reach."""
    return any(_is_far(getattr(code.config, name, None)) for name in _LIMITS)


@contextmanager
def low_limits(code: ModellingCode) -> Iterator[None]:
    """Set all far limits of the configuration and of the modules to a few tokens, and restore them at the end."""
    changed: list[tuple[Any, str, int | float]] = []
    for owner in (code.config, *code.body.modules()):
        for name in _LIMITS:
            # Not `getattr`: a module finds its configuration's fields under other names too.
            value = vars(owner).get(name)
            if _is_far(value):
                changed.append((owner, name, value))
                setattr(owner, name, type(value)(_LOW))
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _is_far(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > _LOW
