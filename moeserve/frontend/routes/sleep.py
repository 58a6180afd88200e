"""`POST /sleep`, `POST /wake_up` and `GET /is_sleeping`: weights leave memory, and come back. The names are vLLM's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend.http import ApiError, invalid, json_response, until_disconnect
from moeserve.frontend.relay.request_group import EngineGone
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.wire import Rest

_LEVELS = ("1", "2")
_TAGS = ("weights", "kv_cache")


class SleepRoutes:
    """The sleep of the service. Asleep, it has no engine: neither weights nor KV are in memory."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def sleep(self, request: Request) -> Response:
        """Sleep as soon as no request is open, and answer then. A client that leaves before has asked for nothing."""
        self._check_possible()
        if (level := request.query_params.get("level", "1")) not in _LEVELS:
            raise invalid(f"`level` is 1 or 2, which mean the same here, not {level[:80]!r}", "level")
        if (mode := request.query_params.get("mode", "wait")) != "wait":
            raise invalid(f"`mode` is `wait`: requests are neither aborted nor held, not {mode[:80]!r}", "mode")
        return await self._reach(request, Rest.ASLEEP)

    async def wake_up(self, request: Request) -> Response:
        """Load the model again, and answer once it serves; at once if it does not sleep."""
        if unknown := [tag for tag in request.query_params.getlist("tags") if tag not in _TAGS]:
            raise invalid(f"`tags` are {' and '.join(_TAGS)}, not {unknown[0][:80]!r}", "tags")
        return await self._reach(request, Rest.AWAKE)

    async def is_sleeping(self, _: Request) -> Response:
        """Tell whether the service sleeps, falls asleep or has not woken yet."""
        return json_response({"is_sleeping": self._services.engine.rest is not Rest.AWAKE})

    async def _reach(self, request: Request, rest: Rest) -> Response:
        try:
            await until_disconnect(request.receive, self._services.reach(rest))
        except EngineGone as error:
            raise engine_unavailable(error) from error
        return json_response({"status": "ok", "is_sleeping": rest is Rest.ASLEEP})

    def _check_possible(self) -> None:
        if self._services.run.meets_in_store:
            raise ApiError(
                409,
                "A service of several nodes, or under a user's torchrun, does not sleep: its ranks could not be "
                "started again from here",
                type="conflict",
                code="cannot_sleep",
            )
