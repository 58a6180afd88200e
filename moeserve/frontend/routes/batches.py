"""The routes under `/v1/files` and `/v1/batches`."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies
from moeserve.frontend.errors import ApiError, invalid
from moeserve.frontend.http import json_bytes, receive_body
from moeserve.frontend.keys import caller_of
from moeserve.frontend.listing import Listed, list_of, read_page
from moeserve.frontend.store import batches
from moeserve.frontend.store.batches import BATCH_PREFIX, FILE_PREFIX, StoredBatch, StoredFile, TooManyFiles
from moeserve.frontend.store.store import Shelf, Store

_DAY_S = 86_400
_MAX_BODY_BYTES = 64 * 1024
_MAX_PAGE = 10_000
_BOUNDARY = re.compile(rb'multipart/form-data\s*;.*?boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_NAME, _FILE_NAME = (re.compile(rb';\s*%b="((?:[^"\\]|\\.)*)"' % field) for field in (b"name", b"filename"))
_MAX_PARTS = 16
_MAX_PART_HEADER_BYTES = 4096


class BatchBody(msgspec.Struct):
    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None


class FileRoutes:
    """Files by id. Nobody learns whether an id exists that is another caller's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._uploads = asyncio.Semaphore(limits.MAX_UPLOADS)
        # One upload of each key at a time: a key whose uploads stand still holds up nobody else.
        self._turns: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def all(self, request: Request) -> Response:
        """Answer GET with the caller's files, POST by keeping one."""
        caller = caller_of(request.scope)
        if request.method == "POST":
            return json_bytes(_file_json(await self._upload(request, caller)))
        page = read_page(request.query_params, most=_MAX_PAGE)
        purpose = request.query_params.get("purpose")
        found, has_more = await self._store.read(caller, partial(batches.files, page=page, purpose=purpose))
        return list_of(Listed([(one.file_id, _file_json(one)) for one in found], has_more))

    async def one(self, request: Request) -> Response:
        """Answer GET with a file's description, DELETE by dropping it."""
        file_id, caller = _file_id(request), caller_of(request.scope)
        if request.method == "DELETE":
            if not await self._store.write(caller, lambda shelf: shelf.delete(file_id)):
                raise _no_file(file_id)
            return json_bytes(msgspec.json.encode({"id": file_id, "object": "file", "deleted": True}))
        found = await self._store.read(caller, partial(batches.file, file_id=file_id))
        if found is None:
            raise _no_file(file_id)
        return json_bytes(_file_json(found))

    async def content(self, request: Request) -> Response:
        file_id = _file_id(request)
        found = await self._store.read(caller_of(request.scope), partial(batches.content, file_id=file_id))
        if found is None:
            raise _no_file(file_id)
        return Response(found, media_type="application/octet-stream")

    async def _upload(self, request: Request, caller: bytes) -> StoredFile:
        boundary = boundary_of(request.scope)
        async with self._turns[caller], self._uploads:
            body = await receive_body(request.scope, request.receive, limits.MAX_FILE_BYTES)
            form = await asyncio.to_thread(read_form, boundary, body)
        purpose, sent = form.get("purpose"), form.get("file")
        if purpose is None or purpose.content != b"batch":
            raise invalid("`purpose` must be batch: files have no other use here", "purpose")
        if sent is None or sent.file_name is None:
            raise invalid("`file` must be a file", "file")
        name = sent.file_name[: limits.MAX_FILE_NAME_CHARS] or "file"
        try:
            add = partial(batches.add_file, name=name, purpose="batch", content=sent.content)
            return await self._store.write(caller, add)
        except TooManyFiles:
            message = f"This key has {limits.MAX_FILES_PER_KEY} files already: delete some"
            raise ApiError(429, message, type="rate_limit_error", code="too_many_files") from None


