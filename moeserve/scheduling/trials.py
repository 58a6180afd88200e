"""The trial of suspects: of all steps in flight, at most one request may be one that ended an earlier engine."""

from __future__ import annotations

from moeserve.plan import Request


class Trial:
    """Holds the suspect that plans in flight, or the plan that is made, name; the others wait for their turns.

    If the engine dies again, this suspect is the culprit. It is cleared once it has computed as many tokens as it had
    in the engine that died.
    """

    def __init__(self) -> None:
        self._suspect: Request | None = None

    def begin_step(self) -> None:
        """Let another suspect have its turn once the last one is cleared or no plan names it."""
        suspect = self._suspect
        if suspect is not None and not (suspect.suspect_until and suspect.is_in_flight):
            self._suspect = None

    def is_awaited_by(self, request: Request) -> bool:
        """Return whether a request must wait because it is a suspect and plans name another one."""
        return request.suspect_until > 0 and self._suspect not in (None, request)

    def record_planned(self, request: Request) -> None:
        """Record that a plan names a suspect."""
        self._suspect = request

    def record_computed(self, request: Request, num_tokens: int) -> None:
        """Clear a request if it has computed `num_tokens` without harm and needs no more."""
        if num_tokens >= request.suspect_until:
            request.suspect_until = 0
