"""The savings of a server's prefix cache, in words: for the terminal, while an agent works and at its end."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

from launcher.server_client import ServerError, open_url

_LOOK_S = 5.0  # s; the figures are not worth a longer wait
# Figures of `/v1/usage`: the key's own, of all keys for an admin.
TURNS, PROMPTS, CACHED = "requests", "prompt_tokens", "cached_tokens"
# Figures of `/metrics`, which a key may not be allowed to see: of all that is served.
HITS, SAVED = "moeserve_prefix_cache_hits_total", "moeserve_prompt_seconds_saved_total"
LATEST_S = "moeserve_latest_prompt_seconds"
LATEST_TOKENS, LATEST_CACHED = (f'moeserve_latest_prompt_tokens{{state="{state}"}}' for state in ("total", "cached"))
_LINE = re.compile(r"^(moeserve_\S+) (\S+)$", re.MULTILINE)


@contextmanager
def savings_told(url: str, key: str | None) -> Iterator[None]:
    """At the end of the block, say on standard error how many of the key's prompt tokens were cached meanwhile.

    Say nothing where the server does not tell, or no answer has ended in between.
    """
    before = _figures(url, key)
    yield
    if line := summary(before, _figures(url, key)):
        click.echo(f"moeserve: {line}", err=True)


def summary(before: dict[str, float], after: dict[str, float]) -> str:
    """Return a sentence about the time between two looks at a server's figures; "" for no answer in between."""

    def gain(name: str) -> float:
        now, then = after.get(name, 0.0), before.get(name, 0.0)
        return now - then if now >= then else now  # counters of an engine begin anew with each engine

    num_turns, num_tokens, num_cached = gain(TURNS), gain(PROMPTS), gain(CACHED)
    if not num_turns:
        return ""
    turns = "1 turn" if num_turns == 1 else f"{num_turns:,.0f} turns"
    words = f"{turns}, {num_cached:,.0f} of {num_tokens:,.0f} prompt tokens cached"
    saved_s = gain(SAVED) * min(1.0, num_cached / max(1.0, gain(HITS)))
    if saved_s >= 1:
        words += f", which saved about {period(saved_s)}"
    if LATEST_S in after:
        counts = f"{after.get(LATEST_CACHED, 0):,.0f} of {after.get(LATEST_TOKENS, 0):,.0f} cached"
        words += f"; the last prompt took {period(after[LATEST_S])} ({counts})"
    return f"{words}."


def period(seconds: float) -> str:
    """Return a duration as people say it: `0.9 s`, `41 s`, `26 min`, `3.5 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _figures(url: str, key: str | None) -> dict[str, float]:
    """Return the figures that the server tells the key, none of a server without such routes."""
    found: dict[str, float] = {}
    try:
        accounts = json.loads(_read(f"{url}/v1/usage", key))["data"]
        found = {name: sum(account["total"][name] for account in accounts) for name in (TURNS, PROMPTS, CACHED)}
        found |= {name: float(value) for name, value in _LINE.findall(_read(f"{url}/metrics", key))}
    except (ServerError, OSError, ValueError, KeyError, TypeError):
        return found
    return found


def _read(url: str, key: str | None) -> str:
    with open_url(url, None, key, _LOOK_S) as response:
        return str(response.read().decode())
