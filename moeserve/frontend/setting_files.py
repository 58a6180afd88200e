"""The files of settings that are read again while the service runs: the keys, and the public prefixes.

They are read on SIGHUP, and when a file has changed and then stayed the same for a look. With a file that is wrong all
stays as it is.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import structlog

from moeserve.config import ConfigError
from moeserve.forever import Forever
from moeserve.frontend.keys import KeyRing, cache_account, load_keys, warn_of_readers
from moeserve.frontend.routes.cache import load_public_prefixes, publish_prefixes, unpin_prefixes
from moeserve.frontend.services import Services
from moeserve.frontend.usage import UsageBook

log = structlog.get_logger(__name__)

_LOOK_APART_S = 1.0

# Of each file: its number, size and time of change; None where there is none.
_Mark = tuple[tuple[int, int, int] | None, ...]


class PublicPrefixes:
    """Publishes the public prefixes. Of several frontends only the first does: all share the engine."""

    def __init__(self, services: Services, prefixes: Sequence[bytes]) -> None:
        self._services = services
        self._prefixes = prefixes
        self._publishing: Forever | None = None

    def start(self) -> None:
        if self._prefixes and self._services.number == 0:
            publish = partial(publish_prefixes, self._services, self._prefixes)
            self._publishing = Forever("public prefixes", publish)
            self._publishing.start()

    async def stop(self) -> None:
        if self._publishing is not None:
            await self._publishing.stop()
            self._publishing = None

    async def replace(self, prefixes: Sequence[bytes]) -> None:
        """Publish others. Those that are not among them are unpinned, and stay cached until memory is needed."""
        if prefixes != self._prefixes:
            await self.stop()
            gone = [prefix for prefix in self._prefixes if prefix not in prefixes]
            self._prefixes = prefixes
            if self._services.number == 0:
                await unpin_prefixes(self._services, gone)
            self.start()


class SettingFiles:
    """Watches the files, and has the service follow their contents."""

    def __init__(self, services: Services, keys: KeyRing, book: UsageBook, public: PublicPrefixes) -> None:
        config = services.run.config
        self._services = services
        self._keys = keys
        self._book = book
        self._public = public
        self._files = [file for file in (config.api_key_file, config.public_prefixes) if file is not None]
        self._read = self._seen = _mark(self._files)
        self._watching = Forever("setting files", self._look)

    def start(self) -> None:
        self._public.start()
        self._watching.start()

    async def stop(self) -> None:
        await self._watching.stop()
        await self._public.stop()

    async def _look(self) -> None:
        asked = self._services.asked_to_reload
        with suppress(TimeoutError):
            async with asyncio.timeout(_LOOK_APART_S):
                await asked.wait()
        mark, before = _mark(self._files), self._seen
        self._seen = mark
        # A file that somebody is writing changes again: half a key file would revoke the keys of the other half.
        if asked.is_set() or (mark == before != self._read):
            asked.clear()
            self._read = mark
            await self._reload()

    async def _reload(self) -> None:
        config = self._services.run.config
        try:
            keys = load_keys(config.api_key, config.api_key_file)
            prefixes = load_public_prefixes(config.public_prefixes)
        except ConfigError as error:
            self._say(log.error, "settings_not_reloaded", reason=str(error), consequence="the former keys stay")
            return
        gone = self._keys.adopt(keys)
        self._book.reopen()
        for identity in gone:
            self._services.engine.fail_tenant(cache_account(self._services.run.secret, identity))
        warn_of_readers(config.api_key_file)
        await self._public.replace(prefixes)
        self._say(log.info, "settings_reloaded", keys=len(list(keys)), revoked=len(gone), public_prefixes=len(prefixes))

    def _say(self, write: Callable[..., Any], event: str, **fields: Any) -> None:
        """Write a line, which one of several HTTP processes does."""
        if self._services.number == 0:
            write(event, **fields)


def _mark(files: Sequence[str]) -> _Mark:
    marks: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            found = os.stat(file)
            marks.append((found.st_ino, found.st_size, found.st_mtime_ns))
        except OSError:
            marks.append(None)
    return tuple(marks)
