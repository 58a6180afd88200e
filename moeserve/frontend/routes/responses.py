"""The routes under `/v1/responses`: making responses, and reading the kept ones."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from moeserve.frontend.dialects import responses_answer
from moeserve.frontend.dialects.internal import Formatter
from moeserve.frontend.dialects.responses_answer import KeptResponse, ResponsesFormatter
from moeserve.frontend.dialects.responses_items import RESPONSE_PREFIX, Earlier, Named, listed_item
from moeserve.frontend.http import ApiError, invalid, json_bytes, page_of
from moeserve.frontend.jobs.jobs import Jobs, JobView
from moeserve.frontend.jobs.journal import unpack_record
from moeserve.frontend.keys import caller_of
from moeserve.frontend.routes.generate import Dialect, GenerateRoute, show_events
from moeserve.frontend.services import Services
from moeserve.frontend.store import responses
from moeserve.frontend.store.jobs import StoredJob
from moeserve.frontend.store.store import Store


class ResponsesRoute:
    """The ASGI endpoint of `POST /v1/responses`: the dialect, tied to the caller's shelf."""

    def __init__(self, services: Services, store: Store, jobs: Jobs) -> None:
        self._services = services
        self._store = store
        self._jobs = jobs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        dialect = Dialect(
            "responses",
            RESPONSE_PREFIX,
            lend=partial(self._lend, caller_of(scope)),
            cut=responses_answer.error_event,
            keep=partial(self._keep, caller_of(scope)),
        )
        await GenerateRoute(self._services, dialect, self._jobs)(scope, receive, send)

    async def _lend(self, caller: bytes, named: Named) -> Earlier:
        """Return what there is of the things that a request names, and note their use."""
        used = [name for name in (named.previous_id, named.conversation_id) if name is not None]
        found, is_stale = await self._store.read(
            caller, lambda shelf: (responses.earlier(shelf, named), any(map(shelf.is_stale, used)))
        )
        if is_stale:
            await self._store.write(caller, lambda shelf: shelf.touch(used))
        return found

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
            return json_bytes((await self._find(request)).response)
        if after is not None and not after.isdecimal():
            raise invalid("`starting_after` must be the number of an event", "starting_after")
        return await self._events(request, -1 if after is None else int(after[:9]))

    async def cancel(self, request: Request) -> Response:
        """End a response in the background; answer with it, also where it had ended before."""
        job = await self._background_job(request)
        if job is None:
            await self._find(request)
            raise invalid("Only a response that was made with `background` can be cancelled", "response_id")
        await self._jobs.cancel(job)
        return json_bytes((await self._find(request)).response)

    async def _events(self, request: Request, after: int) -> ASGIApp:
        """Return the events of a response behind that number, as an answer."""
        job = await self._background_job(request)
        if job is None:
            await self._find(request)
            raise invalid("Only a response that was made with `background` can be streamed again", "stream")
        view = JobView(self._services, self._jobs, job)

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await show_events(view, scope, receive, send, cut=responses_answer.error_event, after=after)

        return answer

    async def _background_job(self, request: Request) -> StoredJob | None:
        """Return the job of a response that was made in the background, None for others."""
        job = await self._jobs.find(caller_of(request.scope), _response_id(request))
        return job if job is not None and unpack_record(job.record).is_detached else None

    async def _delete(self, request: Request) -> Response:
        response_id = _response_id(request)
        delete = partial(responses.delete, response_id=response_id)
        if not await self._store.write(caller_of(request.scope), delete):
            raise _not_found(response_id)
        return json_bytes(msgspec.json.encode({"id": response_id, "object": "response", "deleted": True}))

    async def input_items(self, request: Request) -> Response:
        """Answer with the input of one request, in pages, the latest item first unless `order` is `asc`."""
        kept = await self._find(request)
        items = [listed_item(item, f"{kept.response_id}_in{index}") for index, item in enumerate(kept.input_items())]
        return page_of([(item["id"], msgspec.json.encode(item)) for item in items], request.query_params)

    async def _find(self, request: Request) -> KeptResponse:
        """Return the response that the path names, and note its use."""
        response_id, caller = _response_id(request), caller_of(request.scope)
        kept, is_stale = await self._store.read(
            caller, lambda shelf: (responses.find(shelf, response_id), shelf.is_stale(response_id))
        )
        if kept is None:
            job = await self._background_job(request)
            if job is None:
                raise _not_found(response_id)
            return await JobView(self._services, self._jobs, job).response()
        if is_stale:
            await self._store.write(caller, lambda shelf: shelf.touch([response_id]))
        return kept


def _response_id(request: Request) -> str:
    return RESPONSE_PREFIX + str(request.path_params["name"])


def _not_found(response_id: str) -> ApiError:
    return ApiError(
        404,
        f"There is no response {response_id[:80]!r}: it was never stored, was deleted, or had to make room",
        param="response_id",
        code="response_not_found",
    )
