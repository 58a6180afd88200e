"""`GET /v1/usage`: the tokens and requests of keys, and the rest of their limits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any

from prometheus_client.core import CounterMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend.http import json_response
from moeserve.frontend.keys import Identity, cache_account
from moeserve.frontend.services import Services
from moeserve.frontend.store.usage import DAY_S, MINUTE_S, Account, Used
from moeserve.frontend.usage import UsageBook


class UsageRoutes:
    """The accounts of keys. A key sees its own, an admin all: those of the key file, and of names that were in it."""

    def __init__(self, services: Services, book: UsageBook) -> None:
        self._services = services
        self._book = book

    async def usage(self, request: Request) -> Response:
        identity: Identity = request.scope["state"]["identity"]
        holders = {one.name: one for one in self._book.holders} if identity.is_admin else {identity.name: identity}
        accounts = await self._book.accounts(None if identity.is_admin else [identity.name])
        running = self._running()
        data = [
            self._described(name, holders.get(name), accounts.get(name, Account()), *running.get(name, (0, 0)))
            for name in sorted(holders.keys() | accounts.keys())
        ]
        return json_response({"object": "list", "data": data})

    def _running(self) -> dict[str, tuple[int, int]]:
        """Return how many choices of each key run and wait, by the engine's latest figures."""
        stats = self._services.stats
        tenants = {} if stats is None or stats.load is None else stats.load.tenants
        found: dict[str, tuple[int, int]] = {}
        for one in self._book.holders:
            if (backlog := tenants.get(cache_account(self._services.run.secret, one))) is not None:
                running, waiting = found.get(one.name, (0, 0))
                found[one.name] = running + backlog.running, waiting + backlog.waiting
        return found

    def _described(
        self, name: str, holder: Identity | None, account: Account, running: int, waiting: int
    ) -> dict[str, Any]:
        now = int(time.time())
        rights = None if holder is None else holder.rights
        limits = {}
        if rights is not None and rights.tokens is not None:
            limits["tokens"] = _limit(rights.tokens, account.today.tokens, "day", DAY_S, now)
        if rights is not None and rights.requests is not None:
            limits["requests"] = _limit(rights.requests, account.minute, "min", MINUTE_S, now)
        return {
            "object": "usage",
            "key": name or None,
            "valid": holder is not None,
            "running": running,
            "waiting": waiting,
            "today": _shown(account.today),
            "total": _shown(account.total),
            "limits": limits,
        }


def _shown(used: Used) -> dict[str, int]:
    return {
        "requests": used.requests,
        "prompt_tokens": used.prompt,
        "cached_tokens": used.cached,
        "completion_tokens": used.generated,
        "total_tokens": used.tokens,
    }


def _limit(limit: int, used: int, per: str, seconds: int, now: int) -> dict[str, Any]:
    return {
        "limit": limit,
        "per": per,
        "used": used,
        "left": max(0, limit - used),
        "resets_at": (now // seconds + 1) * seconds,
    }


def usage_metrics(accounts: Mapping[str, Account]) -> Iterator[Metric]:
    """Yield the counts of each key, which go on over restarts."""
    for name, documentation, count in (
        ("requests", "Answers to a key", attrgetter("requests")),
        ("prompt_tokens", "Prompt tokens of these answers", attrgetter("prompt")),
        ("cached_tokens", "Of these, tokens found in the prefix cache", attrgetter("cached")),
        ("generation_tokens", "Tokens of these answers", attrgetter("generated")),
    ):
        family = CounterMetricFamily(f"moeserve_key_{name}", documentation, labels=["key"])
        for key, account in sorted(accounts.items()):
            family.add_metric([key], count(account.total))
        yield family
