"""The engine's side of the routes about open requests: list them, cancel one. Both take next to no time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import msgspec

from moeserve.plan import Request
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.scheduler import Scheduler
from moeserve.wire import Control, ControlResult


class ListArguments(msgspec.Struct, forbid_unknown_fields=True):
    """limit: requests that are listed at most."""

    limit: int


class CancelArguments(msgspec.Struct, forbid_unknown_fields=True):
    """answer_id: the requests whose ids are this and a number are its choices."""

    answer_id: str


class RequestCommands:
    """Commands about the requests that the scheduler has."""

    def __init__(self, scheduler: Scheduler, end: Callable[[RequestOutput], None]) -> None:
        """end: tells a request's frontend of its end."""
        self._scheduler = scheduler
        self._end = end

    def __contains__(self, command: str) -> bool:
        return command in ("list_requests", "cancel_request")

    def run(self, control: Control, now: float) -> ControlResult:
        """Return the answer to one of the commands. now: on the clock of arrivals."""
        try:
            if control.command == "list_requests":
                result = self._list(msgspec.convert(control.arguments, ListArguments), now)
            else:
                result = self._cancel(msgspec.convert(control.arguments, CancelArguments))
        except msgspec.ValidationError as error:
            return ControlResult(control.control_id, {}, str(error))
        return ControlResult(control.control_id, result)

    def _list(self, arguments: ListArguments, now: float) -> dict[str, Any]:
        requests = self._scheduler.requests
        shown = [_described(request, now) for request in islice(requests.values(), max(0, arguments.limit))]
        return {"requests": shown, "total": len(requests)}

    def _cancel(self, arguments: CancelArguments) -> dict[str, Any]:
        own = [name for name in self._scheduler.requests if name.rpartition("-")[0] == arguments.answer_id]
        for name in own:
            if (ended := self._scheduler.cancel(name)) is not None:
                self._end(ended)
        return {"cancelled": len(own)}


def _described(request: Request, now: float) -> dict[str, Any]:
    return {
        "id": request.request_id,
        "tenant": request.terms.tenant,
        "prompt": request.num_prompt_tokens,
        "computed": min(request.num_computed_tokens, request.num_prompt_tokens),
        "cached": request.num_cached_tokens,
        "generated": request.num_output_tokens,
        "running": request.lease is not None,
        "age_s": round(max(0.0, now - request.arrived_at), 3),
    }
