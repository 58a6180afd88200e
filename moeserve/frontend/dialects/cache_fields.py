"""The fields of requests for the prompt cache: how long to keep a prompt, marks inside it, and a report."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from moeserve.frontend import limits
from moeserve.frontend.dialects.formats import FormatFields
from moeserve.frontend.dialects.internal import CacheOptions
from moeserve.frontend.errors import invalid, unsupported

MAX_KEY_CHARS = 1024
MAX_SECONDS = 86_400
# OpenAI keeps a prompt for minutes after its last use where the client asks for no more.
_IN_MEMORY_SECONDS = 600
_OPTIONS_SECONDS = 1800
RETENTION_SECONDS = {"in_memory": _IN_MEMORY_SECONDS, "in-memory": _IN_MEMORY_SECONDS, "24h": 86_400}
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


class CacheFields(FormatFields, kw_only=True):
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    cache_report: bool | None = None


class CacheBreakpoint(msgspec.Struct):
    """The mark `prompt_cache_breakpoint` of a content part: the prompt up to there will come again."""

    mode: Literal["explicit"]
    ttl: str | int | None = None


def read_cache_options(
    key: str | None, retention: str | None, options: dict[str, Any] | None, report: bool | None
) -> CacheOptions:
    """Return the wishes in `prompt_cache_key`, `prompt_cache_retention`, `prompt_cache_options` and `cache_report`.

    Each of the first three retains the whole prompt; the longest time counts. Raises ApiError.
    """
    if key is None and retention is None and options is None:
        return _ONLY_REPORT if report else _NO_WISHES
    seconds = []
    if key is not None:
        if len(key) > MAX_KEY_CHARS:
            raise invalid(f"`prompt_cache_key` must have at most {MAX_KEY_CHARS} characters", "prompt_cache_key")
        seconds.append(_IN_MEMORY_SECONDS)
    if retention is not None:
        if retention not in RETENTION_SECONDS:
            raise invalid("`prompt_cache_retention` must be in_memory or 24h", "prompt_cache_retention")
        seconds.append(RETENTION_SECONDS[retention])
    implicit = True
    if options is not None:
        implicit, longer = _read_options(options)
        seconds.append(longer)
    return CacheOptions(seconds=max(seconds) if implicit else None, report=bool(report), key=key)


def read_breakpoint(mark: CacheBreakpoint, options: dict[str, Any] | None, where: str) -> int:
    """Return the seconds of a mark; `prompt_cache_options` has their default. `where` is the path of the mark."""
    if mark.ttl is not None:
        return _read_ttl(mark.ttl, f"{where}.ttl")
    return _read_options(options or {})[1]


def _read_options(options: dict[str, Any]) -> tuple[bool, int]:
    """Return whether the whole prompt is to be retained, and for how long."""
    for name, value in options.items():
        if name not in ("mode", "ttl") and value is not None:
            raise unsupported(f"prompt_cache_options.{name[:60]}")
    mode = options.get("mode") or "implicit"
    if mode not in ("implicit", "explicit"):
        raise invalid("`prompt_cache_options.mode` must be implicit or explicit", "prompt_cache_options.mode")
    ttl = options.get("ttl")
    return mode == "implicit", _OPTIONS_SECONDS if ttl is None else _read_ttl(ttl, "prompt_cache_options.ttl")


def _read_ttl(ttl: Any, where: str) -> int:
    """Return the seconds of `90`, `90s`, `30m`, `1h` or `1d`."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})([smhd]?)", str(ttl)) if isinstance(ttl, str | int) else None
    seconds = 0 if found is None else int(found[1]) * _UNIT_SECONDS[found[2] or "s"]
    if not 0 < seconds <= MAX_SECONDS:
        raise invalid(f"`{where}` must be a time such as 300s, 30m or 24h, at most 24h", where)
    return seconds


_NO_WISHES, _ONLY_REPORT = CacheOptions(), CacheOptions(report=True)


def read_cache(body: CacheFields) -> CacheOptions:
    """Return the settings of a body for the prompt cache. Raises ApiError."""
    return read_cache_options(
        body.prompt_cache_key, body.prompt_cache_retention, body.prompt_cache_options, body.cache_report
    )


def read_cache_salt(salt: str | None) -> str:
    if salt is None:
        return ""
    if not salt or len(salt) > limits.MAX_CACHE_SALT_CHARS:
        raise invalid(f"`cache_salt` must have 1 to {limits.MAX_CACHE_SALT_CHARS} characters", "cache_salt")
    return salt
