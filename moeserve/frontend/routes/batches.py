"""The routes under `/v1/batches`."""

from __future__ import annotations

from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.http import json_bytes, receive_body
from moeserve.frontend.jobs.batch_runner import KINDS
from moeserve.frontend.keys import caller_of
from moeserve.frontend.listing import Listed, list_of, read_page
from moeserve.frontend.routes.files import no_file
from moeserve.frontend.store import batches, files
from moeserve.frontend.store.batches import BATCH_PREFIX, StoredBatch
from moeserve.frontend.store.store import Shelf, Store
from moeserve.frontend.usage import UsageBook

_MAX_BODY_BYTES = 64 * 1024


class BatchBody(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class BatchRoutes:
    """Batches by id. Nobody learns whether an id exists that is another caller's."""

    def __init__(self, store: Store, book: UsageBook, owner: str) -> None:
        """owner: the name of this process, which works on the batches that are made here."""
        self._store = store
        self._book = book
        self._owner = owner

    async def all(self, request: Request) -> Response:
        """Answer GET with the caller's batches, POST by making one."""
        caller = caller_of(request.scope)
        if request.method == "POST":
            return await self._create(request, caller)
        find = partial(batches.listed, page=read_page(request.query_params))
        found, has_more = await self._store.read(caller, find)
        return list_of(request.scope, Listed([(one.batch_id, _described(one)) for one in found], has_more))

    async def one(self, request: Request) -> Response:
        return await self._shown(request)

    async def cancel(self, request: Request) -> Response:
        """Have a batch end; the answers that there are stay."""
        batch_id = _batch_id(request)

        def cancel(shelf: Shelf) -> None:
            if batches.find(shelf, batch_id) is not None:
                batches.move(shelf, batch_id, batches.RUNNING, "cancelling")

        await self._store.write(caller_of(request.scope), cancel)
        return await self._shown(request)

    async def _create(self, request: Request, caller: bytes) -> Response:
        body = await receive_body(request.scope, request.receive, _MAX_BODY_BYTES)
        asked, _ = bodies.decode_json(body, BatchBody)
        bodies.check_metadata(asked.metadata)
        if asked.endpoint not in KINDS:
            raise invalid(f"`endpoint` must be one of {', '.join(KINDS)}", "endpoint")
        if asked.completion_window != "24h":
            raise invalid("`completion_window` must be 24h", "completion_window")
        metadata = msgspec.json.encode(asked.metadata)
        await self._book.enter(caller)

        def make(shelf: Shelf) -> StoredBatch | None:
            if files.find(shelf, asked.input_file_id) is None:
                raise no_file(asked.input_file_id, "input_file_id")
            return batches.add_batch(shelf, self._owner, asked.endpoint, asked.input_file_id, metadata)

        made = await self._store.write(caller, make)
        if made is None:
            most = limits.MAX_OPEN_BATCHES_PER_KEY
            message = f"This key has {most} batches already that have not ended"
            raise ApiError(429, message, type="rate_limit_error", code="too_many_batches", retry_after_s=60.0)
        return json_bytes(_described(made))

    async def _shown(self, request: Request) -> Response:
        batch_id = _batch_id(request)
        found = await self._store.read(caller_of(request.scope), partial(batches.find, batch_id=batch_id))
        if found is None:
            raise ApiError(404, f"There is no batch {batch_id[:80]!r}", param="batch_id", code="batch_not_found")
        return json_bytes(_described(found))


def _described(found: StoredBatch) -> bytes:
    times = msgspec.json.decode(found.times, type=dict[str, int])
    names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    has_ended = found.state not in (*batches.RUNNING, "cancelling")
    described: dict[str, Any] = {
        "id": found.batch_id,
        "object": "batch",
        "endpoint": found.path,
        "errors": None if found.errors is None else msgspec.Raw(found.errors),
        "input_file_id": found.input_file,
        "completion_window": "24h",
        "status": found.state,
        "output_file_id": found.output_file if has_ended else None,
        "error_file_id": found.error_file if has_ended else None,
        "created_at": found.created,
        "expires_at": found.created + batches.WINDOW_S,
        **{f"{name}_at": times.get(name) for name in names},
        "request_counts": {"total": found.total, "completed": found.succeeded, "failed": found.failed},
        "metadata": msgspec.Raw(found.metadata),
    }
    return msgspec.json.encode(described)


def _batch_id(request: Request) -> str:
    return BATCH_PREFIX + str(request.path_params["name"])
