"""Forms, read as they arrive."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend.errors import ApiError
from moeserve.frontend.routes.forms import Field, boundary_of, read_form

SIZE = 16 * 1024


async def chunks_of(body: bytes, cuts: list[int]) -> AsyncIterator[bytes]:
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    for start, end in pairwise(edges):
        yield body[start:end]


def fields_of(body: bytes, cuts: list[int]) -> list[tuple[str, str | None, bytes]]:
    """Return name, file name and content of each field."""

    async def read() -> list[tuple[str, str | None, bytes]]:
        pieces: dict[Field, list[bytes]] = {}
        async for field, piece in read_form(b"b", chunks_of(body, cuts), SIZE):
            pieces.setdefault(field, []).append(piece)
        for found in pieces.values():
            assert [len(piece) for piece in found[:-1]] == [SIZE] * (len(found) - 1)
            assert len(found[-1]) <= SIZE
        return [(field.name, field.file_name, b"".join(found)) for field, found in pieces.items()]

    return asyncio.run(read())


def field(name: str, content: bytes, file_name: str | None = None) -> bytes:
    shown = "" if file_name is None else f'; filename="{file_name}"'
    head = f'--b\r\nX: y\r\nContent-Disposition: form-data; name="{name}"{shown}\r\n\r\n'
    return head.encode() + content + b"\r\n"


CONTENTS = st.one_of(
    st.sampled_from([b"", b"\r\n", b"\r\n--", b"--b", b"\r\n\r\n--a", b"x" * SIZE, b"x" * 3 * SIZE, b"\r" * SIZE]),
    st.binary(max_size=100).filter(lambda content: b"\r\n--b" not in content),
)


@given(purpose=CONTENTS, file=CONTENTS, cuts=st.lists(st.integers(0, 10**6), max_size=8))
def test_a_form_has_the_same_fields_however_it_arrives(purpose: bytes, file: bytes, cuts: list[int]) -> None:
    body = b"before\r\n" + field("purpose", purpose) + field("file", file, "a") + b"--b--\r\nbehind"
    assert fields_of(body, cuts) == [("purpose", None, purpose), ("file", "a", file)]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"--b\r\nno end",
        b"--b",
        field("a", b"x"),
        b"\r\n--b" * 100_000,
        field("a", b"") * 15 + b"--b--",
        b"--b\r\n" + b"x\r\n" * 100_000 + b"\r\n\r\n--b--\r\n",
        b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--",
    ],
    ids=range(8),
)
def test_a_body_that_is_no_form_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        fields_of(body, [1000, 5000])
    assert refused.value.status == 400


def test_a_content_type_without_a_boundary_is_refused() -> None:
    assert boundary_of({"headers": [(b"content-type", b'multipart/form-data; boundary="x y"')]}) == b"x"
    with pytest.raises(ApiError) as refused:
        boundary_of({"headers": [(b"content-type", b"application/json")]})
    assert refused.value.status == 415
