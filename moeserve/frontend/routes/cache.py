"""The prompt cache as its users and its operator steer it: list, warm, pin and unpin prefixes, drop one's own.

Every route acts on the account of the caller's key. Warming is a generation (`dialects/chat.py`).

Public prefixes are prompts that the operator declares in a file, computed once and shared by all keys. They are
computed in the namespace PUBLIC, in which no client's request runs, and pinned there. A client's request uses them as
far as its prompt equals one, and goes on in its own namespace.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import structlog
from starlette.requests import Request
from starlette.responses import Response

from moeserve.config import ConfigError
from moeserve.frontend.dialects import bodies
from moeserve.frontend.dialects.chat import PUBLIC_FIELDS, PrefixBody, check_prefix
from moeserve.frontend.dialects.fields import read_cache_salt
from moeserve.frontend.errors import ApiError, conflict, forbidden, invalid, longest_output
from moeserve.frontend.http import json_response
from moeserve.frontend.key_file import ADMIN
from moeserve.frontend.keys import Identity, cache_account, cache_namespace
from moeserve.frontend.prepare.text_messages import Kind, Prefix, expect
from moeserve.frontend.relay.request_group import EngineGone, RequestRejected
from moeserve.frontend.services import Services
from moeserve.plan import FinishReason, SamplingParams, Terms
from moeserve.wire import Generate, Rest, pack_token_ids, unpack_token_ids
from radix_cache import PUBLIC

_LISTED = 50
_MAX_LISTED = 1000
_SHOWN_AT_ONCE = 50  # entries of a listing whose texts are decoded in one turn of the event loop

log = structlog.get_logger(__name__)

_POLL_S = 0.05


class CacheRoutes:
    """`/v1/cache` and the routes below it, but for warming."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def cache(self, request: Request) -> Response:
        """List prefixes (GET), or drop all of the caller's own that no request uses (DELETE)."""
        return await (self._drop(request) if request.method == "DELETE" else self._list(request))

    async def pin(self, request: Request) -> Response:
        """Pin a prefix that is cached, within the key's budget."""
        prefix = await self._prefix(request, "pin")
        arguments = {
            "namespace": self._namespace(request, prefix),
            "token_ids": pack_token_ids(prefix.token_ids or []),
            "prefix_id": prefix.prefix_id,
            "share": _identity(request).rights.retention,
            "pin_share": _identity(request).rights.pinned,
        }
        result = await self._command(request, "pin_prefix", arguments)
        if result.get("is_gone"):
            raise ApiError(404, "No such prefix of this key is cached", code="not_cached")
        if result["over_budget"]:
            message = (
                f"The key may pin {result['free_blocks']} more KV blocks, and this prefix needs "
                f"{result['wanted_blocks']}. Unpin another one first."
            )
            raise conflict(message, "over_budget")
        if not result["tokens"]:
            raise invalid("The prefix is shorter than a KV block, so there is nothing to pin", "prompt")
        if missing := result["missing_tokens"]:
            message = f"{missing} of {result['tokens']} tokens are not cached: POST /v1/cache/warm computes them"
            raise conflict(message, "not_cached")
        num_tokens = result["tokens"] if prefix.token_ids is None else len(prefix.token_ids)
        return json_response({"object": "cache.pin", "tokens": result["tokens"], "prompt_tokens": num_tokens})

    async def unpin(self, request: Request) -> Response:
        """End a pin, named by its prefix or by the `id` of the listing."""
        prefix = await self._prefix(request, "pin")
        arguments = {
            "namespace": self._namespace(request, prefix),
            "token_ids": pack_token_ids(prefix.token_ids or []),
            "prefix_id": prefix.prefix_id,
        }
        if not (await self._command(request, "unpin_prefix", arguments))["unpinned"]:
            raise ApiError(404, "No such prefix is pinned", code="not_pinned")
        return json_response({"object": "cache.unpin", "status": "ok"})

    async def _list(self, request: Request) -> Response:
        self._services.check_serving()
        identity, query = _identity(request), request.query_params
        every = query.get("all", "0") not in ("", "0", "false")
        if every and ADMIN not in identity.grants:
            raise forbidden("The whole tree needs a key with the role `admin`")
        arguments = {
            "namespace": None if every else self._salted(request),
            "limit": _limit(query.get("limit")),
            "share": identity.rights.retention,
            "pin_share": identity.rights.pinned,
        }
        result = await self._command(request, "list_prefixes", arguments)
        prefixes, own = [], self._salted(request)
        for entry in result.pop("prefixes"):
            prefixes.append(self._entry(entry, every, own))
            if len(prefixes) % _SHOWN_AT_ONCE == 0:
                await asyncio.sleep(0)  # streams go on
        budget = result.pop("budget")
        if not every:
            result["budget"] = budget
        return json_response({"object": "cache", **result, "prefixes": prefixes})

    async def _drop(self, request: Request) -> Response:
        self._services.check_serving()
        arguments = {"namespace": self._salted(request)}
        return json_response({"object": "cache.drop", **await self._command(request, "drop_prefixes", arguments)})

    def _entry(self, entry: dict[str, Any], every: bool, own: str) -> dict[str, Any]:
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
            "salted": "/" in namespace,
            "preview": self._services.tokenizer.decode(preview, skip_special_tokens=False),
        }
        return {**shown, "namespace": namespace, "own": namespace == own} if every else shown

    async def _prefix(self, request: Request, kind: Kind) -> Prefix:
        prefix = expect(await self._services.receive(kind, request.scope, request.receive), Prefix)
        self._services.metrics.count_ignored(prefix.ignored)
        return prefix

    def _namespace(self, request: Request, prefix: Prefix) -> str:
        return cache_namespace(self._services.run.secret, _identity(request), prefix.cache_salt)

    def _salted(self, request: Request) -> str:
        """Return the namespace of a request without a body, whose salt is in the query."""
        salt = read_cache_salt(request.query_params.get("cache_salt"))
        return cache_namespace(self._services.run.secret, _identity(request), salt)

    async def _command(self, request: Request, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        tenant = cache_account(self._services.run.secret, _identity(request))
        result = await self._services.command(name, arguments, tenant)
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


def load_public_prefixes(file: str | None) -> list[bytes]:
    """Return the prefixes in a file, checked: a JSON list of bodies as `/v1/cache/warm` takes them. Raise
    ConfigError."""
    if file is None:
        return []
    try:
        entries = msgspec.json.decode(Path(file).read_bytes(), type=list[msgspec.Raw])
    except OSError as error:
        raise ConfigError(f"cannot read the public prefixes in {file}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ConfigError(f"the public prefixes in {file} are no JSON list of objects") from None
    prefixes = []
    for number, entry in enumerate(entries):
        try:
            prefix, unknown = bodies.decode_json(bytes(entry), PrefixBody)
            check_prefix(prefix, PUBLIC_FIELDS)
        except ApiError as error:
            raise ConfigError(f"public prefix {number} in {file}: {error.message}") from None
        if unknown:
            raise ConfigError(f"public prefix {number} in {file} has an unknown field {unknown[0]!r}")
        prefixes.append(bytes(entry))
    return prefixes


async def publish_prefixes(services: Services, prefixes: Sequence[bytes]) -> bool:
    """Compute and pin the prefixes in one life of the engine, once it is ready; return at its end whether there may be
    another life.

    A prefix that cannot be published is logged, and the others follow.
    """
    if services.not_ready_reason() is not None or services.engine.rest is not Rest.AWAKE:
        await asyncio.sleep(_POLL_S)
        return services.engine.dead_reason is None
    lost = services.engine.lost
    for number, prefix in enumerate(prefixes):
        try:
            num_tokens = await _publish(services, prefix)
        except (ApiError, EngineGone, RequestRejected, RuntimeError) as error:
            reason = error.message if isinstance(error, ApiError) else str(error)
            log.error("public_prefix_failed", number=number, error=reason)
        else:
            log.info("public_prefix_ready", number=number, tokens=num_tokens)
    await lost.wait()
    return services.engine.dead_reason is None


async def unpin_prefixes(services: Services, prefixes: Sequence[bytes]) -> None:
    """Let go of public prefixes. An engine that is away has pinned none, and one that comes later pins the present
    ones."""
    for prefix in prefixes:
        with suppress(ApiError, EngineGone):
            token_ids = expect(await services.prepare_own("prefix", prefix), Prefix).token_ids
            assert token_ids is not None
            await services.engine.control("unpin_prefix", {"namespace": PUBLIC, "token_ids": pack_token_ids(token_ids)})


async def _publish(services: Services, prefix: bytes) -> int:
    """Compute a prefix on every rank and pin it. Return the number of its shared tokens: in whole blocks."""
    facts = services.check_serving()
    token_ids = expect(await services.prepare_own("prefix", prefix), Prefix).token_ids
    assert token_ids is not None
    longest_output(len(token_ids), facts.max_model_len)
    packed = pack_token_ids(token_ids)
    for _ in range(services.run.config.expert_parallel_size):
        # It goes to a rank that lacks the prefix.
        await _compute(services, packed)
    arguments = {"namespace": PUBLIC, "token_ids": packed, "share": 1.0, "pin_share": 1.0}
    pinned = await services.engine.control("pin_prefix", arguments)
    if pinned.error is not None or pinned.result["over_budget"] or pinned.result["missing_tokens"]:
        raise RuntimeError(pinned.error or "there are not enough KV blocks to keep it")
    return int(pinned.result["tokens"])


async def _compute(services: Services, packed: bytes) -> None:
    """Compute a prefix, int32 bytes, on one rank."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    generate = Generate(f"public-{secrets.token_hex(12)}", packed, sampling, PUBLIC, terms=Terms(patient=True))
    async with services.engine.submit([generate]) as group:
        await group.admitted()
        while group.num_open:
            for _, output in await group.next():
                if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                    raise RuntimeError(output.error or "the request was aborted")
