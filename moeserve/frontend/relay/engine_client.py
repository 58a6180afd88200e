"""The frontend's side of the engine: requests out, outputs in, and the change from one life of the engine to the next.

When an engine dies, the supervisor starts the next one and announces it on a pipe. Open requests continue in this next
life: a client sees a pause. Nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from typing import Any

import structlog
import zmq
import zmq.asyncio

from moeserve import wire
from moeserve.forever import Forever, cancel, vital
from moeserve.frontend.relay.request_group import (
    EngineAsleep,
    EngineBusy,
    EngineGone,
    EngineSilent,
    KeyGone,
    Past,
    RequestGroup,
)
from moeserve.run_context import RunContext, load_ready
from moeserve.wire import (
    Abort,
    Admitted,
    Continue,
    Control,
    ControlResult,
    EngineReady,
    Finish,
    Generate,
    Hello,
    Left,
    Message,
    Outputs,
    Prompts,
    Refused,
    Rejected,
    Rest,
    Stats,
    Turned,
    decode_news,
)

log = structlog.get_logger(__name__)

# In units of --engine-timeout. A hung engine is ended after one such time, and its requests then wait for the next
# engine.
_PATIENCE = 1.5
MAX_COMMANDS_OF_KEY = 8  # commands of one key that wait for answers, in this process
_TOO_MANY_COMMANDS = "too many commands of this key wait for the engine"
_ASLEEP = "the service sleeps until a request or /wake_up wakes it"


_MAX_QUEUED_FRAMES = 100_000
_ENDED = "the engine process ended"


class EngineClient:
    """Talks to the present engine.

    `ready` is the newest engine's first message, None until the first has loaded its model. `away_reason` is set
    while the engine is being restarted, `dead_reason` once none will come any more. `lost` is set with either, and
    another event takes its place with the next engine. `restart_seconds`: how long a restart is likely to take.
    `num_restarts`: the engines that took the place of one that had served, as the supervisor counts. `rest` is AWAKE
    again once the engine that was started to wake the service is ready. `num_submitted` counts all requests.

    The next engine gets all open requests at once, in the order of their arrival. The engine itself knows which of them
    may have ended the previous one (`moeserve.engine.crashes`).
    """

    def __init__(
        self, context: RunContext, on_stats: Callable[[Stats], None] | None = None, news_fd: int | None = None
    ) -> None:
        """news_fd: a pipe on which `EngineNews` comes, closed here; without one the engine's first death is final."""
        self.ready: EngineReady | None = None
        self.away_reason: str | None = None
        self.dead_reason: str | None = None
        self.lost = asyncio.Event()
        self.restart_seconds = 0.0
        self.num_restarts = 0
        self.num_submitted = 0
        self.rest = Rest.AWAKE
        self._run = context
        self._on_stats = on_stats
        self._news_fd = news_fd
        self._groups: dict[str, RequestGroup] = {}
        # Requests whose clients left, until their engine has ended them or the next engine has heard of them.
        self._left: dict[str, Generate] = {}
        self._controls: dict[int, asyncio.Future[ControlResult]] = {}
        self._next_control = 0
        self._num_commands: Counter[str] = Counter()
        self._link: EngineLink | None = None
        self._incarnation = context.incarnation
        self._num_restarts_told = 0
        self._following: asyncio.Task[None] | None = None
        # Set when the engine is ready or gone for good, or falls asleep; another event then takes its place.
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Connect and begin to introduce the frontend; return at once."""
        self._zmq = zmq.asyncio.Context()
        self._link = self._connect(self._run.incarnation)
        if self._news_fd is not None:
            os.set_inheritable(self._news_fd, False)
            self._following = vital("news of the supervisor", self._follow(self._news_fd))

    async def stop(self) -> None:
        await cancel(self._following)
        if self._link is not None:
            await self._link.stop()
        self._zmq.term()

    @property
    def num_requests(self) -> int:
        return len(self._groups)

    @asynccontextmanager
    async def submit(self, generates: list[Generate], past: Past | None = None) -> AsyncIterator[RequestGroup]:
        """Send the requests, to the next engine if there is none now. past: where they go on from. Raise EngineGone.

        Leaving the block aborts, once each, requests that have not ended.
        """
        if self.dead_reason is not None:
            raise EngineGone(self.dead_reason)
        group = RequestGroup(generates, self._send_of_group, _PATIENCE * self._run.config.engine_timeout, past)
        self.num_submitted += len(generates)
        try:
            for generate in generates:
                self._groups[generate.request_id] = group
            if self.away_reason is None:
                self._hand_over(group)
            yield group
        finally:
            for generate in generates:
                self._groups.pop(generate.request_id, None)
            is_with_engine, left = group.is_with_engine, group.close()
            for generate in left:
                self._left[generate.request_id] = generate
                if is_with_engine:
                    self._send_of_group(Abort(generate.request_id))

    def let_go_on(self, request_ids: list[str]) -> None:
        """Have led requests go on, each with the token that it has sampled."""
        self._send_of_group(Continue(request_ids))

    async def control(self, command: str, arguments: dict[str, Any] | None = None, tenant: str = "") -> ControlResult:
        """Send a command and return the engine's answer. tenant: the account of the key that asks for it.

        Raise EngineGone; EngineAsleep while the service sleeps; EngineBusy at once if too many commands of the tenant
        wait; EngineSilent if no answer came in time, and then the command may still be carried out.
        """
        timeout_s = self._run.config.engine_timeout
        if self._num_commands[tenant] >= MAX_COMMANDS_OF_KEY:
            raise EngineBusy(_TOO_MANY_COMMANDS)
        self._num_commands[tenant] += 1
        self._next_control += 1
        control_id = self._next_control
        future: asyncio.Future[ControlResult] = asyncio.get_running_loop().create_future()
        self._controls[control_id] = future
        try:
            if self._link is None and self.rest is not Rest.AWAKE and self.dead_reason is None:
                raise EngineAsleep(_ASLEEP)
            if self._link is None:
                raise EngineGone(self.dead_reason or self.away_reason or "there is no engine")
            self._link.send(Control(control_id, command, arguments or {}, tenant))
            async with asyncio.timeout(timeout_s):
                result = await future
            if result.is_refused:
                raise EngineBusy(_TOO_MANY_COMMANDS)
            return result
        except TimeoutError:
            raise EngineSilent(f"the engine has not answered the command within {timeout_s:g} s") from None
        finally:
            self._controls.pop(control_id, None)
            self._num_commands[tenant] -= 1
            if not self._num_commands[tenant]:
                del self._num_commands[tenant]

    async def until_rest(self, rest: Rest) -> None:
        """Wait until the service sleeps, or has an engine that is ready. Raise EngineGone if none will come."""
        while self.dead_reason is None:
            has_engine = self.ready is not None and self.away_reason is None
            if self.rest is rest and (has_engine or rest is not Rest.AWAKE):
                return
            await self._changed.wait()
        raise EngineGone(self.dead_reason)

    def fail_all(self, reason: str) -> None:
        """End every open request and command with EngineGone; `submit` then aborts the requests in the engine."""
        for group in self._open_groups():
            group.fail(EngineGone(reason))
        self._fail_controls(reason)

    def fail_tenant(self, tenant: str) -> None:
        """End the open requests of an account whose key is not valid any more with KeyGone."""
        for group in self._open_groups():
            if group.tenant == tenant:
                group.fail(KeyGone("the API key of this request is not valid any more"))

    def _open_groups(self) -> list[RequestGroup]:
        """Return each open group once, the oldest first."""
        return list(dict.fromkeys(self._groups.values()))

    def _fail_controls(self, reason: str) -> None:
        for future in self._controls.values():
            if not future.done():
                future.set_exception(EngineGone(reason))

    def _hand_over(self, group: RequestGroup) -> None:
        """Send the group's open requests, each from where it stopped."""
        for generate in group.take_to_engine():
            self._send_of_group(generate)

    def _send_of_group(self, message: Generate | Continue | Turned | Finish | Abort) -> None:
        """Send a message unless the engine is away: its next life gets the rest of the group."""
        if self._link is not None:
            self._link.send(message)

    # The lives of the engine.

    def _connect(self, incarnation: int) -> EngineLink:
        return EngineLink(
            replace(self._run, incarnation=incarnation),
            self._zmq,
            on_message=self._dispatch,
            on_unreadable=self._on_unreadable,
            on_end=self._lose,
        )

    async def _follow(self, descriptor: int) -> None:
        """Follow the supervisor's news. Without a supervisor there are no more restarts."""
        reader = asyncio.StreamReader()
        pipe = open(descriptor, "rb", buffering=0)  # noqa: SIM115 - the transport closes it
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        # If the file were closed without the loop, the loop would still watch its number, which no connection could use
        # again.
        with closing(transport):
            while line := await reader.readline():
                news = decode_news(line)
                if news.incarnation is None:
                    self._die(news.reason)
                    return
                self.restart_seconds = news.seconds
                self._num_restarts_told = news.num_restarts
                if news.rest is not Rest.AWAKE:
                    self._rest(news.rest)
                elif news.incarnation != self._incarnation:
                    self._lose("the engine ended and another one takes its place")
                    self._incarnation = news.incarnation
                    self._link = self._connect(news.incarnation)
        self._die("the supervisor ended")

    def _rest(self, rest: Rest) -> None:
        """Leave the engine, which ends, and keep open requests for the one that is started when the service wakes.

        A frontend that is started meanwhile takes requests by the last engine's facts.
        """
        self.rest = rest
        if self.ready is None:
            self.ready = load_ready(self._run)
        self._lose(_ASLEEP)
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _lose(self, reason: str) -> None:
        """Wait for the next life, if there can be one: requests and clients' connections are kept."""
        if self._link is None:
            return
        if self._news_fd is None:
            self._die(reason)
            return
        self._link.close()
        self._link = None
        if self.rest is not Rest.AWAKE:
            self.away_reason = reason
        elif self.away_reason is None and self.ready is not None:
            log.error("engine_lost", reason=reason, open_requests=len(self._groups))
            self.away_reason = f"the engine is being restarted: {reason}"
        self.lost.set()
        self._fail_controls(reason)
        for group in self._open_groups():
            group.lose_engine()

    def _die(self, reason: str) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None
        if self.dead_reason is None:
            # A start that failed has said why.
            (log.debug if self.ready is None else log.error)("engine_gone", reason=reason)
            self.dead_reason = reason
            self.lost.set()
            self.fail_all(reason)
            self._change()

    def _on_ready(self, ready: EngineReady) -> None:
        """Hand all open requests to an engine that is new."""
        if self._link is None or (self.ready is not None and self.away_reason is None):
            return
        self._link.watch(ready.pid)
        if self._link is None:
            return
        self.num_restarts = self._num_restarts_told
        self.ready, self.away_reason, self.lost, self.rest = ready, None, asyncio.Event(), Rest.AWAKE
        self._change()
        log.info("engine_ready", pid=ready.pid, device=ready.device, max_model_len=ready.max_model_len)
        for left in self._left.values():
            self._link.send(Left(left.request_id, left.token_ids, left.sampling))
        self._left.clear()
        for group in self._open_groups():
            self._hand_over(group)

    # The engine's messages.

    def _on_unreadable(self, reason: str) -> None:
        """End all open requests: the frame may hold tokens of any of them, whose text would lack these tokens."""
        log.error("engine_frame_unreadable", error=reason)
        self.fail_all("a message of the engine could not be read")

    def _dispatch(self, message: Message) -> None:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    if group := self._groups.get(output.request_id):
                        group.put(output)
                    elif output.finish_reason is not None:
                        self._left.pop(output.request_id, None)
            case Prompts(prompts=prompts):
                for progress in prompts:
                    if group := self._groups.get(progress.request_id):
                        group.tell(progress)
            case Admitted(request_id=request_id) | Rejected(request_id=request_id):
                if group := self._groups.get(request_id):
                    group.answer(message)
                elif isinstance(message, Rejected):
                    self._left.pop(request_id, None)
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


