"""The routes under `/v1/responses` and `/v1/conversations`: making responses, and reading and changing kept ones."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.frontend.dialects import responses_answer
from moeserve.frontend.dialects.internal import Formatter
from moeserve.frontend.dialects.responses import Checked, conversation_not_found
from moeserve.frontend.dialects.responses_answer import ResponsesFormatter
from moeserve.frontend.dialects.responses_items import RESPONSE_PREFIX
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.held import hold_of
from moeserve.frontend.http import held_json, in_pieces, json_bytes
from moeserve.frontend.jobs.idempotency import KeyedAnswers
from moeserve.frontend.jobs.jobs import Jobs, JobView
from moeserve.frontend.jobs.recording import PIECE_BYTES
from moeserve.frontend.keys import caller_of
from moeserve.frontend.listing import Listed, list_of, read_page
from moeserve.frontend.prepare.text_messages import Body, Kind, expect
from moeserve.frontend.routes.generate import Dialect, GenerateRoute, give_events
from moeserve.frontend.services import Services
from moeserve.frontend.store import responses
from moeserve.frontend.store.jobs import StoredJob
from moeserve.frontend.store.responses import CONVERSATION_PREFIX, Conversation
from moeserve.frontend.store.store import Store
from moeserve.frontend.usage import UsageBook

_TOO_LONG = "The conversation would be too long, has an item of one of these ids already, or there is no room for it"


class ResponsesRoute:
    """The ASGI endpoint of `POST /v1/responses`: the dialect, tied to the caller's shelf."""

    def __init__(self, services: Services, store: Store, jobs: Jobs, answers: KeyedAnswers, book: UsageBook) -> None:
        self._services = services
        self._store = store
        self._jobs = jobs
        self._answers = answers
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect = Dialect(
            "responses",
            lend=partial(responses.lend, self._store, caller_of(scope)),
            cut=responses_answer.error_event,
            keep=partial(self._keep, caller_of(scope)),
        )
        await GenerateRoute(self._services, dialect, self._jobs, self._answers, self._book)(scope, receive, send)

    async def _keep(self, caller: bytes, formatter: Formatter, end: bytes) -> bytes:
        """Keep a response; return the end of its answer, which says so where there is no room for it."""
        assert isinstance(formatter, ResponsesFormatter)
        kept = formatter.kept
        if kept is None:
            return end
        try:
            is_kept = await self._store.write(caller, partial(responses.put, kept=kept))
        except ApiError:
            is_kept = False
        return end if is_kept else formatter.unkept()


class KeptResponseRoutes:
    """Responses by id. Nobody learns whether an id exists that is another caller's."""

    def __init__(self, services: Services, store: Store, jobs: Jobs) -> None:
        self._services = services
        self._store = store
        self._jobs = jobs

    async def one(self, request: Request) -> ASGIApp:
        """Answer GET with a response, or its events; DELETE by dropping it."""
        if request.method == "DELETE":
            return await self._delete(request)
        after = request.query_params.get("starting_after")
        if request.query_params.get("stream", "false") == "false":
            if after is not None:
                raise invalid("`starting_after` goes with `stream=true`", "starting_after")
            return await self._show(request)
        if after is not None and not after.isdecimal():
            raise invalid("`starting_after` must be the number of an event", "starting_after")
        return await self._events(request, -1 if after is None else int(after[:9]))

    async def cancel(self, request: Request) -> ASGIApp:
        """End a response in the background; answer with it, also where it had ended before."""
        job = await self._background_job(request)
        if job is None:
            await self._check_kept(request)
            raise invalid("Only a response that was made with `background` can be cancelled", "response_id")
        await self._jobs.cancel(job)
        return await self._show(request)

    async def _events(self, request: Request, after: int) -> ASGIApp:
        """Return the events of a response behind that number, as an answer."""
        job = await self._background_job(request)
        if job is None:
            await self._check_kept(request)
            raise invalid("Only a response that was made with `background` can be streamed again", "stream")
        view = JobView(self._services, self._jobs, job, hold_of(request.scope))

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await give_events(view, scope, receive, send, after)

        return answer

    async def _background_job(self, request: Request) -> StoredJob | None:
        """Return the job of a response that was made in the background, None for others."""
        return await self._jobs.find(caller_of(request.scope), _response_id(request))

    async def _delete(self, request: Request) -> Response:
        response_id = _response_id(request)
        if not await self._store.write(caller_of(request.scope), lambda shelf: shelf.delete(response_id)):
            raise _not_found(response_id)
        return json_bytes(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))

    async def input_items(self, request: Request) -> Response:
        """Answer with the input of one request, in pages, the latest item first unless `order` is `asc`."""
        page, response_id = read_page(request.query_params), _response_id(request)
        find = partial(responses.input_page, response_id=response_id, page=page)
        listed = await self._store.read(caller_of(request.scope), find)
        if listed is None:
            raise _not_found(response_id)
        return list_of(request.scope, listed)

    async def _show(self, request: Request) -> ASGIApp:
        """Answer with the response that the path names: a kept one piece by piece, a running one as it stands now."""
        response_id, caller = _response_id(request), caller_of(request.scope)
        size, is_stale = await self._store.read(
            caller, lambda shelf: (responses.shown_size(shelf, response_id), shelf.is_stale(response_id))
        )
        if size is None:
            job = await self._background_job(request)
            if job is None:
                raise _not_found(response_id)
            view = JobView(self._services, self._jobs, job, hold_of(request.scope))
            return held_json(request.scope, (await view.response()).response)
        if is_stale:
            await self._store.write(caller, lambda shelf: shelf.touch([response_id]))

        async def pieces() -> AsyncGenerator[bytes]:
            start = 0
            while start < size:
                read = partial(responses.shown_part, response_id=response_id, start=start, size=PIECE_BYTES)
                piece = await self._store.read(caller, read)
                if not piece:
                    raise _not_found(response_id)
                start += len(piece)
                yield piece

        return in_pieces(b"application/json", size, pieces())

    async def _check_kept(self, request: Request) -> None:
        """Raise ApiError (404) where the caller keeps no response that the path names."""
        response_id = _response_id(request)
        if not await self._store.read(caller_of(request.scope), lambda shelf: shelf.has(response_id)):
            raise _not_found(response_id)


