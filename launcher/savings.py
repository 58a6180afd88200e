"""The savings of a server's prefix cache, in words: for the terminal, while an agent works and at its end."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import click

from launcher.server_client import ServerError, open_url

_LOOK_S = 5.0  # s; the figures are not worth a longer wait
_PROMPTS, _HITS = "moeserve_prompt_tokens_total", "moeserve_prefix_cache_hits_total"
_SAVED, _LATEST_S = "moeserve_prompt_seconds_saved_total", "moeserve_latest_prompt_seconds"
_LATEST_TOKENS, _LATEST_CACHED = (f'moeserve_latest_prompt_tokens{{state="{state}"}}' for state in ("total", "cached"))
_LINE = re.compile(r"^(moeserve_\S+) (\S+)$", re.MULTILINE)


@contextmanager
def savings_told(url: str, key: str | None) -> Iterator[None]:
    """At the end of the block, say on standard error how many prompt tokens were cached since its beginning.

    Say nothing where the server does not tell the key its metrics, or nothing was computed meanwhile.
    """
    before = _figures(url, key)
    yield
    after = _figures(url, key)
    if before is not None and after is not None and (line := summary(before, after)):
        click.echo(f"moeserve: {line}", err=True)


def summary(before: dict[str, float], after: dict[str, float]) -> str:
    """Return a sentence about the time between two looks at a server's metrics; "" for no prompt in between."""

    def gain(name: str) -> float:
        now, then = after.get(name, 0.0), before.get(name, 0.0)
        return now - then if now >= then else now  # counters begin anew with each engine

    num_tokens, num_cached, saved_s = gain(_PROMPTS), min(gain(_HITS), gain(_PROMPTS)), gain(_SAVED)
    if not num_tokens:
        return ""
    words = f"{num_cached:,.0f} of {num_tokens:,.0f} prompt tokens were cached"
    if num_cached:
        words += f", which saved about {period(saved_s)}"
    if _LATEST_S in after:
        counts = f"{after.get(_LATEST_CACHED, 0):,.0f} of {after.get(_LATEST_TOKENS, 0):,.0f} cached"
        words += f"; the last prompt took {period(after[_LATEST_S])} ({counts})"
    return f"{words}."


def period(seconds: float) -> str:
    """Return a duration as people say it: `0.9 s`, `41 s`, `26 min`, `3.5 h`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _figures(url: str, key: str | None) -> dict[str, float] | None:
    try:
        with open_url(f"{url}/metrics", None, key, _LOOK_S) as response:
            text = response.read().decode()
        return {name: float(value) for name, value in _LINE.findall(text)}
    except (ServerError, OSError, ValueError):
        return None
