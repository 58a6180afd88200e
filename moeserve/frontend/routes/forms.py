"""Forms: `multipart/form-data` (RFC 7578), read as they arrive."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass

from starlette.types import Scope

from moeserve.frontend.errors import ApiError, invalid

_BOUNDARY = re.compile(rb'multipart/form-data\s*;.*?boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_DISPOSITION = re.compile(rb"^content-disposition:.*$", re.IGNORECASE | re.MULTILINE)
_NAME, _FILE_NAME = (re.compile(rb';\s*%b="((?:[^"\\]|\\.)*)"' % field) for field in (b"name", b"filename"))
_MAX_FIELDS = 14
_MAX_HEAD_BYTES = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """A field of a form. file_name: None where it is no file."""

    name: str
    file_name: str | None


def boundary_of(scope: Scope) -> bytes:
    """Return the boundary that the content type names. Raise ApiError (415)."""
    sent = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    found = _BOUNDARY.match(sent)
    if found is None:
        message = "Send a form: `content-type: multipart/form-data` with a boundary"
        raise ApiError(415, message, code="unsupported_media_type")
    return found[1]


async def read_form(boundary: bytes, chunks: AsyncIterator[bytes], size: int) -> AsyncIterator[tuple[Field, bytes]]:
    """Yield the content of each field: at least one piece, of `size` bytes but for the last one.

    Raise ApiError (400) for a body that is no form.
    """
    mark, rest = b"\r\n--" + boundary, bytearray(b"\r\n")
    field, num_fields = None, 0
    async for chunk in chunks:
        rest += chunk
        while (end := rest.find(mark)) >= 0:
            start = end + len(mark)
            is_last, stop = rest.startswith(b"--", start), rest.find(b"\r\n\r\n", start)
            if (len(rest) if stop < 0 else stop) - start > _MAX_HEAD_BYTES and not is_last:
                raise invalid(f"A field of the form has more than {_MAX_HEAD_BYTES} bytes of headers")
            if stop < 0 and not is_last:
                break  # the head of the next field is still to come
            for cut in range(0, max(1, end), size):
                if field is not None:
                    yield field, bytes(rest[cut : min(cut + size, end)])
            if is_last:
                async for _ in chunks:
                    pass
                return
            field, num_fields = _field(bytes(rest[start:stop])), num_fields + 1
            if num_fields > _MAX_FIELDS:
                raise invalid(f"The form has more than {_MAX_FIELDS} fields")
            del rest[: stop + 4]
        else:
            while len(rest) >= size + len(mark):
                if field is not None:
                    yield field, bytes(rest[:size])
                del rest[:size]
    raise invalid("The body is no form that ends in its boundary")


def _field(head: bytes) -> Field:
    disposition = _DISPOSITION.search(head)
    shown = b"" if disposition is None else disposition[0]
    name, file_name = _NAME.search(shown), _FILE_NAME.search(shown)
    if name is None:
        raise invalid("A field of the form has no name")
    decoded = None if file_name is None else file_name[1].decode("utf-8", "replace")
    return Field(name[1].decode("utf-8", "replace"), decoded)
