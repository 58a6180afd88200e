"""The prompts of open requests, in an order in which prompts that begin alike are neighbours. Pure."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort

from moeserve.plan import Request


class OpenPrompts:
    """Tells how much of a new prompt the prompts of open requests begin with.

    Of all prompts of a namespace in lexicographic order, one of the two neighbours of a new prompt shares the longest
    prefix with it. So a look-up compares a few prompts however many there are.
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


def _prompt(request: Request) -> array[int]:
    tokens = request.token_ids
    return tokens if len(tokens) == request.num_prompt_tokens else tokens[: request.num_prompt_tokens]


def _key(request: Request) -> tuple[array[int], int]:
    return _prompt(request), request.arrival
