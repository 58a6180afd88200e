"""Requests that are computed only if enough of their prompts is cached, as routers ask of a service that has none."""

from __future__ import annotations

from collections.abc import Iterator

from moeserve.plan import FinishReason, Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part, Prefixes


class ColdRequests(Part):
    """Ends such requests when they are first looked at with too little cached; the others go on like any request.

    While files of their prefixes are sought or blocks are fetched they stay undecided.
    """

    def __init__(self) -> None:
        self._undecided: dict[str, Request] = {}

    def enter(self, request: Request) -> bool:
        # A request that has begun in an earlier life of the engine goes on.
        if request.asked.least_cached > 0 and not request.num_output_tokens:
            self._undecided[request.request_id] = request
        return False

    def declined(self, prefixes: Prefixes) -> Iterator[RequestOutput]:
        for request in list(self._undecided.values()):
            if prefixes.is_looked_for(request):
                continue
            if self._is_cold(request, prefixes):
                prefixes.count_found(request)
                yield RequestOutput(request, finish_reason=FinishReason.CACHE_THRESHOLD)
            del self._undecided[request.request_id]

    def sought_first(self) -> list[Request]:
        return list(self._undecided.values())

    def is_worth_reading(self, request: Request, prefixes: Prefixes) -> bool:
        return request.request_id not in self._undecided or not self._is_cold(request, prefixes)

    def left(self, output: RequestOutput) -> None:
        self._undecided.pop(output.request.request_id, None)

    def _is_cold(self, request: Request, prefixes: Prefixes) -> bool:
        return prefixes.num_found(request) < request.asked.least_cached * request.num_prompt_tokens
