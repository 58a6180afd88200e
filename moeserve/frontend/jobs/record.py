"""The stored form of a job: its request, and the entries of its journal."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moeserve import wire
from moeserve.frontend.http import ApiError
from moeserve.frontend.prepare.messages import Kind, Prepared, expect, pack_reply, unpack_reply
from moeserve.wire import Output

# The output of a choice; None where another engine, or HTTP process, has gone on with the job.
Entry = tuple[int, Output] | None


class JobRecord(msgspec.Struct, frozen=True, array_like=True):
    """A generation that another process can begin, go on with, and show.

    created: UNIX time. reader: of the service that made it (`RunContext.reader`). is_detached: its client fetches the
    answer later. prepared: of `pack_prepared`. session: see `Generate`.
    """

    kind: Kind
    answer_id: str
    created: int
    seed: int
    reader: str
    is_detached: bool
    prepared: bytes
    session: str = ""


def pack_record(record: JobRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def unpack_record(data: bytes) -> JobRecord:
    return msgspec.msgpack.decode(data, type=JobRecord)


def pack_prepared(prepared: Prepared) -> bytes:
    return b"".join(pack_reply(prepared))


def unpack_prepared(data: bytes) -> Prepared:
    return expect(unpack_reply(data), Prepared)


def pack_entries(entries: Sequence[Entry]) -> bytes:
    return wire.pack(list(entries))


def unpack_entries(data: bytes) -> list[Entry]:
    """Return the entries of a row. Raises wire.DecodeError."""
    return wire.unpack(data, list[Entry], wire.MAX_STEP_BYTES)


def pack_failure(error: ApiError) -> bytes:
    return b"".join(pack_reply(error))


def unpack_failure(data: bytes) -> ApiError:
    error = unpack_reply(data)
    assert isinstance(error, ApiError)
    return error
