"""The key file: one line for each key, `ROLE:KEY name=alice weight=2 tokens=5M/day`. Errors never show a key."""

from __future__ import annotations

import hashlib
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from moeserve.config import ConfigError

USER, METRICS, ADMIN = "user", "metrics", "admin"
ROLES = (USER, METRICS, ADMIN)
_BLOCKS = "KV blocks"
# The rights that are shares, and what a share is a part of.
_SHARED = {
    "retention": _BLOCKS,
    "pinned": _BLOCKS,
    "cached": _BLOCKS,
    "running": "running places",
    "queue": "places",
    "stored": "bytes of the response store",
}
# The limits, their units of time, and examples.
_PER = {"tokens": "day", "requests": "min"}
_EXAMPLES = {"tokens": "5M/day", "requests": "60/min"}
_WORDS = (*_SHARED, *_PER, "weight", "priority", "name")
_WORD = re.compile(r"(.*\S)\s+([A-Za-z_-]+)=(\S*)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kKMG]?)")
_FACTORS = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "G": 10**9}
_MOST = 2**53  # of a limit
_LEAST_WEIGHT = 0.001
_DIGEST_CHARS = 8  # of the digest of a key without a name, that its name shows


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights that the key file grants a key.

    `retention`: the share of the KV blocks that may be retained for it, `pinned`: the share that it may pin; None for
    the service's settings. `weight`: of the key among all that have requests. `running` and `queue`: the shares of the
    places for running and for all requests that it gets at most. `cached`: the share of the KV blocks beyond which its
    prefixes are evicted before all others. `stored`: its share of the response store; None for an equal part, weight
    for weight, of what named shares leave. `priority`: whether it may ask for an urgent one. `tokens`: of prompts and
    answers in a day, `requests`: that may begin in a minute, of all keys with its name; None for any number.
    """

    retention: float | None = None
    pinned: float | None = None
    weight: float = 1.0
    running: float = 1.0
    queue: float = 1.0
    cached: float = 1.0
    stored: float | None = None
    priority: bool = False
    tokens: int | None = None
    requests: int | None = None


DEFAULT_RIGHTS = Rights()


@dataclass(frozen=True, slots=True)
class KeyLine:
    """A key with one role. name: None for one that the line does not name."""

    role: str
    key: str
    name: str | None = None
    rights: Rights = DEFAULT_RIGHTS


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def usual_name(digest: bytes) -> str:
    """Return the name of a key that has none."""
    return f"key-{digest.hex()[:_DIGEST_CHARS]}"


def read_lines(lines: Iterable[str]) -> list[KeyLine]:
    """Return the keys of a file's lines. Raise ConfigError, which names the line."""
    found = []
    for number, line in enumerate((line.strip() for line in lines), 1):
        if line and not line.startswith("#"):
            try:
                found.append(read_line(line))
            except ConfigError as error:
                raise ConfigError(f"line {number} of the key file: {error}") from None
    return found


def read_line(line: str) -> KeyLine:
    """Return the key of a line that is neither empty nor a comment. Raise ConfigError."""
    granted: dict[str, Any] = {}
    while match := _WORD.fullmatch(line):
        line, word, value = match[1].strip(), match[2], match[3]
        granted[word] = _value(word, value)
    role, colon, key = line.partition(":")
    role, key = (role, key.strip()) if colon and role in ROLES else (USER, line)
    name = granted.pop("name", None)
    return KeyLine(role, key, name, Rights(**granted))


def new_line(name: str, role: str, words: Iterable[tuple[str, str]]) -> str:
    """Return a line with a new key. words: what stands behind its name. Raise ConfigError."""
    _value("name", name)
    line = " ".join([f"{role}:sk-{secrets.token_urlsafe(32)}", f"name={name}", *(f"{word}={of}" for word, of in words)])
    read_line(line)
    return line


def _value(word: str, value: str) -> str | float | bool | int:
    """Return the value of a word behind a key. Raise ConfigError."""
    if word == "name":
        if _NAME.fullmatch(value) is None:
            raise ConfigError("`name=` takes up to 64 letters, digits and . _ @ -, a letter or digit first")
        return value
    if word in _PER:
        return _limit(word, value)
    if word == "priority":
        if value not in ("yes", "no"):
            raise ConfigError("`priority=` is yes or no")
        return value == "yes"
    if word != "weight" and word not in _SHARED:
        meant = get_close_matches(word, _WORDS, 1)
        hint = f"did you mean `{meant[0]}=`?" if meant else f"there are {', '.join(f'{one}=' for one in _WORDS)}"
        raise ConfigError(f"`{word[:20]}=` is unknown: {hint}")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if word == "weight":
        if not _LEAST_WEIGHT <= number <= 1 / _LEAST_WEIGHT:
            raise ConfigError(f"`weight=` takes a number, {_LEAST_WEIGHT:g} to {1 / _LEAST_WEIGHT:g}")
    elif not 0 <= number <= 1:
        raise ConfigError(f"`{word}=` takes a share of the {_SHARED[word]}, 0 to 1")
    return number


def _limit(word: str, value: str) -> int:
    amount, slash, unit = value.partition("/")
    found = _AMOUNT.fullmatch(amount)
    number = int(float(found[1]) * _FACTORS[found[2]]) if found is not None else 0
    if not slash or unit != _PER[word] or not 1 <= number <= _MOST:
        raise ConfigError(f"`{word}=` takes a number per {_PER[word]}, like {word}={_EXAMPLES[word]}")
    return number
