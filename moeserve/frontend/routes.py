"""The routes beside generation: models, health, metrics, tokens, and an operator's commands."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.config import VERSION
from moeserve.frontend import limits
from moeserve.frontend.dialects import fields, messages
from moeserve.frontend.dialects.chat import ChatBody, read_chat_prompt
from moeserve.frontend.dialects.internal import ChatPrompt, ModelFacts
from moeserve.frontend.http import ApiError, invalid, unknown_model
from moeserve.frontend.metrics import CONTENT_TYPE
from moeserve.frontend.request_group import EngineGone
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.frontend.workers import InlineBudget


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(content), status, headers, media_type="application/json")


class ServiceRoutes:
    """The service: models, health, metrics, version, and the prefix cache."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def health(self, _: Request) -> Response:
        """Answer 200 while this process lives."""
        return json_response({"status": "ok"})

    async def ready(self, _: Request) -> Response:
        """Answer 200 if the model is loaded, the engine makes progress and generations are admitted."""
        reason = self._services.not_ready_reason()
        if reason is None:
            return json_response({"status": "ready"})
        return json_response({"status": "unavailable", "reason": reason}, 503, {"retry-after": "1"})

    async def version(self, _: Request) -> Response:
        return json_response({"version": VERSION})

    async def metrics(self, _: Request) -> Response:
        return Response(self._services.metrics.render(), headers={"content-type": CONTENT_TYPE.decode()})

    async def models(self, _: Request) -> Response:
        names = self._services.run.served_model_names
        data = [self._model(name) for name in names]
        pages = {"first_id": names[0], "last_id": names[-1], "has_more": False}
        return json_response({"object": "list", "data": data, **pages})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self._services.run.served_model_names:
            raise unknown_model(name)
        return json_response(self._model(name))

    async def reset_prefix_cache(self, _: Request) -> Response:
        """Drop every cached prefix that no request uses."""
        self._services.check_serving()
        try:
            result = await self._services.engine.control("drop_prefixes", {"namespace": None})
        except EngineGone as error:
            raise engine_unavailable(error) from error
        if result.error is not None:
            raise ApiError(409, result.error[:500], type="server_error", code="reset_failed")
        return json_response({"status": "ok", **result.result})

    def _model(self, name: str) -> dict[str, Any]:
        """Return a model as OpenAI's and Anthropic's clients know it, in one object."""
        ready = self._services.engine.ready
        max_model_len = None if ready is None else ready.max_model_len
        created = datetime.fromtimestamp(self._services.created, UTC)
        return {
            "id": name,
            "object": "model",
            "created": self._services.created,
            "owned_by": "moeserve",
            "root": name,
            "parent": None,
            "max_model_len": max_model_len,
            "type": "model",
            "display_name": name,
            "created_at": created.strftime("%Y-%m-%dT%H:%M:%SZ"),
            "max_input_tokens": max_model_len,
            "max_tokens": max_model_len,
            "capabilities": None,
            "lifecycle": "active",
        }


class TokenizeBody(ChatBody, kw_only=True):
    prompt: str | None = None
    add_special_tokens: bool | None = None


