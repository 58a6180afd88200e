"""Asks the service itself, over HTTP, whether it is ready."""

from __future__ import annotations

import asyncio

_PAUSE = 0.05


async def wait_until_ready(host: str, port: int) -> None:
    """Returns once `GET /ready` answers 200. Never gives up: the caller sets the limit."""
    while not await _is_ready(host, port):
        await asyncio.sleep(_PAUSE)


async def _is_ready(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()
