"""Sizes, durations and limits of time as settings give them."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SHOWN_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_LIMIT = re.compile(r"([a-z0-9]+):([0-9]*\.?[0-9]+)(ms|s)")
_SECONDS = {"ms": 1e-3, "s": 1.0}


def parse_size(text: str | int) -> int:
    """Return the bytes of `1073741824`, `512MiB`, `2GB`, `4g`. Raise ValueError, a clause."""
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([kmgt]?i?)b?\s*", str(text).lower())
    if match is None or match[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size such as 512MiB or 2GB")
    return int(float(match[1]) * _UNITS[match[2]])


def parse_duration(text: str | float) -> float:
    """Return the seconds of `90`, `90s`, `15m`, `2h`. Raise ValueError, a clause."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d+)?)\s*([smh]?)\s*", str(text).lower())
    if match is None or isinstance(text, bool):
        raise ValueError(f"{text!r} is not a duration such as 90s, 15m or 2h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def show_size(num_bytes: int, *, up: bool = False) -> str:
    """Return a size in the largest unit that it fills, in tenths, rounded down, or up where it says how much is needed.

    So of two sizes in a sentence the smaller one never reads like the larger one.
    """
    power = max(power for power in range(len(_SHOWN_UNITS)) if num_bytes >= 1024**power or not power)
    tenths = (-(-10 * num_bytes // 1024**power)) if up else 10 * num_bytes // 1024**power
    return f"{tenths / 10:g} {_SHOWN_UNITS[power]}"


def exact_size(num_bytes: int) -> str:
    """Return a size as settings write it, in the largest unit that it is a multiple of: `20GB`, `4MiB`."""
    units = (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10))
    return next((f"{num_bytes // size}{unit}" for unit, size in units if num_bytes % size == 0), str(num_bytes))


def parse_limits(text: str, names: Sequence[str]) -> dict[str, float]:
    """Return the seconds in `ttft:500ms,tpot:0.1s`, some of `names` and each above 0. Raise ValueError."""
    limits: dict[str, float] = {}
    for part in text.split(","):
        match = _LIMIT.fullmatch(part.strip())
        if match is None or match[1] not in names or not float(match[2]):
            shown = ", ".join(f"{name}:500ms" for name in names)
            raise ValueError(f"{part.strip()[:80]!r} is not like {shown}")
        if match[1] in limits:
            raise ValueError(f"{match[1]} is given twice")
        limits[match[1]] = float(match[2]) * _SECONDS[match[3]]
    return limits
