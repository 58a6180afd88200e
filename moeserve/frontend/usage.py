"""The accounts of keys: their counts, and the limits that the next request must keep to.

All HTTP processes of a service count in the store's file, so a limit holds for all of them together, and counts outlive
every process. An answer is counted with its log line (`store/usage.py`), a few at a time.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import structlog

from moeserve.forever import Forever
from moeserve.frontend.account import Spent
from moeserve.frontend.errors import ApiError, key_gone
from moeserve.frontend.keys import ANYONE, Identity, KeyRing
from moeserve.frontend.store import usage
from moeserve.frontend.store.file import Owner
from moeserve.frontend.store.store import Store
from moeserve.frontend.store.usage import Account, Line, Refusal

log = structlog.get_logger(__name__)

_LOOK_APART_S = 1.0  # between two looks for lines that are written, or that a dead process has left
_LAST_LINES_S = 1.0  # that an ending process waits until its lines are written


class UsageBook:
    """Counts answers, writes their log lines, and refuses requests beyond a key's limits."""

    def __init__(
        self,
        keys: KeyRing,
        store: Store,
        owner: Owner,
        rejections: Counter[str],
        drain_logs: Callable[[float], bool] = lambda _: True,
    ) -> None:
        """owner: this process. drain_logs: waits for the given seconds at most until all lines are written; returns
        whether they are."""
        self._keys = keys
        self._store = store
        self._owner = owner
        self._rejections = rejections
        self._drain_logs = drain_logs
        self._pending: list[tuple[Line, asyncio.Future[None]]] = []
        self._expected: defaultdict[str, set[asyncio.Future[None]]] = defaultdict(set)  # by the names of keys
        self._uncounted: list[Spent] = []  # that the store could not take yet
        self._last_told = 0  # the number of the newest line that was given to the log
        self._work = asyncio.Event()
        self._writing = Forever("usage", self._count)
        self._looking = Forever("usage lines", self._look, _LOOK_APART_S)
        self._shut: dict[str, tuple[float, ApiError]] = {}  # by name, until when on the clock

    def start(self) -> None:
        self._writing.start()
        self._looking.start()

    async def stop(self) -> None:
        """Count the answers that have ended, and wait a moment until their lines are in the log."""
        await self._looking.stop()
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_LINES_S):
                await self.settle()
        await self._writing.stop()
        if self._uncounted:
            log.error("usage_not_counted", answers=len(self._uncounted))
        if await asyncio.to_thread(self._drain_logs, _LAST_LINES_S):
            with suppress(ApiError):
                await self._drop_written()

    def expect(self, key: str) -> asyncio.Future[None]:
        """See `Ledger`."""
        counted = asyncio.get_running_loop().create_future()
        self._expected[key].add(counted)
        counted.add_done_callback(partial(self._forget, key))
        return counted

    def _forget(self, key: str, counted: asyncio.Future[None]) -> None:
        self._expected[key].discard(counted)
        if not self._expected[key]:
            del self._expected[key]

    def tell(
        self, spent: Spent, event: str, fields: dict[str, Any], counted: asyncio.Future[None] | None = None
    ) -> None:
        """See `Ledger`."""
        self._pending.append((Line(spent, event, fields), counted or self.expect(spent.key)))
        self._work.set()

    async def settle(self, keys: Collection[str] | None = None) -> None:
        """Wait until all answers to keys, None for all, that have ended are counted, if the store can be written."""
        names = list(self._expected) if keys is None else keys
        if expected := [counted for name in names for counted in self._expected.get(name, ())]:
            await asyncio.wait(expected)

    def reopen(self) -> None:
        """Ask anew whether keys have reached their limits, which may have changed."""
        self._shut.clear()

    @property
    def holders(self) -> list[Identity]:
        """The holders of the keys of the key file; without keys, anyone."""
        return list(self._keys) or [ANYONE]

    def holder(self, digest: bytes) -> Identity | None:
        """Return the holder of the key with a digest, None for a key that is not valid any more."""
        return self._keys.holder(digest)

    def require(self, digest: bytes) -> Identity:
        """Return the holder of a key. Raise ApiError (401) for one that is not valid any more."""
        holder = self.holder(digest)
        if holder is None:
            raise key_gone()
        return holder

    async def enter(self, digest: bytes) -> None:
        """Count a request that begins. Raise as `require`, and ApiError (429) beyond the key's limits."""
        holder = self.require(digest)
        tokens, requests = holder.rights.tokens, holder.rights.requests
        if tokens is None and requests is None:
            return
        until, error = self._shut.get(holder.name, (0.0, None))
        if error is None or until <= time.time():
            await self.settle([holder.name])
            begin = partial(usage.begin, key=holder.name, tokens=tokens, requests=requests)
            refusal = await self._store.write(digest, begin)
            if refusal is None:
                return
            until, error = time.time() + refusal.retry_s, _refused(holder, refusal)
            self._shut[holder.name] = until, error
        self._rejections[error.code] += 1
        raise replace(error, retry_after_s=max(1.0, until - time.time()))

    async def accounts(self, names: Collection[str] | None = None) -> dict[str, Account]:
        """Return the accounts of some keys, or of all that have used anything."""
        await self.settle(names)
        return await self._store.read(b"", partial(usage.accounts, keys=names))

    # Writing.

    async def _count(self) -> None:
        """Count the answers since the last turn, then write their lines. Where the store fails the lines are written at
        once, and counted when it works again."""
        await self._work.wait()
        self._work.clear()
        pending, self._pending = self._pending, []
        lines = [line for line, _ in pending]
        self._uncounted += [line.spent for line in lines]
        spents = list(self._uncounted)
        try:
            number = await self._store.write(
                b"", partial(usage.add, owner=self._owner.name, spents=spents, lines=lines)
            )
            del self._uncounted[: len(spents)]
            self._last_told = max(self._last_told, number)
        except ApiError:
            asyncio.get_running_loop().call_later(_LOOK_APART_S, self._work.set)
        finally:
            _write(lines)
            for _, counted in pending:
                if not counted.done():
                    counted.set_result(None)

    async def _look(self) -> None:
        """Drop the lines that are written, and write the lines that dead processes have left."""
        with suppress(ApiError):  # of the store, which has logged it
            if self._drain_logs(0.0):
                await self._drop_written()
            dead = [name for name in await self._store.read(b"", usage.line_owners) if self._owner.is_dead(name)]
            if dead:
                adopt = partial(usage.adopt_lines, dead=dead, owner=self._owner.name)
                lines, number = await self._store.write(b"", adopt)
                _write(lines)
                self._last_told = max(self._last_told, number)

    async def _drop_written(self) -> None:
        last, self._last_told = self._last_told, 0
        if last:
            await self._store.write(b"", partial(usage.drop_written, owner=self._owner.name, last=last))


def _write(lines: list[Line]) -> None:
    for line in lines:
        log.info(line.event, **line.fields)


def _refused(holder: Identity, refusal: Refusal) -> ApiError:
    """Return the error for a request beyond a limit."""
    if refusal.limit == "tokens":
        message = (
            f"The key {holder.name} has used {refusal.used:,} of its {holder.rights.tokens:,} tokens of this day: "
            f"they are counted anew at 00:00 UTC, in {_shown(refusal.retry_s)}"
        )
    else:
        message = (
            f"The key {holder.name} has begun its {holder.rights.requests:,} requests of this minute: the next one may "
            f"begin in {refusal.retry_s} s"
        )
    return ApiError(429, message, type="rate_limit_error", code=f"key_{refusal.limit}_used")


def _shown(seconds: int) -> str:
    """Return a time as people say it."""
    hours, minutes = divmod(-(-seconds // 60), 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
