"""Compressed bodies of requests: inflated within the bounds of plain ones, or refused by name."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from moeserve.frontend.http import ApiError, invalid

# By the name of a content coding (RFC 9110, 8.4.1): the windowBits by which zlib expects its header.
_WINDOW_BITS = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}


def content_coding(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the name of the coding of a request's body, None for a plain one. Raises ApiError (415)."""
    named = [value.strip().lower() for name, value in headers if name == b"content-encoding"]
    codings = [coding for value in named for coding in value.split(b",") if coding.strip() not in (b"", b"identity")]
    if not codings:
        return None
    coding = codings[0].strip()
    if len(codings) > 1 or coding not in _WINDOW_BITS:
        shown = b",".join(codings).decode("ascii", "replace")[:40]
        message = f"A body with `content-encoding: {shown}` is not read here: send it as gzip, deflate or plain"
        raise ApiError(415, message, code="unsupported_content_encoding")
    return coding


def inflate(body: bytes, coding: bytes, max_bytes: int) -> bytes:
    """Return a body as it was before its coding. Raises ApiError: 413 above `max_bytes`, 400 if it is damaged, or has
    several members: with thousands of them it would take seconds."""
    stream = zlib.decompressobj(_WINDOW_BITS[coding])
    try:
        inflated = stream.decompress(body, max_bytes + 1)
    except zlib.error:
        inflated = b""
    if len(inflated) > max_bytes:
        text = f"The body is larger than {max_bytes} bytes when it is inflated"
        raise ApiError(413, text, code="request_too_large", close=True)
    if not stream.eof or stream.unused_data:
        raise invalid(f"The body is not one whole {coding.decode()} stream", code="invalid_content_encoding")
    return inflated