def _response_id(request: Request) -> str:
    return RESPONSE_PREFIX + str(request.path_params["name"])


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response {response_id[:80]!r}: it was never stored, was deleted, or had to make room",
        param="response_id",
        code="response_not_found",
    )


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
        make = partial(responses.create_conversation, metadata=bytes(given.metadata), items=given.items)
        made = await self._store.write(caller_of(request.scope), make)
        if made is None:
            raise invalid(_TOO_LONG, "items")
        return _shown(made)

    async def one(self, request: Request) -> Response:
        """Answer GET with a conversation, POST with one that has other metadata, DELETE by dropping it."""
        name, caller = _name(request), caller_of(request.scope)
        if request.method == "DELETE":
            if not await self._store.write(caller, lambda shelf: shelf.delete(name)):
                raise conversation_not_found(name)
            deleted = {"id": name, "object": "conversation.deleted", "deleted": True}
            return json_bytes(msgspec.json.encode(deleted))
        if request.method == "POST":
            metadata = bytes((await self._body(request, "conversation_metadata")).metadata)
            change = partial(responses.update_conversation, conversation_id=name, metadata=metadata)
            return _shown(await self._store.write(caller, change), name)
        return _shown(await self._store.read(caller, partial(responses.find_conversation, conversation_id=name)), name)

    async def items(self, request: Request) -> Response:
        """Answer GET with the items, in pages, the latest first unless `order` is `asc`; add items on POST."""
        name, caller = _name(request), caller_of(request.scope)
        if request.method == "POST":
            given = await self._body(request, "conversation_items")
            add = partial(responses.append_items, conversation_id=name, items=given.items)
            found, added = await self._store.write(caller, lambda shelf: (shelf.has(name), add(shelf)))
            if not found:
                raise conversation_not_found(name)
            if added is None:
                raise invalid(_TOO_LONG, "items")
            return list_of(
                request.scope, Listed([(msgspec.json.decode(item, type=_Identified).id, item) for item in added])
            )
        page = read_page(request.query_params)
        listed = await self._store.read(caller, partial(responses.items_page, conversation_id=name, page=page))
        if listed is None:
            raise conversation_not_found(name)
        return list_of(request.scope, listed)

    async def item(self, request: Request) -> Response:
        """Answer GET with an item, DELETE by taking it out."""
        name, caller, item_id = _name(request), caller_of(request.scope), str(request.path_params["item"])
        if request.method == "DELETE":
            is_there, conversation = await self._store.write(
                caller,
                lambda shelf: (
                    shelf.has(name) and responses.delete_item(shelf, name, item_id),
                    responses.find_conversation(shelf, name),
                ),
            )
            if conversation is not None and not is_there:
                raise _no_item(item_id)
            return _shown(conversation, name)
        is_known, found = await self._store.read(
            caller, lambda shelf: (shelf.has(name), responses.item(shelf, name, item_id))
        )
        if not is_known:
            raise conversation_not_found(name)
        if found is None:
            raise _no_item(item_id)
        return held_json(request.scope, found)

    async def _body(self, request: Request, kind: Kind) -> Checked:
        services, scope = self._services, request.scope
        reply = expect(await services.receive(kind, scope, request.receive), Body)
        return msgspec.json.decode(reply.content, type=Checked)


def _name(request: Request) -> str:
    return CONVERSATION_PREFIX + str(request.path_params["name"])


def _shown(conversation: Conversation | None, name: str = "") -> Response:
    """Return a conversation as an answer. Raise ApiError where there is none of that name."""
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
