"""The requests of one HTTP request, between the engine's client and the handler that writes the answer.

A group outlives the engine: its state tells the next engine where the last one ended.
"""

from __future__ import annotations

import asyncio
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from moeserve.plan import FinishReason, PromptProgress
from moeserve.wire import Admitted, Finish, Generate, Output, Rejected, Turned, pack_token_ids


class EngineGone(Exception):
    """The engine does not answer any more; the message says why."""


class EngineSilent(EngineGone):
    """The engine has not answered in time; it may still live."""


class EngineAsleep(EngineGone):
    """The service sleeps, and commands do not wake it."""


class EngineBusy(EngineGone):
    """The engine takes no further command of this key until it has answered one."""


class CrashSuspect(EngineGone):
    """The engine ended so often while it had this request that the request may be the cause."""


class KeyGone(EngineGone):
    """The key of the request is not valid any more."""


class RequestRejected(Exception):
    """The engine did not admit a request."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.reason)
        self.rejected = rejected


@dataclass(slots=True)
class _Sequence:
    """One request and its results so far: output tokens, and log probabilities of prompt tokens.

    `kept_tokens` is set once the frontend has found a stop string.
    """

    generate: Generate
    output_ids: array[int] = field(default_factory=lambda: array("i"))
    num_prompt_logprobs: int = 0
    kept_tokens: int | None = None

    def record(self, output: Output) -> None:
        self.output_ids.extend(output.token_ids)
        if output.prompt_logprobs is not None:
            self.num_prompt_logprobs += len(output.prompt_logprobs)

    def rest(self) -> Generate:
        """Return the message that makes another life of the engine go on with the request, however long it waited."""
        return msgspec.structs.replace(
            self.generate,
            terms=replace(self.generate.terms, patient=True),
            output_token_ids=self.generate.output_token_ids + pack_token_ids(self.output_ids),
            num_prompt_logprobs=self.num_prompt_logprobs,
            resumes=True,
        )


@dataclass(frozen=True, slots=True)
class Past:
    """The outputs of earlier lives of requests, each with the index of its request, in their order.

    kept_tokens: by the index of a request, where a stop string was found in them.
    """

    outputs: Sequence[tuple[int, Output]] = ()
    kept_tokens: Mapping[int, int] = field(default_factory=dict)


class RequestGroup:
    """The requests of one HTTP request and the queue of their outputs: filled by the client, read by one handler.

    The queue is bounded by the tokens that its requests may produce. `num_deaths` counts the lives of the engine that
    ended while it had the requests.
    """

    def __init__(
        self,
        generates: list[Generate],
        send: Callable[[Finish | Turned], None],
        patience_s: float,
        past: Past | None = None,
    ) -> None:
        """patience_s: how long an engine that runs may take to admit the requests. past: where they go on from."""
        self.num_deaths = 0
        self._patience_s = patience_s
        self._patience: asyncio.Timeout | None = None
        self._send = send
        self._ids = [generate.request_id for generate in generates]
        self._sequences = [_Sequence(generate) for generate in generates]
        self._index = {request_id: index for index, request_id in enumerate(self._ids)}
        self._unanswered = set(self._ids)
        self._open = set(self._ids)
        self._queue: list[tuple[int, Output]] = []
        self._progress: dict[int, PromptProgress] = {}  # the newest of each prompt that has no output yet
        self._failure: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._until = math.inf  # when the handler's patience ends, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None
        self._is_with_engine = False
        self._had_engine = past is not None
        if past is not None:
            self._go_on(past)

    def _go_on(self, past: Past) -> None:
        for index, output in past.outputs:
            self._sequences[index].record(output)
            if output.finish_reason is not None:
                self._open.discard(self._ids[index])
                self._unanswered.discard(self._ids[index])
        for index, num_tokens in past.kept_tokens.items():
            self._sequences[index].kept_tokens = num_tokens
            self._unanswered.discard(self._ids[index])

    @property
    def tenant(self) -> str:
        """The account of the key that the requests are for."""
        return self._sequences[0].generate.terms.tenant

    @property
    def num_open(self) -> int:
        """Requests without a terminal output."""
        return len(self._open)

    def take_to_engine(self) -> list[Generate]:
        """Return the messages for an engine that has none of the requests: the rest of each open request.

        A failed group has none; its handler may not have left it yet.
        """
        if self._failure is not None:
            return []
        is_next_engine, self._had_engine = self._had_engine, True
        self._is_with_engine = True
        self._set_patience()
        messages = []
        for request_id, sequence in zip(self._ids, self._sequences, strict=True):
            if request_id not in self._open:
                continue
            if sequence.kept_tokens is not None:
                # The frontend knows its end: the engine could only have confirmed it.
                self.put(Output(request_id, [], FinishReason.STOP, num_output_tokens=sequence.kept_tokens))
            else:
                messages.append(sequence.rest() if is_next_engine else sequence.generate)
        return messages

    def lose_engine(self) -> None:
        """Record that the engine which had the requests is gone. No effect if no engine had them."""
        if self._is_with_engine:
            self._is_with_engine = False
            self.num_deaths += 1
            self._set_patience()

    def answer(self, message: Admitted | Rejected) -> None:
        if isinstance(message, Rejected):
            self._open.discard(message.request_id)
            if message.code == "engine_crash":
                self.fail(CrashSuspect(message.reason))
            elif message.request_id in self._unanswered:
                self.fail(RequestRejected(message))
            else:
                self.fail(EngineGone(f"the restarted engine cannot go on with it: {message.reason}"))
        self._unanswered.discard(message.request_id)
        self._wake()

    def put(self, output: Output) -> None:
        """Queue an output; a terminal one closes its request."""
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        index = self._index[output.request_id]
        self._sequences[index].record(output)
        self._progress.pop(index, None)
        self._queue.append((index, output))
        self._wake()

    def tell(self, progress: PromptProgress) -> None:
        """Keep how far a prompt is until `take_progress`."""
        if progress.request_id in self._open:
            self._progress[self._index[progress.request_id]] = progress
            self._wake()

    def take_progress(self) -> list[tuple[int, PromptProgress]]:
        """Return how far prompts are, each with the index of its request, where there is news."""
        found, self._progress = sorted(self._progress.items()), {}
        return found

    def fail(self, error: Exception) -> None:
        """End the group with an error, unless it already has one. Queued outputs stay readable."""
        if self._failure is None:
            self._failure = error
            self._wake()

    async def admitted(self) -> None:
        """Wait until the engine has admitted every request. Time without an engine does not count.

        Raise RequestRejected or EngineGone; EngineSilent if the engine takes too long.
        """
        try:
            async with asyncio.timeout(None) as self._patience:
                self._set_patience()
                while self._unanswered and self._failure is None:
                    await self._wait()
        except TimeoutError:
            raise EngineSilent(f"the engine has not taken the request within {self._patience_s:g} s") from None
        finally:
            self._patience = None
        if self._failure is not None:
            raise self._failure

    async def next(self, patience_s: float | None = None) -> list[tuple[int, Output]]:
        """Return all outputs since the last call, each with the index of its request.

        If there are none, wait for one, or for news of a prompt, for `patience_s` at most. Raise EngineGone when none
        will come.
        """
        loop = asyncio.get_running_loop()
        if patience_s is None:
            self._until = math.inf
        else:
            self._until = loop.time() + patience_s
            if self._timer is None:
                self._timer = loop.call_at(self._until, self._remind, loop)
        while not self._queue:
            if self._failure is not None:
                raise self._failure
            if self._progress or loop.time() >= self._until:
                return []
            await self._wait()
        batch, self._queue = self._queue, []
        return batch

    def interrupt(self) -> None:
        """Make a waiting call of `next` return nothing."""
        self._until = -math.inf
        self._wake()

    def finish(self, index: int, keep_tokens: int) -> None:
        """End a request at a stop string; its terminal output follows. No effect on a request that has ended."""
        if self._ids[index] in self._open:
            self._sequences[index].kept_tokens = keep_tokens
            self._send(Finish(self._ids[index], keep_tokens))

    def turn(self, index: int) -> None:
        """Tell the engine that the answer to an ended request calls tools."""
        if self._is_with_engine:
            self._send(Turned(self._ids[index]))

    @property
    def is_with_engine(self) -> bool:
        """True while an engine has the requests."""
        return self._is_with_engine

    def close(self) -> list[Generate]:
        """Return the requests that have not ended and that an engine has, or had when it died. Later outputs are
        dropped."""
        had_engine = self._is_with_engine or self.num_deaths > 0
        left = [one.generate for one in self._sequences if had_engine and one.generate.request_id in self._open]
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
        return left

    def _set_patience(self) -> None:
        """Start the patience of `admitted` when there is an engine; without an engine it is endless."""
        if self._patience is not None:
            now = asyncio.get_running_loop().time()
            self._patience.reschedule(now + self._patience_s if self._is_with_engine else None)

    def _remind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the handler when its patience ends. A timer outlasts many waits, since each new one costs CPU."""
        self._timer = None
        if loop.time() >= self._until:
            self._wake()
        elif self._until < math.inf:
            self._timer = loop.call_at(self._until, self._remind, loop)

    async def _wait(self) -> None:
        """Wait for the next `_wake`. An event in place of the future would take a microsecond more of every token."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
