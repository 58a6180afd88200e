"""A client for the few routes of an OpenAI-compatible server that a measurement needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import msgspec

from moeserve.bench.chat_stream import Answer, StreamError, error_message, read_answer
from moeserve.bench.http_exchange import Endpoint, ExchangeError, Response, exchange

Message = dict[str, str]


class RequestFailed(Exception):
    """The server refused the request or did not answer it to its end. `status` is 0 where there was none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class ChatClient:
    """Sends streamed, greedy chat completions.

    `ignore_eos` asks for all `max_tokens` tokens, so that every server does the same work.
    """

    endpoint: Endpoint
    model: str
    api_key: str | None
    ignore_eos: bool
    timeout_s: float

    async def chat(self, messages: list[Message], max_tokens: int) -> tuple[Response, Answer]:
        """Raises RequestFailed."""
        request: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            request["ignore_eos"] = True
        response = await self._exchange("POST", "/v1/chat/completions", msgspec.json.encode(request))
        try:
            return response, read_answer(response.reads)
        except StreamError as error:
            raise RequestFailed(str(error), response.status) from error

    async def get(self, path: str) -> Any:
        """The decoded JSON of a GET. Raises RequestFailed."""
        response = await self._exchange("GET", path, b"")
        try:
            return msgspec.json.decode(response.body)
        except msgspec.DecodeError as error:
            raise RequestFailed(f"{path} does not answer in JSON", response.status) from error

    async def first_model(self) -> str:
        """The first of the models that the server lists. Raises RequestFailed."""
        listed = await self.get("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise RequestFailed("/v1/models lists no model; name one with --model") from error

    async def version(self) -> str | None:
        """What `GET /version` says, None where there is no such route."""
        try:
            answer = await self.get("/version")
        except RequestFailed:
            return None
        return str(answer.get("version", answer)) if isinstance(answer, dict) else str(answer)

    def with_model(self, model: str) -> ChatClient:
        return replace(self, model=model)

    def honouring_eos(self) -> ChatClient:
        return replace(self, ignore_eos=False)

    async def _exchange(self, method: str, path: str, body: bytes) -> Response:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            response = await exchange(self.endpoint, method, path, body, headers, self.timeout_s)
        except ExchangeError as error:
            raise RequestFailed(str(error)) from error
        if response.status != 200:
            raise RequestFailed(f"HTTP {response.status}: {error_message(response.body)}", response.status)
        return response