class BatchRoutes:
    """Batches by id. Nobody learns whether an id exists that is another caller's."""

    def __init__(self, store: Store, owner: str, paths: Collection[str]) -> None:
        """owner: the name of this process, which works on the batches that are made here. paths: that lines may use."""
        self._store = store
        self._owner = owner
        self._paths = paths

    async def all(self, request: Request) -> Response:
        """Answer GET with the caller's batches, POST by making one."""
        caller = caller_of(request.scope)
        if request.method == "POST":
            return await self._create(request, caller)

        page = read_page(request.query_params)

        def find(shelf: Shelf) -> Listed:
            found, has_more = batches.batches(shelf, page)
            return Listed([(one.batch_id, _batch_json(shelf, one)) for one in found], has_more)

        return list_of(await self._store.read(caller, find))

    async def one(self, request: Request) -> Response:
        return await self._shown(request)

    async def cancel(self, request: Request) -> Response:
        """Have a batch end; the answers that there are stay."""
        move = partial(
            batches.move,
            batch_id=_batch_id(request),
            before=("validating", "in_progress", "finalizing"),
            state="cancelling",
            field="cancelling",
        )
        caller, batch_id = caller_of(request.scope), _batch_id(request)
        await self._store.write(caller, lambda shelf: batches.batch(shelf, batch_id) is not None and move(shelf))
        return await self._shown(request)

    async def _create(self, request: Request, caller: bytes) -> Response:
        body = await receive_body(request.scope, request.receive, _MAX_BODY_BYTES)
        asked, _ = bodies.decode_json(body, BatchBody)
        bodies.check_metadata(asked.metadata)
        if asked.endpoint not in self._paths:
            raise invalid(f"`endpoint` must be one of {', '.join(self._paths)}", "endpoint")
        if asked.completion_window != "24h":
            raise invalid("`completion_window` must be 24h", "completion_window")
        metadata = msgspec.json.encode(asked.metadata)

        def make(shelf: Shelf) -> bytes | None:
            if batches.file(shelf, asked.input_file_id) is None:
                raise _no_file(asked.input_file_id, "input_file_id")
            expires = int(shelf.now) + _DAY_S
            made = batches.add_batch(shelf, self._owner, asked.endpoint, asked.input_file_id, expires, metadata)
            return None if made is None else _batch_json(shelf, made)

        made = await self._store.write(caller, make)
        if made is None:
            most = limits.MAX_OPEN_BATCHES_PER_KEY
            message = f"This key has {most} batches already that have not ended"
            raise ApiError(429, message, type="rate_limit_error", code="too_many_batches", retry_after_s=60.0)
        return json_bytes(made)

    async def _shown(self, request: Request) -> Response:
        batch_id = _batch_id(request)

        def find(shelf: Shelf) -> bytes | None:
            found = batches.batch(shelf, batch_id)
            return None if found is None else _batch_json(shelf, found)

        shown = await self._store.read(caller_of(request.scope), find)
        if shown is None:
            raise ApiError(404, f"There is no batch {batch_id[:80]!r}", param="batch_id", code="batch_not_found")
        return json_bytes(shown)


def _file_json(found: StoredFile) -> bytes:
    described = {
        "id": found.file_id,
        "object": "file",
        "bytes": found.num_bytes,
        "created_at": found.created,
        "filename": found.name,
        "purpose": found.purpose,
        "status": "processed",
    }
    return msgspec.json.encode(described)


def _batch_json(shelf: Shelf, found: StoredBatch) -> bytes:
    completed, failed = batches.counts(shelf, found.batch_id)
    times = msgspec.json.decode(found.times, type=dict[str, int])
    names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
    described: dict[str, Any] = {
        "id": found.batch_id,
        "object": "batch",
        "endpoint": found.path,
        "errors": None if found.errors is None else msgspec.Raw(found.errors),
        "input_file_id": found.input_file,
        "completion_window": "24h",
        "status": found.state,
        "output_file_id": found.output_file,
        "error_file_id": found.error_file,
        "created_at": found.created,
        "expires_at": found.expires,
        **{f"{name}_at": times.get(name) for name in names},
        "request_counts": {"total": found.total, "completed": completed, "failed": failed},
        "metadata": msgspec.Raw(found.metadata),
    }
    return msgspec.json.encode(described)


def _file_id(request: Request) -> str:
    return FILE_PREFIX + str(request.path_params["name"])


def _batch_id(request: Request) -> str:
    return BATCH_PREFIX + str(request.path_params["name"])


def _no_file(file_id: str, param: str = "file_id") -> ApiError:
    message = f"There is no file {file_id[:80]!r}: it was never kept, was deleted, or had to make room"
    return ApiError(404, message, param=param, code="file_not_found")


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a form. file_name: of an uploaded file, else None."""

    content: bytes
    file_name: str | None


def boundary_of(scope: Scope) -> bytes:
    """Return the boundary that the content type names. Raise ApiError (415)."""
    sent = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    found = _BOUNDARY.match(sent)
    if found is None:
        message = "Send a form: `content-type: multipart/form-data` with a boundary"
        raise ApiError(415, message, code="unsupported_media_type")
    return found[1]


def read_form(boundary: bytes, body: bytes) -> dict[str, Part]:
    """Return the fields of a form. Raise ApiError."""
    pieces = (b"\r\n" + body).split(b"\r\n--" + boundary, _MAX_PARTS)
    if len(pieces) < 3 or not pieces[-1].startswith(b"--") or len(pieces) > _MAX_PARTS:
        raise invalid(f"The body is no form that ends in its boundary and has at most {_MAX_PARTS - 2} fields")
    form = {}
    for piece in pieces[1:-1]:
        head, _, content = piece.partition(b"\r\n\r\n")
        if len(head) > _MAX_PART_HEADER_BYTES:
            raise invalid(f"A field of the form has more than {_MAX_PART_HEADER_BYTES} bytes of headers")
        disposition = next(
            (line for line in head.split(b"\r\n") if line.lower().startswith(b"content-disposition:")), b""
        )
        name, file_name = _NAME.search(disposition), _FILE_NAME.search(disposition)
        if name is None:
            raise invalid("A field of the form has no name")
        shown = None if file_name is None else file_name[1].decode("utf-8", "replace")
        form[name[1].decode("utf-8", "replace")] = Part(content, shown)
    return form
