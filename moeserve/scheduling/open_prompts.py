"""Prompts in an order that makes neighbours of prompts that begin alike, so that a look-up compares a few. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from itertools import islice, takewhile

from moeserve.plan import Request


class OpenPrompts:
    """Tells how much of a new prompt the prompts of open requests begin with.

    Of all prompts of a namespace in lexicographic order, one of the two neighbours of a new prompt shares the longest
    prefix with it.
    """

    def __init__(self) -> None:
        self._prompts: dict[str, list[Request]] = {}

    def add(self, request: Request) -> None:
        insort(self._prompts.setdefault(request.namespace, []), request, key=_key)

    def remove(self, request: Request) -> None:
        """Remove a request that is in the index under its present namespace."""
        prompts = self._prompts[request.namespace]
        index = bisect_left(prompts, _key(request), key=_key)
        assert prompts[index] is request
        del prompts[index]
        if not prompts:
            del self._prompts[request.namespace]

    def neighbours(self, request: Request) -> list[Request]:
        """Return two open requests. One of the two shares the longest prefix with the new request."""
        prompts = self._prompts.get(request.namespace, [])
        index = bisect_left(prompts, request.token_ids, key=_prompt)
        return prompts[max(0, index - 1) : index + 1]


class ScheduledPrompts:
    """The requests whose prompts a step computes, in the order in which they were added."""

    __slots__ = ("_by_namespace", "_places")

    def __init__(self) -> None:
        # By id, the number of requests that were added before.
        self._places: dict[str, int] = {}
        self._by_namespace: dict[str, list[Request]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._places

    def add(self, request: Request) -> None:
        """Add a request, whose tokens stay as they are until the step is committed."""
        self._places[request.request_id] = len(self._places)
        insort(self._by_namespace.setdefault(request.namespace, []), request, key=_tokens)

    def that_begin_with(self, token_ids: array[int], namespace: str) -> list[Request]:
        """Return the requests of a namespace whose tokens begin with these."""
        prompts, count = self._by_namespace.get(namespace, []), len(token_ids)
        start = bisect_left(prompts, token_ids, key=_tokens)
        found = list(takewhile(lambda other: other.token_ids[:count] == token_ids, islice(prompts, start, None)))
        return sorted(found, key=lambda other: self._places[other.request_id])


def _prompt(request: Request) -> array[int]:
    tokens = request.token_ids
    return tokens if len(tokens) == request.num_prompt_tokens else tokens[: request.num_prompt_tokens]


def _key(request: Request) -> tuple[array[int], int]:
    return _prompt(request), request.arrival


def _tokens(request: Request) -> array[int]:
    return request.token_ids
