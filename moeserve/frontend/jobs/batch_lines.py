"""Lines of a batch: requests in OpenAI's form, one JSON object each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

_PATH = re.compile(r"/v1/[\w/.-]{1,200}")


@dataclass(frozen=True, slots=True)
class Job:
    """A request of the input, or why its line is none: then `problem` says so, and `custom_id` is None."""

    number: int
    custom_id: str | None = None
    path: str = ""
    body: bytes = b""
    problem: str | None = None

    @property
    def result_id(self) -> str:
        return f"batch_req_{self.number}"


def read_job(number: int, line: bytes, seen: set[str]) -> Job:
    """Return the job of a line, and add its `custom_id` to those seen."""
    try:
        entry = msgspec.json.decode(line, type=dict[str, Any])
        custom_id, path, body = entry.get("custom_id"), entry.get("url"), entry.get("body")
        if not isinstance(custom_id, str) or not custom_id:
            raise ValueError("`custom_id` must be a text")
        if custom_id in seen:
            raise ValueError(f"`custom_id` {custom_id!r} is that of an earlier line")
        if entry.get("method") != "POST":
            raise ValueError("`method` must be POST")
        if not isinstance(path, str) or not _PATH.fullmatch(path):
            raise ValueError("`url` must be the path of a route, such as /v1/chat/completions")
        if not isinstance(body, dict):
            raise ValueError("`body` must be an object")
        if body.get("stream"):
            raise ValueError("`stream` is for one answer, not for a batch")
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        return Job(number, problem=f"line {number}: {error}")
    seen.add(custom_id)
    return Job(number, custom_id, path, msgspec.json.encode(body))


def result_line(job: Job, response: dict[str, Any] | None, error: dict[str, str] | None) -> bytes:
    """Return the line of an output file for a job."""
    entry = {"id": job.result_id, "custom_id": job.custom_id, "response": response, "error": error}
    return msgspec.json.encode(entry) + b"\n"
