"""The prompt cache as its users see and steer it: list, warm, pin and unpin prefixes, drop one's own.

Every route acts on the account of the caller's key. Warming is a generation of one token, in a dialect of its own.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend.dialects import fields
from moeserve.frontend.dialects.chat import ChatBody, read_cache, read_chat_prompt
from moeserve.frontend.dialects.internal import ChatPrompt, Delta, GenerateRequest, ModelFacts, Usage
from moeserve.frontend.generate import Dialect
from moeserve.frontend.http import KEEP_ALIVE, ApiError, invalid
from moeserve.frontend.keys import ADMIN, Identity, cache_account, cache_namespace
from moeserve.frontend.request_group import EngineGone
from moeserve.frontend.routes import json_response
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.frontend.text import TextTokenizer
from moeserve.frontend.workers import InlineBudget
from moeserve.plan import SamplingParams
from moeserve.wire import pack_token_ids, unpack_token_ids
from radix_cache import APART

_P = TypeVar("_P", bound="PrefixBody")

_LISTED = 50
_MAX_LISTED = 1000

# The fields of a body that have an effect: those that render messages, and by route those beside the prefix.
MESSAGE_FIELDS = frozenset(
    {
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "functions",
        "messages",
        "reasoning_effort",
        "tools",
    }
)
PUBLIC_FIELDS = frozenset({"model"})
PIN_FIELDS = PUBLIC_FIELDS | {"cache_salt"}
WARM_FIELDS = PIN_FIELDS | {
    "cache_report",
    "priority",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
}


class PrefixBody(ChatBody, kw_only=True):
    """A prefix: the messages of a chat (with the fields that change how they are rendered), a text, or token ids.

    The other fields of a chat may ask for nothing (`check_prefix`).
    """

    prompt: str | list[int] | None = None


class UnpinBody(PrefixBody, kw_only=True):
    """id: of the listing, in place of a prefix."""

    id: str | None = None


def check_prefix(body: PrefixBody, others: Collection[str]) -> None:
    """Raise ApiError unless the body has one prefix, and beside it asks for nothing but in the fields `others`."""
    if (body.prompt is None) == (body.messages is None):
        raise invalid("Give either `prompt` or `messages`", "prompt")
    prefix_fields = MESSAGE_FIELDS if body.prompt is None else {"prompt"}
    for name in body.__struct_fields__:
        if name not in prefix_fields and name not in others and _asks(name, getattr(body, name)):
            raise invalid(f"`{name}` has no effect on a prefix here: leave it out", name)


def _asks(name: str, value: Any) -> bool:
    """Return whether a field asks for something. Bodies made for a chat may say what is so without them."""
    if name in ("function_call", "tool_choice"):
        return value not in (None, "auto", "none")
    return not (value is None or value is False or value in ([], {}) or (name == "n" and value == 1))


def read_prefix(body: PrefixBody, model: ModelFacts) -> ChatPrompt | str | list[int]:
    """Return the prefix of a checked body; messages without the head of an answer, unless the client asks for it."""
    if body.model is not None:
        fields.check_model(body.model, model)
    if body.prompt is None:
        return replace(read_chat_prompt(body), add_generation_prompt=body.add_generation_prompt is True)
    if not body.prompt:
        raise invalid("`prompt` must not be empty", "prompt")
    return (
        body.prompt if isinstance(body.prompt, str) else fields.check_token_ids("prompt", body.prompt, model.vocab_size)
    )


def parse_warm(body: bytes, model: ModelFacts) -> GenerateRequest:
    """Return a request that computes a prefix and samples one token, which nobody sees. Raises ApiError."""
    prefix, ignored = fields.decode_json(body, PrefixBody)
    check_prefix(prefix, WARM_FIELDS)
    return GenerateRequest(
        model=prefix.model or model.names[0],
        prompts=[read_prefix(prefix, model)],
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        max_tokens=1,
        seed=0,
        priority=fields.read_priority(prefix),
        cache_salt=fields.read_cache_salt(prefix.cache_salt),
        cache=read_cache(prefix),
        ignored=ignored,
    )


class WarmFormatter:
    """Writes how much of the prefix was cached before. Its answers are never streamed."""

    def __init__(
        self, answer_id: str, created: int, request: GenerateRequest, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._head = {"id": answer_id, "object": "cache.warm", "created": created, "model": request.model}

    def start(self, index: int, usage: Usage) -> bytes:
        return b""

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        return b""

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return error.event()

    def ping(self) -> bytes:
        return KEEP_ALIVE

    def complete(self, choices: list[Delta], usage: Usage) -> bytes:
        counts: dict[str, Any] = {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        if usage.cache_report is not None:
            counts["cache_report"] = usage.cache_report
        return msgspec.json.encode({**self._head, **counts})


WARM = Dialect("warm-", parse_warm, WarmFormatter)


class CacheRoutes:
    """`/v1/cache` and the routes below it, but for warming."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def cache(self, request: Request) -> Response:
        """List prefixes (GET), or drop all of the caller's own that no request uses (DELETE)."""
        return await (self._drop(request) if request.method == "DELETE" else self._list(request))

    async def pin(self, request: Request) -> Response:
        """Pin a prefix that is cached, within the key's budget."""
        body, token_ids = await self._prefix(request, PrefixBody)
        assert token_ids is not None
        arguments = {
            "namespace": self._namespace(request, body),
            "token_ids": pack_token_ids(token_ids),
            "share": _identity(request).retention_share,
        }
        result = await self._command(request, "pin_prefix", arguments)
        if result["over_budget"]:
            message = (
                f"The key's budget has {result['free_blocks']} free KV blocks, and this prefix needs "
                f"{result['wanted_blocks']} more. Unpin another one first."
            )
            raise ApiError(409, message, type="conflict", code="over_budget")
        if not result["tokens"]:
            raise invalid("The prefix is shorter than a KV block, so there is nothing to pin", "prompt")
        if missing := result["missing_tokens"]:
            message = f"{missing} of {result['tokens']} tokens are not cached: POST /v1/cache/warm computes them"
            raise ApiError(409, message, type="conflict", code="not_cached")
        return json_response({"object": "cache.pin", "tokens": result["tokens"], "prompt_tokens": len(token_ids)})

    async def unpin(self, request: Request) -> Response:
        """End a pin, named by its prefix or by the `id` of the listing."""
        body, token_ids = await self._prefix(request, UnpinBody)
        arguments = {
            "namespace": self._namespace(request, body),
            "token_ids": pack_token_ids(token_ids or []),
            "prefix_id": body.id,
        }
        if not (await self._command(request, "unpin_prefix", arguments))["unpinned"]:
            raise ApiError(404, "No such prefix is pinned", code="not_pinned")
        return json_response({"object": "cache.unpin", "status": "ok"})

    async def _list(self, request: Request) -> Response:
        self._services.check_serving()
        identity, query = _identity(request), request.query_params
        every = query.get("all", "0") not in ("", "0", "false")
        if every and ADMIN not in identity.grants:
            raise ApiError(
                403,
                "The whole tree needs a key with the role `admin`",
                type="permission_error",
                code="insufficient_role",
            )
        arguments = {
            "namespace": None if every else self._salted(request),
            "limit": _limit(query.get("limit")),
            "share": identity.retention_share,
        }
        result = await self._command(request, "list_prefixes", arguments)
        prefixes = [self._entry(entry, every) for entry in result.pop("prefixes")]
        budget = result.pop("budget")
        if not every:
            result["budget"] = {**budget, "free": max(0, budget["blocks"] - budget["pinned"])}
        return json_response({"object": "cache", **result, "prefixes": prefixes})

    async def _drop(self, request: Request) -> Response:
        self._services.check_serving()
        arguments = {"namespace": self._salted(request)}
        return json_response({"object": "cache.drop", **await self._command(request, "drop_prefixes", arguments)})

    def _entry(self, entry: dict[str, Any], every: bool) -> dict[str, Any]:
        namespace, preview = entry["namespace"], unpack_token_ids(entry["preview"]).tolist()
        shown = {
            "id": entry["id"],
            "parent": entry["parent"],
            "prefix_tokens": entry["num_prefix_tokens"],
            "tokens": entry["num_tokens"],
            "blocks": entry["num_blocks"],
            "hits": entry["hits"],
            "tokens_saved": entry["tokens_saved"],
            "unused_for_s": round(entry["unused_for"], 1),
            "retained": entry["is_retained"],
            "retained_for_s": None if entry["retained_for"] is None else round(entry["retained_for"], 1),
            "pinned": entry["is_pinned"],
            "in_use": entry["is_leased"],
            "salted": "/" in namespace.removesuffix(APART),
            "preview": self._services.tokenizer.decode(preview, skip_special_tokens=False),
        }
        return {**shown, "namespace": namespace} if every else shown

    async def _prefix(self, request: Request, kind: type[_P]) -> tuple[_P, list[int] | None]:
        """Return the body and the token ids of its prefix, None where an id stands for it."""
        services = self._services
        facts = services.check_serving()
        data = await services.bodies.receive(request.scope, request.receive)
        body, ignored = await services.bodies.read(data, partial(fields.decode_json, expected=kind))
        services.metrics.count_ignored(ignored)
        if isinstance(body, UnpinBody) and body.id is not None:
            if body.prompt is not None or body.messages is not None:
                raise invalid("Give either `id` or a prefix", "id")
            return body, None
        check_prefix(body, PIN_FIELDS)
        prefix, budget = await services.bodies.read(data, lambda _: read_prefix(body, facts)), InlineBudget.of(data)
        del data
        return body, await services.encode(prefix, facts, budget)

    def _namespace(self, request: Request, body: PrefixBody) -> str:
        salt = fields.read_cache_salt(body.cache_salt)
        return cache_namespace(self._services.run.secret, _identity(request), salt)

    def _salted(self, request: Request) -> str:
        """Return the namespace of a request without a body, whose salt is in the query."""
        salt = fields.read_cache_salt(request.query_params.get("cache_salt"))
        return cache_namespace(self._services.run.secret, _identity(request), salt)

    async def _command(self, request: Request, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        tenant = cache_account(self._services.run.secret, _identity(request))
        try:
            result = await self._services.engine.control(name, arguments, tenant)
        except EngineGone as error:
            raise engine_unavailable(error) from error
        if result.error is not None:
            raise invalid(result.error[:500])
        return result.result


def _identity(request: Request) -> Identity:
    identity: Identity = request.state.identity
    return identity


def _limit(text: str | None) -> int:
    if text is None:
        return _LISTED
    if not (text.isdecimal() and len(text) <= 4 and 1 <= int(text) <= _MAX_LISTED):
        raise invalid(f"`limit` must be 1 to {_MAX_LISTED}", "limit")
    return int(text)
