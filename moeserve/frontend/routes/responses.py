"""The routes under `/v1/responses`: making a response, and those that were kept for their callers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from moeserve.frontend.dialects import responses_answer
from moeserve.frontend.http import ApiError, invalid, unsupported
from moeserve.frontend.peers import MAX_LENT_BYTES, Peers
from moeserve.frontend.response_store import Item, KeptResponse, LentTurn, ResponseStore, Shelf
from moeserve.frontend.routes.generate import Dialect, GenerateRoute
from moeserve.frontend.services import Services

_DEFAULT_PAGE, _MAX_PAGE = 20, 100


class ResponsesRoute:
    """The ASGI endpoint of `POST /v1/responses`: the dialect, tied to the shelf of whoever calls."""

    def __init__(self, services: Services, store: ResponseStore, peers: Peers) -> None:
        self._services = services
        self._store = store
        self._peers = peers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        shelf = _shelf(self._store, scope)

        async def lend(names: Sequence[str]) -> list[LentTurn]:
            await self._peers.borrow(_caller(scope), names)
            return shelf.lend(names, MAX_LENT_BYTES)

        formatter = partial(responses_answer.ResponsesFormatter, keep=shelf.put)
        dialect = Dialect(
            "responses", responses_answer.ID_PREFIX, formatter, lend=lend, cut=responses_answer.error_event
        )
        await GenerateRoute(self._services, dialect)(scope, receive, send)


class KeptResponseRoutes:
    """Responses by id. Nobody learns whether an id exists that is another caller's."""

    def __init__(self, store: ResponseStore, peers: Peers) -> None:
        self._store = store
        self._peers = peers

    async def one(self, request: Request) -> Response:
        """Answer GET with a response, DELETE by dropping it."""
        return await (self._delete(request) if request.method == "DELETE" else self._get(request))

    async def _get(self, request: Request) -> Response:
        if request.query_params.get("stream", "false") != "false":
            raise unsupported("stream")
        return _json((await self._find(request)).response)

    async def _delete(self, request: Request) -> Response:
        kept = await self._find(request)
        await self._peers.drop(_caller(request.scope), kept.response_id)
        return _json(msgspec.json.encode({"id": kept.response_id, "object": "response", "deleted": True}))

    async def input_items(self, request: Request) -> Response:
        """Answer with the input of one request, in pages, the latest item first unless `order` is `asc`."""
        kept = await self._find(request)
        query = request.query_params
        order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_PAGE))
        if order not in ("asc", "desc"):
            raise invalid("`order` must be asc or desc", "order")
        if not limit.isdecimal() or not 1 <= int(limit[:9]) <= _MAX_PAGE:
            raise invalid(f"`limit` must be 1 to {_MAX_PAGE}", "limit")
        items = _listed(kept)
        if order == "desc":
            items.reverse()
        if (after := query.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise invalid(f"`after` is {after[:80]!r}, which is no item of this response", "after")
            items = items[ids.index(after) + 1 :]
        page = items[: int(limit)]
        return _json(
            msgspec.json.encode(
                {
                    "object": "list",
                    "data": page,
                    "first_id": page[0]["id"] if page else None,
                    "last_id": page[-1]["id"] if page else None,
                    "has_more": len(page) < len(items),
                }
            )
        )

    async def _find(self, request: Request) -> KeptResponse:
        response_id = responses_answer.ID_PREFIX + request.path_params["name"]
        await self._peers.borrow(_caller(request.scope), [response_id])
        kept = _shelf(self._store, request.scope).find(response_id)
        if kept is None:
            raise ApiError(
                404,
                f"There is no response {response_id[:80]!r}: it was never stored, was deleted, or had to make room",
                param="response_id",
                code="response_not_found",
            )
        return kept


def _shelf(store: ResponseStore, scope: Scope) -> Shelf:
    return store.shelf(_caller(scope))


def _caller(scope: Scope) -> bytes:
    digest: bytes = scope["state"]["identity"].digest
    return digest


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _listed(kept: KeptResponse) -> list[Item]:
    """Return the input of a response in the form of the list: every item has an id, every content is a list."""
    return [_complete(item, f"{kept.response_id}_in{index}") for index, item in enumerate(kept.input_items())]


def _complete(item: Item, item_id: str) -> dict[str, Any]:
    complete = {**item, "id": item.get("id") or item_id, "status": item.get("status") or "completed"}
    if "role" in item:
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        content = item.get("content")
        complete["type"] = "message"
        complete["content"] = [{"type": kind, "text": content}] if isinstance(content, str) else content
        if kind == "output_text" and isinstance(content, str):
            complete["content"][0]["annotations"] = []
    return complete
