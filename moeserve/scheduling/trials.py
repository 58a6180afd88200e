"""The trial of suspects: of all steps in flight, at most one request may be one that ended an earlier engine."""

from __future__ import annotations

from collections.abc import Callable

from moeserve.plan import Chunk, Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.parts import Part


class Trial(Part):
    """Holds back the suspects that wait for their turns while plans in flight, or the plan that is made, name another.

    If the engine dies again, the suspect that plans name is the culprit. It is cleared once it has computed as many
    tokens as it had in the engine that died.
    """

    def __init__(self, until: Callable[[str], int]) -> None:
        """until: returns by request id the number of computed tokens that clears a suspect; 0 without suspicion."""
        self._until_of = until
        self._until: dict[Request, int] = {}
        self._suspect: Request | None = None

    def enter(self, request: Request) -> bool:
        until = self._until_of(request.request_id)
        if until:
            self._until[request] = until
        return until > 0

    def begin_step(self) -> None:
        """Let another suspect have its turn once the last one is cleared or no plan names it."""
        suspect = self._suspect
        if suspect is None or (suspect in self._until and suspect.is_in_flight):
            return
        self._suspect = None
        if suspect.finished:
            self._until.pop(suspect, None)

    def holds(self, request: Request) -> bool:
        """Return whether a request must wait because it is a suspect and plans name another one."""
        return request in self._until and self._suspect not in (None, request)

    def planned(self, request: Request, chunk: Chunk) -> None:
        if request in self._until:
            self._suspect = request

    def computed(self, request: Request, num_tokens: int) -> None:
        """Clear a request if it has computed `num_tokens` without harm and needs no more."""
        if num_tokens >= self._until.get(request, num_tokens + 1):
            del self._until[request]

    def left(self, output: RequestOutput) -> None:
        if output.request is not self._suspect:
            self._until.pop(output.request, None)
