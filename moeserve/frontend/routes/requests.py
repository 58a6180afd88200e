"""`/v1/requests`: the answers that are under way in all HTTP processes, for operators, who may cancel one."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moeserve.frontend.errors import ApiError, conflict
from moeserve.frontend.exchange import ID_PREFIXES
from moeserve.frontend.http import json_response
from moeserve.frontend.keys import cache_account
from moeserve.frontend.services import Services
from moeserve.frontend.usage import UsageBook

_MOST = 500  # choices that are listed
_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "messages": "/v1/messages",
    "responses": "/v1/responses",
    "ollama_chat": "/api",
    "warm": "/v1/cache/warm",
}
_ROUTES = {prefix: _PATHS[kind] for kind, prefix in ID_PREFIXES.items() if kind in _PATHS}


class OpenRequestRoutes:
    """The engine knows them, and the names of their keys are known here."""

    def __init__(self, services: Services, book: UsageBook) -> None:
        self._services = services
        self._book = book

    async def all(self, _: Request) -> Response:
        """Answer with one entry for each answer, the oldest first; its choices are counted together."""
        result = await self._services.command("list_requests", {"limit": _MOST})
        secret = self._services.run.secret
        names = {cache_account(secret, holder): holder.name or None for holder in self._book.holders}
        answers: dict[str, dict[str, Any]] = {}
        for choice in result.result["requests"]:
            answer_id = choice["id"].rpartition("-")[0]
            if answer_id in answers:
                _add(answers[answer_id], choice)
            else:
                answers[answer_id] = _described(answer_id, choice, names.get(choice["tenant"]))
        shown = sorted(answers.values(), key=lambda answer: -answer["age_s"])
        return json_response({"object": "list", "data": shown, "total_choices": result.result["total"]})

    async def cancel(self, request: Request) -> Response:
        """End an answer. Its client gets the error `cancelled_by_operator`."""
        answer_id = request.path_params["name"]
        result = await self._services.command("cancel_request", {"answer_id": answer_id})
        if result.error is not None:
            raise conflict(result.error[:500], "not_possible_now")
        if not result.result["cancelled"]:
            raise ApiError(404, f"No answer {answer_id[:80]!r} is under way", code="request_not_found")
        return json_response({"id": answer_id, "object": "request", "cancelled": True})


def _described(answer_id: str, choice: dict[str, Any], key: str | None) -> dict[str, Any]:
    route = next((path for prefix, path in _ROUTES.items() if answer_id.startswith(prefix)), None)
    return {
        "id": answer_id,
        "object": "request",
        "key": key,
        "route": route,
        "choices": 1,
        "running": choice["running"],
        "prompt_tokens": choice["prompt"],
        "computed_tokens": choice["computed"],
        "cached_tokens": choice["cached"],
        "completion_tokens": choice["generated"],
        "age_s": choice["age_s"],
    }


def _add(answer: dict[str, Any], choice: dict[str, Any]) -> None:
    """Count another choice. Choices share their prompt, which is as far as it is in the foremost one."""
    answer["choices"] += 1
    answer["running"] |= choice["running"]
    answer["computed_tokens"] = max(answer["computed_tokens"], choice["computed"])
    answer["completion_tokens"] += choice["generated"]
