"""The bodies that formatters write in parts."""

from __future__ import annotations

import json
from typing import Any

from moeserve.frontend.dialects.internal import Writing


def body_of(writing: Writing) -> bytes:
    """Return all that a formatter writes, joined."""
    while True:
        try:
            next(writing)
        except StopIteration as done:
            body: bytes = done.value
            return body


def answer_of(writing: Writing) -> Any:
    """Return the JSON value of the body that a formatter writes."""
    return json.loads(body_of(writing))
