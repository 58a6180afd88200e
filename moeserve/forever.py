"""Work that lasts as long as its process: an error ends one turn of it, and its own end ends the process.

A supervisor starts a process that ends again. A process that lives on without a part of its work serves nobody and
says nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, NoReturn

import structlog

log = structlog.get_logger(__name__)

_AFTER_ERROR_S = 0.5  # seconds from a turn that failed to the next one: the cause may last


class Forever:
    """Repeats a turn on a task of the event loop, until the turn returns False."""

    def __init__(self, name: str, turn: Callable[[], Awaitable[bool | None]], apart_s: float = 0.0) -> None:
        """name: for the log. turn: settles its own waiters, also where it fails. apart_s: seconds between
        two turns."""
        self._name, self._turn, self._apart_s = name, turn, apart_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = vital(self._name, self._run())

    def cancel(self) -> None:
        """Have it end soon."""
        if self._task is not None:
            self._task.cancel()

    async def stop(self) -> None:
        """Return when it has ended."""
        await cancel(self._task)

    async def _run(self) -> None:
        while True:
            wait_s = self._apart_s
            try:
                if await self._turn() is False:
                    return
            except (Exception, asyncio.CancelledError) as error:
                task = asyncio.current_task()
                # A future that somebody else has cancelled raises it, too.
                if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                    raise
                _tell(self._name, error)
                wait_s = max(wait_s, _AFTER_ERROR_S)
            if wait_s:
                await asyncio.sleep(wait_s)


def vital(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Return a task of the work, whose failure ends the process."""
    task = asyncio.create_task(work)
    task.add_done_callback(partial(_check, name))
    return task


async def cancel(*tasks: asyncio.Task[None] | None) -> None:
    """Cancel tasks and wait until they have ended. None: one that was never started."""
    started = [task for task in tasks if task is not None]
    for task in started:
        task.cancel()
    await asyncio.gather(*started, return_exceptions=True)


def repeat(name: str, turn: Callable[[], bool | None]) -> None:
    """Repeat a turn on this thread until it returns False."""
    try:
        while True:
            try:
                if turn() is False:
                    return
            except Exception as error:
                _tell(name, error)
                time.sleep(_AFTER_ERROR_S)
    except BaseException as error:
        _end_process(name, error)


def _tell(name: str, error: BaseException) -> None:
    log.error("turn_failed", work=name, exc_info=error)


def _check(name: str, task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _end_process(name, error)


def _end_process(name: str, error: BaseException) -> NoReturn:
    try:
        log.critical("work_ended", work=name, exc_info=error, consequence="this process ends")
        logging.shutdown()  # waits until the line is written
    finally:
        os._exit(1)
