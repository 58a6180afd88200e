"""The setting `--layers-per-rank`: how many layers each rank of a pipeline holds."""

from __future__ import annotations


def parse_layers(text: str) -> tuple[int, ...]:
    """Return the numbers of layers in `20,28`, each at least 1. Raise ValueError, a clause."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"{text.strip()[:80]!r} is not a list of numbers of layers such as 20,28")
    return tuple(map(int, parts))
