"""The routes under `/v1/files`."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from moeserve.frontend import limits
from moeserve.frontend.errors import ApiError, invalid, unavailable
from moeserve.frontend.http import body_chunks, in_pieces, json_bytes
from moeserve.frontend.keys import caller_of
from moeserve.frontend.listing import Listed, list_of, read_page
from moeserve.frontend.routes.forms import Field, boundary_of, read_form
from moeserve.frontend.store import files
from moeserve.frontend.store.files import FILE_PREFIX, PIECE_BYTES, StoredFile
from moeserve.frontend.store.store import STORE_FULL, Store

_MAX_PAGE = 10_000


class FileRoutes:
    """Files by id. Nobody learns whether an id exists that is another caller's."""

    def __init__(self, store: Store) -> None:
        self._store = store
        # One upload of each key at a time: a key whose uploads stand still holds up nobody else.
        self._turns: defaultdict[bytes, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def all(self, request: Request) -> Response:
        """Answer GET with the caller's files, POST by keeping one."""
        caller = caller_of(request.scope)
        if request.method == "POST":
            return json_bytes(_described(await self._upload(request, caller)))
        query = request.query_params
        find = partial(files.listed, page=read_page(query, most=_MAX_PAGE), purpose=query.get("purpose"))
        found, has_more = await self._store.read(caller, find)
        return list_of(request.scope, Listed([(one.file_id, _described(one)) for one in found], has_more))

    async def one(self, request: Request) -> Response:
        """Answer GET with a file's description, DELETE by dropping it."""
        if request.method == "DELETE":
            file_id = _file_id(request)
            if not await self._store.write(caller_of(request.scope), lambda shelf: shelf.delete(file_id)):
                raise no_file(file_id)
            return json_bytes(msgspec.json.encode({"id": file_id, "object": "file", "deleted": True}))
        return json_bytes(_described(await self._find(request)))

    async def content(self, request: Request) -> ASGIApp:
        found, caller = await self._find(request), caller_of(request.scope)

        async def pieces() -> AsyncGenerator[bytes]:
            place = 0
            while True:
                read = await self._store.read(caller, partial(files.next_pieces, file_id=found.file_id, place=place))
                if read is None:
                    raise no_file(found.file_id)
                piece, place = read
                if not piece:
                    return
                yield piece

        return in_pieces(b"application/octet-stream", found.num_bytes, pieces())

    async def _find(self, request: Request) -> StoredFile:
        file_id = _file_id(request)
        found = await self._store.read(caller_of(request.scope), partial(files.find, file_id=file_id))
        if found is None:
            raise no_file(file_id)
        return found

    async def _upload(self, request: Request, caller: bytes) -> StoredFile:
        """Keep a file as it arrives, unless anything of its form is not as it should be."""
        boundary, file_id = boundary_of(request.scope), files.new_id()
        chunks = body_chunks(request.scope, request.receive, limits.MAX_FILE_BYTES)
        async with self._turns[caller]:
            try:
                await self._receive(caller, file_id, read_form(boundary, chunks, PIECE_BYTES))
                found = await self._store.write(caller, partial(files.finish, file_id=file_id))
            except BaseException:
                await self._store.write(caller, lambda shelf: shelf.drop(file_id))
                raise
        if found is None:
            raise _displaced()
        return found

    async def _receive(self, caller: bytes, file_id: str, form: AsyncIterator[tuple[Field, bytes]]) -> None:
        purpose, sent, place = b"", None, 0
        async for field, piece in form:
            if field.name == "purpose":
                purpose = (purpose + piece)[:PIECE_BYTES]
            elif field.name == "file" and field.file_name is not None and sent in (None, field):
                if sent is None:
                    name = field.file_name[: limits.MAX_FILE_NAME_CHARS] or "file"
                    if not await self._store.write(caller, partial(files.begin_upload, file_id=file_id, name=name)):
                        message = f"This key has {limits.MAX_FILES_PER_KEY} files already: delete some"
                        raise ApiError(429, message, type="rate_limit_error", code="too_many_files")
                append = partial(files.append, file_id=file_id, place=place, content=piece)
                if not await self._store.write(caller, append):
                    raise _displaced()
                sent, place = field, place + 1
        if purpose != b"batch":
            raise invalid("`purpose` must be batch: files have no other use here", "purpose")
        if sent is None:
            raise invalid("`file` must be a file", "file")


def no_file(file_id: str, param: str = "file_id") -> ApiError:
    message = f"There is no file {file_id[:80]!r}: it was never kept, was deleted, or had to make room"
    return ApiError(404, message, param=param, code="file_not_found")


def _displaced() -> ApiError:
    return unavailable("This file had to make room in the response store before it was whole", STORE_FULL, 60.0)


def _described(found: StoredFile) -> bytes:
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


def _file_id(request: Request) -> str:
    return FILE_PREFIX + str(request.path_params["name"])