def _read_tokenize(data: bytes, model: ModelFacts) -> TokenizeBody | ChatPrompt:
    """Return a body with a `prompt`, or the conversation of one with `messages`. Raises ApiError."""
    body, _ = fields.decode_json(data, TokenizeBody)
    if body.model is not None:
        fields.check_model(body.model, model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either `prompt` or `messages`", "prompt")
    return body if body.messages is None else read_chat_prompt(body)


class DetokenizeBody(msgspec.Struct):
    tokens: list[int]
    model: str | None = None


class TokenRoutes:
    """`/tokenize`, `/detokenize` and `/v1/messages/count_tokens`: the same conversions that generations use."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tokenize(self, request: Request) -> Response:
        """Tokenise `prompt` as `/v1/completions` does, or `messages` as `/v1/chat/completions` does."""
        services = self._services
        facts = services.check_serving()
        data = await services.bodies.receive(request.scope, request.receive)
        body, budget = await services.bodies.read(data, partial(_read_tokenize, model=facts)), InlineBudget.of(data)
        del data
        if isinstance(body, ChatPrompt):
            token_ids = await services.encode(body, facts, budget, services.token_workers)
        else:
            assert body.prompt is not None
            num_chars = len(body.prompt)
            if num_chars > limits.MAX_TOKENIZE_CHARS:
                raise invalid(f"`prompt` has {num_chars} characters; at most {limits.MAX_TOKENIZE_CHARS}", "prompt")
            encode = partial(self._encode, body.prompt, add_special_tokens=body.add_special_tokens is not False)
            token_ids = await services.token_workers.run(num_chars, encode)
        content = {"count": len(token_ids), "max_model_len": facts.max_model_len, "tokens": token_ids}
        return await services.token_workers.run(0, partial(json_response, content))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer, most = self._services.tokenizer, limits.MAX_CONVERTED_TOKENS
        # Tokens that are counted in parts may be a few more, at the cuts, but never twice as many.
        if len(text) <= most or not tokenizer.has_more(text, 2 * most):
            token_ids = tokenizer.encode(text, add_special_tokens=add_special_tokens)
            if len(token_ids) <= most:
                return token_ids
        raise invalid(f"`prompt` has more than {most} tokens", "prompt")

    async def detokenize(self, request: Request) -> Response:
        services = self._services
        facts = services.check_serving()
        data = await services.bodies.receive(request.scope, request.receive)
        return await services.token_workers.run(len(data), partial(self._detokenize, data, facts))

    def _detokenize(self, data: bytes, facts: ModelFacts) -> Response:
        body, _ = fields.decode_json(data, DetokenizeBody)
        if body.model is not None:
            fields.check_model(body.model, facts)
        num_tokens = len(body.tokens)
        if num_tokens > limits.MAX_CONVERTED_TOKENS:
            raise invalid(f"`tokens` has {num_tokens} entries; at most {limits.MAX_CONVERTED_TOKENS}", "tokens")
        fields.check_token_ids("tokens", body.tokens, facts.vocab_size)
        return json_response({"prompt": self._services.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    async def count_message(self, request: Request) -> Response:
        """Count the prompt tokens that the request would have on `/v1/messages`."""
        services = self._services
        facts = services.check_serving()
        data = await services.bodies.receive(request.scope, request.receive)
        prompt = await services.bodies.read(data, partial(messages.parse_count, model=facts))
        budget = InlineBudget.of(data)
        del data
        token_ids = await services.encode(prompt, facts, budget, services.token_workers)
        return json_response({"input_tokens": len(token_ids)})


class TraceBody(msgspec.Struct, forbid_unknown_fields=True):
    """`max_tokens` and `token_ids` (keep which tokens they are) belong to `start`."""

    action: Literal["start", "stop"]
    max_tokens: int | None = None
    token_ids: bool = False


class ExpertRoutes:
    """The views of experts and the commands about them, for operators. Every route answers 404 without experts."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def experts(self, _: Request) -> Response:
        """Answer with load, balance and placement by layer and expert."""
        return json_response({"object": "experts", **await self._command("experts")})

    async def save_statistics(self, _: Request) -> Response:
        """Save the statistics to the file of `--expert-statistics`."""
        return json_response({"status": "ok", **await self._command("save_expert_statistics")})

    async def trace(self, request: Request) -> Response:
        """Start recording a trace, or end it and answer with the file."""
        self._check_experts()
        data = await self._services.bodies.receive(request.scope, request.receive)
        if len(data) > limits.INLINE_BODY_BYTES:
            raise invalid(f"The body takes at most {limits.INLINE_BODY_BYTES} bytes here")
        body, _ = fields.decode_json(data, TraceBody)
        if body.max_tokens is not None:
            fields.bounded("max_tokens", body.max_tokens, 1, limits.MAX_TOKENS)
        if body.action == "start":
            arguments = {"max_tokens": body.max_tokens, "token_ids": body.token_ids}
            return json_response({"status": "recording", **await self._command("start_expert_trace", arguments)})
        result = await self._command("stop_expert_trace")
        content = await self._services.workers.run(0, partial(_read_and_remove, Path(result["file"])))
        return Response(
            content,
            media_type="application/octet-stream",
            headers={"content-disposition": 'attachment; filename="trace.safetensors"'},
        )

    def _check_experts(self) -> None:
        self._services.check_serving()
        ready = self._services.engine.ready
        if ready is not None and not ready.num_experts:
            raise ApiError(404, "This model has no experts that moeserve computes itself", code="no_experts")

    async def _command(self, name: str, arguments: dict[str, Any] | None = None) -> dict[str, Any]:
        self._check_experts()
        try:
            result = await self._services.engine.control(name, arguments)
        except EngineGone as error:
            raise engine_unavailable(error) from error
        if result.error is not None:
            raise ApiError(409, result.error[:500], type="conflict", code="not_possible_now")
        return result.result


def _read_and_remove(path: Path) -> bytes:
    content = path.read_bytes()
    path.unlink()
    return content
