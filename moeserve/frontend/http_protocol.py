"""uvicorn's HTTP protocol with bounds on what precedes a body.

uvicorn bounds neither the size of headers with httptools nor the time they may take, and an application cannot: it is
called when they are complete.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from moeserve.frontend import limits


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes connections whose headers are too large, too many or too slow.

    `scope["extensions"]["moeserve.abort"]` drops the connection with whatever its buffer still holds.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._received_bytes = 0  # since the headers began, as they came
        self._header_bytes = 0  # of complete header fields
        self._in_headers = True
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm()

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._in_headers:
            return
        # One packet may hold headers and body, so only data after which the headers still go on counts.
        self._received_bytes += len(data)
        if self._received_bytes > limits.MAX_HEADER_BYTES and not self.transport.is_closing():
            self.send_400_response("Request headers are too large.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers = True
        self._header_bytes = 0
        if self._deadline is None:
            self._arm()
        cast("dict[str, Any]", self.scope)["extensions"] = {"moeserve.abort": self.transport.abort}

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value)
        if len(self.headers) > limits.MAX_HEADERS or self._header_bytes > limits.MAX_HEADER_BYTES:
            raise ValueError("request headers are too large")

    def on_headers_complete(self) -> None:
        self._in_headers = False
        self._received_bytes = 0
        self._disarm()
        super().on_headers_complete()

    def _arm(self) -> None:
        self._deadline = self.loop.call_later(limits.RECEIVE_TIMEOUT_S, self._too_slow)

    def _disarm(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if not self.transport.is_closing():
            self.transport.close()
