"""A model for scripts: `from moeserve import LLM`.

It is a service of its own on a free port of this machine, with everything that `moeserve serve` and its API can do:
several GPUs, expert memory, tools, schemas, and one prefix cache for all that is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from launcher.own_service import ask_patiently, own_service
from launcher.settings_options import serve_arguments
from moeserve.bench.client import Endpoint, error_message

_MODEL_NAME = "offline"
_TIMEOUT_S = 24 * 3600.0  # seconds that one answer may take

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]


class RequestRefused(Exception):
    """A request was refused or has failed. `number`: of its prompt, from 0. `status`: of HTTP."""

    def __init__(self, message: str, number: int, status: int) -> None:
        super().__init__(message)
        self.number = number
        self.status = status


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt. `text` is that of the first choice; `body` is all that the API answers."""

    text: str
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int
    body: dict[str, Any]


class LLM:
    """A model and its prefix cache, which end with `close`, the `with` statement or this process."""

    def __init__(self, model: str | Path | None = None, *, concurrency: int = 32, **settings: Any) -> None:
        """Load the model; the demo unless given.

        concurrency: requests under way at once. settings: flags of `moeserve serve`, such as `expert_memory="4GiB"` for
        `--expert-memory 4GiB`; a list repeats a flag. Raise ServiceNotStarted with the reason.
        """
        if "served_model_name" in settings or "port" in settings:
            raise TypeError("LLM chooses the port and the name of the model itself")
        self._concurrency = concurrency
        self._stack = ExitStack()
        words = [] if model is None else [str(model)]
        words += serve_arguments(settings | {"served_model_name": _MODEL_NAME})
        self._endpoint = Endpoint.parse(self._stack.enter_context(own_service(words)))

    def generate(self, prompts: Prompt | Sequence[Prompt], **fields: Any) -> list[Answer]:
        """Continue prompts, texts or token ids, and return the answers in their order.

        fields: of `/v1/completions`, such as `max_tokens` and `temperature`. Raise RequestRefused for the first one.
        """
        one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        bodies = [{**fields, "prompt": prompt} for prompt in ([prompts] if one else prompts)]
        return self._ask("/v1/completions", bodies)

    def chat(self, conversations: Conversation | Sequence[Conversation], **fields: Any) -> list[Answer]:
        """Answer conversations, lists of messages, and return the answers in their order.

        fields: of `/v1/chat/completions`, such as `tools` and `response_format`. Raise RequestRefused as `generate`.
        """
        one = bool(conversations) and isinstance(conversations[0], Mapping)
        bodies = [{**fields, "messages": messages} for messages in ([conversations] if one else conversations)]
        return self._ask("/v1/chat/completions", bodies)

    def close(self) -> None:
        """End the model's processes."""
        self._stack.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, path: str, bodies: list[dict[str, Any]]) -> list[Answer]:
        # A thread of its own: the caller may run an event loop, as notebooks do.
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(asyncio.run, self._ask_all(path, bodies)).result()

    async def _ask_all(self, path: str, bodies: list[dict[str, Any]]) -> list[Answer]:
        places = asyncio.Semaphore(self._concurrency)

        async def ask(number: int, body: dict[str, Any]) -> Answer:
            async with places:
                return await self._ask_one(path, number, body)

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(ask(number, body)) for number, body in enumerate(bodies)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _ask_one(self, path: str, number: int, body: dict[str, Any]) -> Answer:
        if body.get("stream"):
            raise RequestRefused("`stream` is for a service: an answer comes whole here", number, 400)
        encoded = msgspec.json.encode({"model": _MODEL_NAME, **body})
        response = await ask_patiently(self._endpoint, path, encoded, None, _TIMEOUT_S)
        if response.status != 200:
            raise RequestRefused(error_message(response.body), number, response.status)
        return _answer(msgspec.json.decode(response.body))


def _answer(body: dict[str, Any]) -> Answer:
    choice, usage = body["choices"][0], body["usage"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return Answer(
        text=text or "",
        finish_reason=choice["finish_reason"],
        num_prompt_tokens=usage["prompt_tokens"],
        num_cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        num_tokens=usage["completion_tokens"],
        body=body,
    )
