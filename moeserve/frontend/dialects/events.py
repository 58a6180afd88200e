"""The events of a streamed answer, of which the dialects differ in a few bytes only."""

from __future__ import annotations

from typing import Any

import msgspec

from moeserve.frontend.dialects.internal import Usage

_LEAST_LOGPROB = -9999.0


class EventWriter:
    """Server-sent events with one object each. What is the same in every event of an answer is encoded once."""

    def __init__(self, head: dict[str, Any], *, include_usage: bool) -> None:
        """head: the fields before the choices. include_usage: whether events without usage say so."""
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        self._tail = b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def choice(self, index: int, content: bytes, logprobs: bytes, finish: str | None, usage: Usage | None) -> bytes:
        """One choice's news. content: JSON of a field or of several, `"name":value`; logprobs: JSON."""
        return b'%b,"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b' % (
            self._head,
            index,
            content,
            logprobs,
            b"null" if finish is None else b'"' + finish.encode() + b'"',
            self._tail if usage is None else _usage_tail(usage),
        )

    def usage(self, usage: Usage) -> bytes:
        return self._head + b',"choices":[]' + _usage_tail(usage)


def _usage_tail(usage: Usage) -> bytes:
    return b',"usage":' + msgspec.json.encode(usage.as_dict()) + b"}\n\n"


def finite(logprob: float) -> float:
    """JSON knows no infinity; a token that was masked out has the least number a client can still read."""
    return max(logprob, _LEAST_LOGPROB)
