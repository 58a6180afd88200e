"""`/tokenize` and `/detokenize`: the very way from text to ids and back that generations take."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend import limits
from moeserve.frontend.body import read_body
from moeserve.frontend.dialects import fields
from moeserve.frontend.dialects.chat import ChatBody, read_chat_prompt
from moeserve.frontend.errors import invalid
from moeserve.frontend.routes.service import json_response
from moeserve.frontend.services import Services


class TokenizeBody(ChatBody, kw_only=True):
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class TokenRoutes:
    """Handlers over the shared services."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tokenize(self, request: Request) -> Response:
        """`prompt` as `/v1/completions` reads it, or `messages` as `/v1/chat/completions` does."""
        services = self._services
        facts = services.check_serving()
        body, _ = fields.decode_json(await self._body(request), TokenizeBody)
        if body.model is not None:
            fields.check_model(body.model, facts)
        if (body.prompt is None) == (body.messages is None):
            raise invalid("Give either `prompt` or `messages`", "prompt")
        if body.prompt is None:
            token_ids = await services.encode(read_chat_prompt(body), facts)
        else:
            special = body.add_special_tokens is not False
            token_ids = await asyncio.to_thread(services.tokenizer.encode, body.prompt, add_special_tokens=special)
        return json_response({"count": len(token_ids), "max_model_len": facts.max_model_len, "tokens": token_ids})

    async def detokenize(self, request: Request) -> Response:
        services = self._services
        facts = services.check_serving()
        body, _ = fields.decode_json(await self._body(request), DetokenizeBody)
        if body.model is not None:
            fields.check_model(body.model, facts)
        fields.check_token_ids("tokens", body.tokens, facts.vocab_size)
        text = await asyncio.to_thread(services.tokenizer.decode, body.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    async def _body(self, request: Request) -> bytes:
        return await read_body(
            request.scope,
            request.receive,
            max_bytes=self._services.run.config.max_request_bytes,
            timeout_s=limits.RECEIVE_TIMEOUT_S,
        )
