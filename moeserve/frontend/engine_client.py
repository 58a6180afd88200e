"""The frontend's end of the engine's socket: requests out, outputs in, and the detection of the engine's death.

One task reads the socket and is never cancelled while the client lives; it passes every output to the group of its
request. Nothing here blocks the event loop: a message that the socket does not accept at once fails its request.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
from array import array
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, cast

import structlog
import zmq
import zmq.asyncio

from moeserve import wire
from moeserve.wire import (
    Abort,
    Admitted,
    Control,
    ControlResult,
    EngineReady,
    Finish,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Output,
    Outputs,
    Refused,
    Rejected,
    RunContext,
    Stats,
    unpack_token_ids,
)

log = structlog.get_logger(__name__)

_MAX_QUEUED_FRAMES = 100_000
_HELLO_INTERVAL_S = 0.05


class EngineGone(Exception):
    """The engine does not answer any more; the message says why."""


class EngineSilent(EngineGone):
    """The engine has not answered in time; it may still live."""


class RequestRejected(Exception):
    """The engine did not admit a request."""

    def __init__(self, rejected: Rejected) -> None:
        super().__init__(rejected.reason)
        self.rejected = rejected


class EngineClient:
    """`ready` is None until the engine has loaded its model; `dead_reason` is None while it lives."""

    def __init__(self, context: RunContext, on_stats: Callable[[Stats], None] | None = None) -> None:
        self.ready: EngineReady | None = None
        self.dead_reason: str | None = None
        self.num_bad_frames = 0
        self._run = context
        self._on_stats = on_stats
        self._groups: dict[str, RequestGroup] = {}
        self._controls: dict[int, asyncio.Future[ControlResult]] = {}
        self._next_control = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._pidfd: int | None = None

    async def start(self) -> None:
        """Connect and begin to introduce the frontend; return at once."""
        run = self._run
        self._zmq = zmq.asyncio.Context()
        self._socket = self._zmq.socket(zmq.DEALER)
        identity = f"frontend.{run.incarnation}.{os.getpid()}.{secrets.token_hex(4)}"
        self._socket.setsockopt(zmq.ROUTING_ID, identity.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._beats = self._zmq.socket(zmq.SUB)
        self._beats.setsockopt(zmq.SUBSCRIBE, b"")
        for socket, address in ((self._socket, run.engine_address), (self._beats, run.heartbeat_address)):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_FRAMES)
            socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_FRAMES)
            socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
            socket.connect(address)
        self._spawn(self._read())
        self._spawn(self._introduce())

    async def stop(self) -> None:
        """End the tasks and close the sockets."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._close_pidfd()
        self._socket.close(linger=0)
        self._beats.close(linger=0)
        self._zmq.term()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._groups)

    @asynccontextmanager
    async def submit(self, generates: list[Generate]) -> AsyncIterator[RequestGroup]:
        """Send the requests. Leaving the block aborts, once each, requests that have not ended. Raises EngineGone."""
        group = RequestGroup(generates, self._finish, self._run.config.engine_timeout)
        try:
            for generate in generates:
                self._groups[generate.request_id] = group
                self._send(generate)
                group.mark_sent(generate.request_id)
            yield group
        finally:
            for generate in generates:
                self._groups.pop(generate.request_id, None)
            for request_id in group.close():
                if self.dead_reason is None:
                    self._try_send(Abort(request_id))

    async def control(self, command: str, arguments: dict[str, Any] | None = None) -> ControlResult:
        """Send an operator's command and return the engine's answer.

        Raises EngineGone; EngineSilent if no answer came in time, and then the command may still be carried out.
        """
        timeout_s = self._run.config.engine_timeout
        self._next_control += 1
        control_id = self._next_control
        future: asyncio.Future[ControlResult] = asyncio.get_running_loop().create_future()
        self._controls[control_id] = future
        try:
            self._send(Control(control_id, command, arguments or {}))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise EngineSilent(f"the engine has not answered the command within {timeout_s:g} s") from None
        finally:
            self._controls.pop(control_id, None)

    def fail_all(self, reason: str) -> None:
        """End every open request and command with EngineGone; `submit` then aborts the requests in the engine."""
        for group in set(self._groups.values()):
            group.fail(EngineGone(reason))
        for future in self._controls.values():
            if not future.done():
                future.set_exception(EngineGone(reason))

    def _spawn(self, job: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(job)
        task.add_done_callback(self._on_task_end)
        self._tasks.append(task)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """End all requests if a reader failed: they would wait for ever."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("engine_client_failed", exc_info=error)
            self._die("the frontend lost its connection to the engine")

    def _finish(self, request_id: str, keep_tokens: int) -> None:
        self._send(Finish(request_id, keep_tokens))

    def _send(self, message: Message) -> None:
        if self.dead_reason is not None:
            raise EngineGone(self.dead_reason)
        if not self._try_send(message):
            raise EngineGone("the engine does not take messages")

    def _try_send(self, message: Message) -> bool:
        """Return at once whether the socket accepted the message."""
        error = self._send_now(wire.encode(message, self._run.incarnation))
        if error is not None:
            log.warning("engine_send_failed", message=type(message).__name__, error=str(error))
        return error is None

    def _send_now(self, frame: bytes) -> BaseException | None:
        """Return the error if the socket did not accept the frame. With DONTWAIT pyzmq's future is done on return."""
        sent = cast("asyncio.Future[Any]", self._socket.send(frame, flags=zmq.DONTWAIT))
        return sent.exception()

    async def _introduce(self) -> None:
        """Send Hello as soon as the engine's socket is there."""
        hello = wire.encode(Hello(wire.PROTOCOL_VERSION, self._run.model_hash), self._run.incarnation)
        while self._send_now(hello) is not None:
            await asyncio.sleep(_HELLO_INTERVAL_S)

    async def _read(self) -> None:
        while True:
            frame = await self._socket.recv()
            try:
                incarnation, message = wire.decode(frame, wire.FromEngine)
            except wire.DecodeError as error:
                # It may hold tokens of any request; going on would leave a hole in some request's text.
                self.num_bad_frames += 1
                log.error("engine_frame_unreadable", error=str(error)[:200])
                self.fail_all("a message of the engine could not be read")
                continue
            if incarnation == self._run.incarnation:
                self._dispatch(message)

    def _dispatch(self, message: Message) -> None:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    if group := self._groups.get(output.request_id):
                        group.put(output)
            case Admitted(request_id=request_id) | Rejected(request_id=request_id):
                if group := self._groups.get(request_id):
                    group.answer(message)
            case Stats():
                if self._on_stats is not None:
                    self._on_stats(message)
            case ControlResult():
                future = self._controls.get(message.control_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case EngineReady():
                self._on_ready(message)
            case Refused(reason=reason):
                self._die(f"the engine refused this frontend: {reason}")

    def _on_ready(self, ready: EngineReady) -> None:
        if self.ready is not None:
            return
        self.ready = ready
        log.info("engine_ready", pid=ready.pid, device=ready.device, max_model_len=ready.max_model_len)
        try:
            self._pidfd = os.pidfd_open(ready.pid)
        except ProcessLookupError:
            self._die("the engine process ended")
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_exit)
        loop = asyncio.get_running_loop()
        watch = ProgressWatch(self._run.config.engine_timeout, loop.time())
        self._spawn(self._read_beats(watch))
        self._spawn(self._judge(watch))

    def _on_exit(self) -> None:
        self._die("the engine process ended")

    async def _read_beats(self, watch: ProgressWatch) -> None:
        loop = asyncio.get_running_loop()
        while True:
            frame = await self._beats.recv()
            try:
                incarnation, beat = wire.decode(frame, Heartbeat)
            except wire.DecodeError:
                self.num_bad_frames += 1
                continue
            if incarnation == self._run.incarnation:
                watch.observe(beat, loop.time())

    async def _judge(self, watch: ProgressWatch) -> None:
        loop = asyncio.get_running_loop()
        while self.dead_reason is None:
            await asyncio.sleep(min(1.0, self._run.config.engine_timeout / 8))
            if verdict := watch.verdict(loop.time()):
                self._die(f"the engine hangs: {verdict}")

    def _die(self, reason: str) -> None:
        self._close_pidfd()
        if self.dead_reason is None:
            log.error("engine_lost", reason=reason)
            self.dead_reason = reason
            self.fail_all(reason)

    def _close_pidfd(self) -> None:
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None


class RequestGroup:
    """The requests of one HTTP request and the queue of their outputs: filled by the client, read by one handler.

    The queue is bounded by what its requests may produce. Prompt and output ids are kept so that a request can be
    continued elsewhere.
    """

    def __init__(self, generates: list[Generate], finish: Callable[[str, int], None], patience_s: float) -> None:
        """patience_s: how long the engine may take to admit the requests."""
        self._patience_s = patience_s
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
        self._until = math.inf  # when the handler's patience ends, on the loop's clock
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_open(self) -> int:
        """Requests without a terminal output."""
        return len(self._open)

    def mark_sent(self, request_id: str) -> None:
        """Note that the request needs a terminal output, or an abort, from now on."""
        self._open.add(request_id)

    def answer(self, message: Admitted | Rejected) -> None:
        """Note whether the engine admitted a request."""
        self._unanswered.discard(message.request_id)
        if isinstance(message, Rejected):
            self._open.discard(message.request_id)
            self.fail(RequestRejected(message))
        self._news.set()

    def put(self, output: Output) -> None:
        """Queue an output; a terminal one closes its request."""
        if output.request_id not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(output.request_id)
        index = self._index[output.request_id]
        self.output_ids[index].extend(output.token_ids)
        self._queue.append((index, output))
        self._news.set()

    def fail(self, error: Exception) -> None:
        """End the group with an error, unless it already has one. Queued outputs stay readable."""
        if self._failure is None:
            self._failure = error
            self._news.set()

    async def admitted(self) -> None:
        """Wait until the engine has admitted every request.

        Raises RequestRejected or EngineGone; EngineSilent if the engine takes too long.
        """
        try:
            async with asyncio.timeout(self._patience_s):
                while self._unanswered and self._failure is None:
                    await self._wait()
        except TimeoutError:
            raise EngineSilent(f"the engine has not taken the request within {self._patience_s:g} s") from None
        if self._failure is not None:
            raise self._failure

    async def next(self, patience_s: float | None = None) -> list[tuple[int, Output]]:
        """Return all outputs since the last call, each with the index of its request.

        If there are none, wait for one, for `patience_s` at most. Raises EngineGone when none will come.
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
            if loop.time() >= self._until:
                return []
            await self._wait()
        batch, self._queue = self._queue, []
        return batch

    def finish(self, index: int, keep_tokens: int) -> None:
        """End a request at a stop string; its terminal output follows. No effect on a request that has ended."""
        if self._ids[index] in self._open:
            self._finish(self._ids[index], keep_tokens)

    def close(self) -> list[str]:
        """Return the requests that still need an abort. Later outputs are dropped."""
        left = [request_id for request_id in self._ids if request_id in self._open]
        self._open.clear()
        if self._timer is not None:
            self._timer.cancel()
        return left

    def _remind(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wake the handler when its patience ends. A timer outlasts many waits, since each new one costs CPU."""
        self._timer = None
        if loop.time() >= self._until:
            self._news.set()
        elif self._until < math.inf:
            self._timer = loop.call_at(self._until, self._remind, loop)

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()


class ProgressWatch:
    """Judges from heartbeats whether the engine makes progress. Times are seconds of the caller's monotonic clock.

    An engine hangs when its loop does not turn, or when no heartbeat comes at all, for `timeout`.
    """

    def __init__(self, timeout: float, now: float) -> None:
        self._timeout = timeout
        self._last_beat = now
        self._last_progress = now
        self._turn: int | None = None
        self._busy = False
        self._last_check = now

    def observe(self, heartbeat: Heartbeat, now: float) -> None:
        """Note a heartbeat."""
        self._last_beat = now
        if heartbeat.turn != self._turn:
            self._last_progress = now
        self._turn, self._busy = heartbeat.turn, heartbeat.busy

    def verdict(self, now: float) -> str | None:
        """Return why the engine counts as hung, or None. To be called a few times per timeout.

        If the caller itself was held up since its last check (the machine was suspended, say), the time begins anew:
        heartbeats may still be unread.
        """
        late = now - self._last_check > self._timeout / 2
        self._last_check = now
        if late:
            self._last_beat = self._last_progress = now
        if now - self._last_beat > self._timeout:
            return f"no heartbeat for {self._timeout:g} s"
        if now - self._last_progress > self._timeout:
            return f"{'busy' if self._busy else 'idle'} without progress for {self._timeout:g} s"
        return None
