"""The routes under `/v1/conversations`."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend.dialects.responses import Checked, conversation_not_found
from moeserve.frontend.http import ApiError, content_coding, invalid, json_bytes, list_of, page_of, receive_body
from moeserve.frontend.keys import caller_of
from moeserve.frontend.prepare.messages import Body, Kind, expect
from moeserve.frontend.services import Services
from moeserve.frontend.store import conversations
from moeserve.frontend.store.conversations import CONVERSATION_PREFIX, Conversation
from moeserve.frontend.store.store import Store

_TOO_LONG = "The conversation would be too long, has an item of one of these ids already, or there is no room for it"


class _Identified(msgspec.Struct):
    id: str


class ConversationRoutes:
    """Conversations by id. Nobody learns whether an id exists that is another caller's."""

    def __init__(self, services: Services, store: Store) -> None:
        self._services = services
        self._store = store

    async def create(self, request: Request) -> Response:
        """Make a conversation, which may have items and metadata from the start."""
        given = await self._body(request, "conversation")
        make = partial(conversations.create, metadata=bytes(given.metadata), items=given.items)
        made = await self._store.write(caller_of(request.scope), make)
        if made is None:
            raise invalid(_TOO_LONG, "items")
        return _shown(made)

    async def one(self, request: Request) -> Response:
        """Answer GET with a conversation, POST with one that has other metadata, DELETE by dropping it."""
        name, caller = _name(request), caller_of(request.scope)
        if request.method == "DELETE":
            if not await self._store.write(caller, lambda shelf: conversations.delete(shelf, name)):
                raise conversation_not_found(name)
            deleted = {"id": name, "object": "conversation.deleted", "deleted": True}
            return json_bytes(msgspec.json.encode(deleted))
        if request.method == "POST":
            metadata = bytes((await self._body(request, "conversation_metadata")).metadata)
            change = partial(conversations.update, conversation_id=name, metadata=metadata)
            return _shown(await self._store.write(caller, change), name)
        return _shown(await self._store.read(caller, partial(conversations.find, conversation_id=name)), name)

    async def items(self, request: Request) -> Response:
        """Answer GET with the items, in pages, the latest first unless `order` is `asc`; add items on POST."""
        name, caller = _name(request), caller_of(request.scope)
        if request.method == "POST":
            given = await self._body(request, "conversation_items")
            add = partial(conversations.append, conversation_id=name, items=given.items)
            found, added = await self._store.write(caller, lambda shelf: (shelf.has(name), add(shelf)))
            if not found:
                raise conversation_not_found(name)
            if added is None:
                raise invalid(_TOO_LONG, "items")
            return list_of([(msgspec.json.decode(item, type=_Identified).id, item) for item in added])
        listed = await self._store.read(
            caller, lambda shelf: conversations.items(shelf, name) if shelf.has(name) else None
        )
        if listed is None:
            raise conversation_not_found(name)
        return page_of(listed, request.query_params)

    async def item(self, request: Request) -> Response:
        """Answer GET with an item, DELETE by taking it out."""
        name, caller, item_id = _name(request), caller_of(request.scope), str(request.path_params["item"])
        if request.method == "DELETE":
            is_there, conversation = await self._store.write(
                caller,
                lambda shelf: (
                    shelf.has(name) and conversations.delete_item(shelf, name, item_id),
                    conversations.find(shelf, name),
                ),
            )
            if conversation is not None and not is_there:
                raise _no_item(item_id)
            return _shown(conversation, name)
        is_known, found = await self._store.read(
            caller, lambda shelf: (shelf.has(name), conversations.item(shelf, name, item_id))
        )
        if not is_known:
            raise conversation_not_found(name)
        if found is None:
            raise _no_item(item_id)
        return json_bytes(found)

    async def _body(self, request: Request, kind: Kind) -> Checked:
        services, scope = self._services, request.scope
        content_coding(scope["headers"])
        body = await receive_body(scope, request.receive, services.run.config.max_request_bytes)
        reply = expect(await services.prepare(kind, body, scope), Body)
        return msgspec.json.decode(reply.content, type=Checked)


def _name(request: Request) -> str:
    return CONVERSATION_PREFIX + str(request.path_params["name"])


def _shown(conversation: Conversation | None, name: str = "") -> Response:
    """Return a conversation as an answer. Raises ApiError where there is none of that name."""
    if conversation is None:
        raise conversation_not_found(name)
    content = {
        "id": conversation.conversation_id,
        "object": "conversation",
        "created_at": conversation.created,
        "metadata": msgspec.Raw(conversation.metadata),
    }
    return json_bytes(msgspec.json.encode(content))


def _no_item(item_id: str) -> ApiError:
    message = f"The conversation has no item {item_id[:80]!r}"
    return ApiError(404, message, param="item_id", code="item_not_found")
