"""Forms (`multipart/form-data`): the fields of a body."""

from __future__ import annotations

import re
from dataclasses import dataclass

from starlette.types import Scope

from moeserve.frontend.errors import ApiError, invalid

_BOUNDARY = re.compile(rb'multipart/form-data\s*;.*?boundary="?([^";,\s]{1,200})"?', re.IGNORECASE)
_NAME, _FILE_NAME = (re.compile(rb';\s*%b="((?:[^"\\]|\\.)*)"' % field) for field in (b"name", b"filename"))
_MAX_PARTS = 16
_MAX_PART_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Part:
    """A field of a form. file_name: of an uploaded file, else None."""

    content: bytes
    file_name: str | None


def boundary_of(scope: Scope) -> bytes:
    """Return the boundary that the content type names. Raises ApiError (415)."""
    sent = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    found = _BOUNDARY.match(sent)
    if found is None:
        message = "Send a form: `content-type: multipart/form-data` with a boundary"
        raise ApiError(415, message, code="unsupported_media_type")
    return found[1]


def read_form(boundary: bytes, body: bytes) -> dict[str, Part]:
    """Return the fields of a form. Raises ApiError."""
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