class EngineLink:
    """A DEALER to the engine of one incarnation, and the watch over its process.

    One task reads the socket. Callbacks: `on_message` for each message of this incarnation; `on_unreadable`, with the
    reason, for a frame that is none or could not be taken in; `on_end`, once, when the watched process has ended. After
    `close` none is called.
    """

    def __init__(
        self,
        run: RunContext,
        sockets: zmq.asyncio.Context,
        *,
        on_message: Callable[[Message], None],
        on_unreadable: Callable[[str], None],
        on_end: Callable[[str], None],
    ) -> None:
        """Connect and begin to introduce the frontend; return at once. run: of the incarnation."""
        self._run = run
        self._on_message, self._on_unreadable, self._on_end = on_message, on_unreadable, on_end
        self._is_open = True
        self._pidfd: int | None = None
        self._reading = Forever("messages of the engine", self._read)
        self._socket = sockets.socket(zmq.DEALER)
        identity = f"frontend.{run.incarnation}.{os.getpid()}.{secrets.token_hex(4)}"
        self._socket.setsockopt(zmq.ROUTING_ID, identity.encode())
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, _MAX_QUEUED_FRAMES)
        self._socket.setsockopt(zmq.RCVHWM, _MAX_QUEUED_FRAMES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, wire.MAX_FRAME_BYTES)
        self._socket.connect(run.engine_address)
        self._reading.start()
        self.send(Hello(wire.PROTOCOL_VERSION, run.model_hash))

    async def stop(self) -> None:
        self.close()
        await self._reading.stop()

    def close(self) -> None:
        """Read no more and close the socket. Messages that were not read are dropped."""
        self._is_open = False
        self._reading.cancel()
        if self._pidfd is not None:
            asyncio.get_running_loop().remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
        self._socket.close(linger=0)

    def send(self, message: Message) -> None:
        """Send a message now, or as soon as the engine takes it, in order. None is lost while the link is open."""
        self._socket.send(wire.encode(message, self._run.incarnation))

    def watch(self, pid: int) -> None:
        """Call `on_end` when the engine's process ends, or now if it has ended."""
        if self._pidfd is not None:
            return
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            self._on_end(_ENDED)
            return
        asyncio.get_running_loop().add_reader(self._pidfd, self._on_end, _ENDED)

    async def _read(self) -> bool:
        """Take in the next message; return whether the link is open still."""
        try:
            incarnation, message = wire.decode(await self._socket.recv(), wire.FromEngine)
            if incarnation == self._run.incarnation:
                self._on_message(message)
        except wire.DecodeError as error:
            self._on_unreadable(str(error)[:200])
        except Exception as error:
            self._on_unreadable(type(error).__name__)
            raise
        return self._is_open
