"""The lines of a batch's file, each a request in OpenAI's form, and the lines of its output."""

from __future__ import annotations

import codecs
import io
import re
import sys
from dataclasses import dataclass
from typing import Any

import msgspec

from moeserve.frontend import limits

_PATH = re.compile(r"/v1/[\w/.-]{1,200}")
_SHOWN_CHARS = 80  # of a client's text in a problem


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line as a request. body: as it is in the line. problem: why it is none; `custom_id` is then None."""

    number: int
    custom_id: str | None = None
    path: str = ""
    body: bytes = b""
    problem: str | None = None

    @property
    def result_id(self) -> str:
        return f"batch_req_{self.number}"


class _Switches(msgspec.Struct):
    stream: Any = None
    background: Any = None


def read_line(number: int, line: bytes, max_bytes: int = sys.maxsize) -> BatchLine:
    """Read a line; whether an earlier one has its `custom_id` is left to the caller."""
    try:
        if len(line) > max_bytes:
            raise ValueError(f"it is longer than {max_bytes} bytes")
        if line.count(b",") > limits.MAX_BODY_COMMAS:
            raise ValueError(f"it has more than {limits.MAX_BODY_COMMAS} commas")
        text = line.removeprefix(codecs.BOM_UTF8)
        text.decode("utf-8")
        entry = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        custom_id, method, path = (_decoded(entry, name) for name in ("custom_id", "method", "url"))
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError("`custom_id` must be a text")
        if method != "POST":
            raise ValueError("`method` must be POST")
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise ValueError("`url` must be the path of a route, such as /v1/chat/completions")
        body = bytes(entry.get("body", b""))
        if not body.startswith(b"{"):
            raise ValueError("`body` must be an object")
        switches = msgspec.json.decode(body, type=_Switches)
        if switches.stream:
            raise ValueError("`stream` is for one answer, not for a batch")
        if switches.background and path == "/v1/responses":
            raise ValueError("`background` is for one answer, not for a batch")
    except (UnicodeDecodeError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else "no UTF-8"
        return BatchLine(number, problem=f"line {number} is {fault}")
    except ValueError as error:  # msgspec's errors are ValueErrors
        return BatchLine(number, problem=f"line {number}: {error}")
    return BatchLine(number, custom_id, path, body)


def _decoded(entry: dict[str, msgspec.Raw], name: str) -> object:
    return msgspec.json.decode(entry.get(name, b"null"))


def repeated(number: int, custom_id: str) -> str:
    """Return the problem of a line that has the `custom_id` of an earlier one."""
    return f"line {number}: `custom_id` {custom_id[:_SHOWN_CHARS]!r} is that of an earlier line"


def result_line(line: BatchLine, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    """Return the line of an output file that answers a line."""
    entry = {"id": line.result_id, "custom_id": line.custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"


class BatchPart(msgspec.Struct, frozen=True, array_like=True):
    """A part of a batch's file: whole lines, the first of which has a number, each for the route of one path."""

    number: int
    path: str


class LinePlace(msgspec.Struct, frozen=True, array_like=True):
    """A line of a batch. start, size: of the request's body in the file, or in a part of it, in bytes. problem: why the
    line holds no request. tries: processes that have died while they had it."""

    number: int
    custom_id: str = ""
    start: int = 0
    size: int = 0
    tries: int = 0
    problem: str | None = None


def read_part(content: bytes, part: BatchPart, max_bytes: int) -> list[LinePlace]:
    """Find the requests of a part, in all lines that are not blank. Stop after as many problems as a batch lists."""
    places: list[LinePlace] = []
    start = num_problems = 0
    for number, line in enumerate(io.BytesIO(content), start=part.number):
        if len(line) > max_bytes or not line.isspace():
            found = read_line(number, line, max_bytes)
            problem = found.problem
            if problem is None and found.path != part.path:
                problem = f"line {number}: `url` must be the batch's `endpoint`, {part.path}"
            at, size = start + line.find(found.body), len(found.body)
            places.append(LinePlace(number, found.custom_id or "", at, size, problem=problem))
            num_problems += problem is not None
            if num_problems == limits.MAX_BATCH_ERRORS:
                break
        start += len(line)
    return places
