"""The requests that one HTTP request became, and the queue of what the engine says about them."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable

from moeserve.frames import unpack_token_ids
from moeserve.messages import Admitted, Generate, Output, Rejected


class EngineGone(Exception):
    """The engine cannot answer any more; the message says why."""


class RequestRejected(Exception):
    """The engine did not take a request."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.reason)
        self.rejected = rejected


class RequestGroup:
    """Filled by the engine client, read by one HTTP handler.

    The queue is bounded by what its requests may produce. Prompt and output ids are kept so that a request can be
    continued elsewhere.
    """

    def __init__(self, generates: list[Generate], finish: Callable[[str, int], None]) -> None:
        self.prompts = [unpack_token_ids(generate.token_ids) for generate in generates]
        self.output_ids = [array("i") for _ in generates]
        self._finish = finish
        self._ids = [generate.request_id for generate in generates]
        self._index = {request_id: index for index, request_id in enumerate(self._ids)}
        self._unanswered = set(self._ids)
        self._open: set[str] = set()
        self._queue: list[tuple[int, Output]] = []
        self._failure: Exception | None = None
        self._news = asyncio.Event()

    @property
    def num_open(self) -> int:
        """Requests without a terminal output."""
        return len(self._open)

    def mark_sent(self, request_id: str) -> None:
        """From here on the request needs a terminal output, or an abort."""
        self._open.add(request_id)

    def answer(self, message: Admitted | Rejected) -> None:
        """Notes the engine's verdict on a request."""
        self._unanswered.discard(message.request_id)
        if isinstance(message, Rejected):
            self._open.discard(message.request_id)
            self.fail(RequestRejected(message))
        self._news.set()

    def put(self, output: Output) -> None:
        """Queues an output; a terminal one closes its request."""
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        index = self._index[output.request_id]
        self.output_ids[index].extend(output.token_ids)
        self._queue.append((index, output))
        self._news.set()

    def fail(self, error: Exception) -> None:
        """Ends the group with an error, unless it already has one. What is queued stays readable before it."""
        if self._failure is None:
            self._failure = error
            self._news.set()

    async def admitted(self) -> None:
        """Waits until the engine took every request. Raises RequestRejected or EngineGone."""
        while self._unanswered and self._failure is None:
            await self._wait()
        if self._failure is not None:
            raise self._failure

    async def next(self, patience_s: float | None = None) -> list[tuple[int, Output]]:
        """All outputs since the last call, each with the index of its request.

        Waits for one if there are none, and returns none after `patience_s`. Raises EngineGone when none will come.
        """
        try:
            async with asyncio.timeout(patience_s):
                while not self._queue:
                    if self._failure is not None:
                        raise self._failure
                    await self._wait()
        except TimeoutError:
            return []
        batch, self._queue = self._queue, []
        return batch

    def finish(self, index: int, keep_tokens: int) -> None:
        """Ends a request at a stop string; its terminal output follows. No effect on one that has ended."""
        if self._ids[index] in self._open:
            self._finish(self._ids[index], keep_tokens)

    def close(self) -> list[str]:
        """The requests that still need an abort. Whatever comes later is dropped."""
        left = [request_id for request_id in self._ids if request_id in self._open]
        self._open.clear()
        return left

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()
