"""The application in this process, without a server: for what depends on time limits and on how a reader reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from starlette.applications import Starlette

from moeserve.frontend.app import create_app
from moeserve.frontend.services import Services
from tests.support.fake_engine import FakeEngine
from tests.support.frontend import run_context

Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Exchange:
    """One request: `sent` collects what the application sends; `leave` is the client's disconnect."""

    def __init__(self, app: Starlette, path: str, body: bytes | None, send: Send | None = None) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        self.aborted = False
        self._left = asyncio.Event()
        self._body = body
        self._send = send
        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [],
            "extensions": {"moeserve.abort": self._abort},
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._note))

    def leave(self) -> None:
        self._left.set()

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def writes(self) -> list[bytes]:
        return [message["body"] for message in self.sent[1:]]

    def _abort(self) -> None:
        self.aborted = True

    async def _receive(self) -> dict[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _note(self, message: MutableMapping[str, Any]) -> None:
        if self._send is not None:
            await self._send(message)
        self.sent.append(message)


@asynccontextmanager
async def application(folder: Path, **settings: Any) -> AsyncIterator[tuple[Starlette, Services, FakeEngine]]:
    """A ready application over a scripted engine, without chats: their template is rendered in other processes, which
    take longer to start than all the rest. The tokenizer is read in this one at once."""
    run = run_context(folder, template=None, **settings)
    with patch("moeserve.frontend.services.check_model_texts"):
        services = Services.load(run)
    app = create_app(services, services.run.config.max_connections)
    with FakeEngine(run) as engine:
        async with app.router.lifespan_context(app):
            while services.engine.ready is None:
                await asyncio.sleep(0.001)
            yield app, services, engine


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": "tiny", "prompt": "hi", **fields}).encode()
