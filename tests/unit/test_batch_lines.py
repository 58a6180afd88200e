"""Lines of a batch's file: read as requests within bounds, and told why they are none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.frontend import limits
from moeserve.frontend.dialects.batch_lines import BatchPart, read_line, read_part

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
PART = BatchPart(1, CHAT)


def line(name: str, body: str = "{}", path: str = CHAT) -> bytes:
    return f'{{"custom_id": {json.dumps(name)}, "method": "POST", "url": "{path}", "body": {body}}}'.encode()


def problems(content: bytes, max_bytes: int = 2**22, **part: Any) -> list[str | None]:
    return [place.problem for place in read_part(content, BatchPart(**{"number": 1, "path": CHAT, **part}), max_bytes)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"\xef\xbb\xbf" + line("a"), None),
        (b'{"custom_id": "caf\xe9"}', "line 7 is no UTF-8"),
        (b'{"body": ' + b"[" * 5000 + b"]" * 5000 + b"}", "line 7 is nested too deeply"),
        (b'{"custom_id": 1}', "line 7: `custom_id` must be a text"),
        (line("a", '{"background": true}'), None),
        (
            line("a", '{"background": true}', RESPONSES),
            "line 7: `background` is for one answer, not for a batch",
        ),
        (line("a", '{"stream": true}'), "line 7: `stream` is for one answer, not for a batch"),
        (line("a", "[" + "{}," * limits.MAX_BODY_COMMAS + "{}]"), "line 7: it has more than 524288 commas"),
        (line("a", "[]"), "line 7: `body` must be an object"),
    ],
    ids=range(9),
)
def test_a_line_that_is_no_request_is_told_why(line: bytes, problem: str | None) -> None:
    assert read_line(7, line).problem == problem


BODIES = st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=20), st.integers(), st.none()), max_size=4)


@given(bodies=st.lists(BODIES, max_size=6), ending=st.sampled_from(["\n", "\r\n", "\n\n  \n", "\n\t\r\n"]))
def test_the_body_of_each_request_is_where_its_place_says(bodies: list[dict[str, Any]], ending: str) -> None:
    lines = [line(f"{number}", json.dumps(body)) for number, body in enumerate(bodies) if "stream" not in body]
    content = ending.encode().join(lines)
    places = read_part(content, BatchPart(5, CHAT), 2**20)
    found = [json.loads(content[place.start : place.start + place.size]) for place in places]
    assert found == [body for body in bodies if "stream" not in body]
    assert [place.custom_id for place in places] == [str(number) for number in range(len(places))]
    apart = ending.count("\n")
    assert [place.number for place in places] == [5 + apart * number for number in range(len(places))]


def test_a_body_keeps_the_clients_bytes() -> None:
    body = '{"seed": 123456789012345678901234567890, "top_p": 1.0e0, "a":"\\u00e9"}'
    content = line("a", body)
    (place,) = read_part(content, PART, 2**20)
    assert content[place.start : place.start + place.size] == body.encode()


def test_reading_stops_at_as_many_problems_as_a_batch_lists() -> None:
    found = problems(line("a") + b"\n" + b"0\n" * 100_000)
    assert len(found) == limits.MAX_BATCH_ERRORS + 1
    assert found[:2] == [None, "line 2: Expected `object`, got `int`"]


def test_a_line_longer_than_a_request_may_be_is_not_read() -> None:
    assert problems(b"[" * 101 + b"\n" + line("a") + b"\n", 100) == ["line 1: it is longer than 100 bytes", None]
    assert problems(b" " * 101, 100) == ["line 1: it is longer than 100 bytes"]
    assert problems(b" " * 100, 100) == []


def test_all_lines_of_a_batch_have_one_path() -> None:
    assert problems(line("a") + b"\n" + line("b", path=RESPONSES), number=3) == [
        None,
        "line 4: `url` must be the batch's `endpoint`, /v1/chat/completions",
    ]
