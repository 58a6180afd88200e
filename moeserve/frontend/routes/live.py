"""`GET /v1/stats` and `GET /v1/stats/stream`: the live figures, whole or as events."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeserve.config import VERSION
from moeserve.frontend import limits
from moeserve.frontend.http import KEEP_ALIVE, EventStream, unavailable, until_disconnect
from moeserve.frontend.services import Services


class LiveRoutes:
    """Both routes begin with the same: facts about the service, and the samples of the latest minutes."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.stream = StatsStream(services)

    async def stats(self, _: Request) -> Response:
        body = msgspec.json.encode({"object": "stats", **_begin(self._services)})
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


class StatsStream:
    """An ASGI endpoint: an event `stats` with all there is, then an event `sample` a second."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._num_open = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._num_open >= limits.MAX_STATS_STREAMS:
            raise unavailable("Too many watch the figures already", "too_many_streams", 10.0)
        stream = EventStream(send)
        await stream.start()
        if scope["method"] == "HEAD":
            await stream.write(b"", last=True)
            return
        self._num_open += 1
        try:
            await until_disconnect(receive, self._tell(stream))
        finally:
            self._num_open -= 1

    async def _tell(self, stream: EventStream) -> None:
        live = self._services.live
        told = live.latest
        await stream.write(_event(b"stats", _begin(self._services)))
        while not live.closed:
            sample = await live.next(told, limits.KEEP_ALIVE_S)
            if sample is not None:
                told = sample
            await stream.write(KEEP_ALIVE if sample is None else _event(b"sample", sample), last=live.closed)


def _begin(services: Services) -> dict[str, Any]:
    return {"about": _about(services), "samples": list(services.live.samples)}


def _about(services: Services) -> dict[str, Any]:
    """Return what does not change; of the engine only once it is ready."""
    ready = services.engine.ready
    facts: dict[str, Any] = {
        "version": VERSION,
        "models": list(services.run.served_model_names),
        "ready": ready is not None,
    }
    if ready is not None:
        facts |= {
            "device": ready.device,
            "dtype": ready.dtype,
            "arithmetic": ready.arithmetic,
            "max_model_len": ready.max_model_len,
            "max_num_seqs": ready.max_num_seqs,
            "num_blocks": ready.num_blocks,
            "block_size": ready.block_size,
            "num_experts": ready.num_experts,
        }
    return facts


def _event(name: bytes, content: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, msgspec.json.encode(content))
