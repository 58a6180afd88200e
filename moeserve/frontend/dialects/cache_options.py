"""What a client asks of the prompt cache, in the spellings of OpenAI and Anthropic, read for all dialects."""

from __future__ import annotations

import re
from typing import Any

from moeserve.frontend.dialects.internal import CacheOptions
from moeserve.frontend.http import invalid, unsupported

MAX_KEY_CHARS = 1024
MAX_SECONDS = 86_400
# OpenAI keeps a prompt for minutes after its last use where the client asks for no more.
_IN_MEMORY_SECONDS = 600
_OPTIONS_SECONDS = 1800
_RETENTION_SECONDS = {"in_memory": _IN_MEMORY_SECONDS, "in-memory": _IN_MEMORY_SECONDS, "24h": 86_400}
_CONTROL_SECONDS = {"5m": 300, "1h": 3600}
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def read_cache_options(
    key: str | None, retention: str | None, options: dict[str, Any] | None, report: bool | None
) -> CacheOptions:
    """Return what `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_options` and `cache_report` ask for.

    Each of the first three retains the whole prompt; the longest time counts. Raises ApiError.
    """
    if key is None and retention is None and options is None:
        return _REPORT if report else _NOTHING
    seconds = []
    if key is not None:
        if len(key) > MAX_KEY_CHARS:
            raise invalid(f"`prompt_cache_key` must have at most {MAX_KEY_CHARS} characters", "prompt_cache_key")
        seconds.append(_IN_MEMORY_SECONDS)
    if retention is not None:
        if retention not in _RETENTION_SECONDS:
            raise invalid("`prompt_cache_retention` must be in_memory or 24h", "prompt_cache_retention")
        seconds.append(_RETENTION_SECONDS[retention])
    implicit = True
    if options is not None:
        implicit, longer = _read_options(options)
        seconds.append(longer)
    return CacheOptions(seconds=max(seconds) if implicit else None, report=bool(report))


def read_cache_control(control: Any, where: str) -> int | None:
    """Return the seconds of Anthropic's `cache_control`, None if it is null. `where` is the path of the field."""
    if control is None:
        return None
    kind = control.get("type") if isinstance(control, dict) else None
    if kind != "ephemeral":
        raise invalid(f"`{where}` must be an object with the type ephemeral", where)
    ttl = control.get("ttl", "5m")
    if not isinstance(ttl, str) or ttl not in _CONTROL_SECONDS:
        raise invalid(f"`{where}.ttl` must be 5m or 1h", f"{where}.ttl")
    return _CONTROL_SECONDS[ttl]


def _read_options(options: dict[str, Any]) -> tuple[bool, int]:
    """Return whether the whole prompt is to be retained, and for how long."""
    for name, value in options.items():
        if name not in ("mode", "ttl") and value is not None:
            raise unsupported(f"prompt_cache_options.{name[:60]}")
    mode = options.get("mode") or "implicit"
    if mode not in ("implicit", "explicit"):
        raise invalid("`prompt_cache_options.mode` must be implicit or explicit", "prompt_cache_options.mode")
    ttl = options.get("ttl")
    return mode == "implicit", _OPTIONS_SECONDS if ttl is None else _read_ttl(ttl)


def _read_ttl(ttl: Any) -> int:
    """Return the seconds of `90`, `90s`, `30m`, `1h` or `1d`."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd]?)", str(ttl)) if isinstance(ttl, str | int) else None
    seconds = 0 if found is None else int(found[1]) * _UNIT_SECONDS[found[2] or "s"]
    if not 0 < seconds <= MAX_SECONDS:
        raise invalid(
            "`prompt_cache_options.ttl` must be a time such as 300s, 30m or 24h, at most 24h",
            "prompt_cache_options.ttl",
        )
    return seconds


_NOTHING, _REPORT = CacheOptions(), CacheOptions(report=True)
