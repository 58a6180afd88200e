"""The engine: requests in, one step after another, outputs out. It knows no text and no HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import structlog

from moeserve.engine_socket import EngineSocket
from moeserve.engine_stats import EngineStats
from moeserve.executor import Executor
from moeserve.expert_service.monitor import ExpertCommandError, ExpertMonitor
from moeserve.frames import DecodeError, unpack_token_ids
from moeserve.messages import (
    PROTOCOL_VERSION,
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
)
from moeserve.outputs import NeverFitsError, QueueFullError, RequestOutput
from moeserve.request import FinishReason, Request
from moeserve.scheduler import Scheduler
from moeserve.step_loop import PlainSteps, StepLoop
from radix_cache import PrefixCache

_IDLE_POLL_SECONDS = 0.25

log = structlog.get_logger(__name__)


class Engine:
    """Owns the loop and the requests' way home: which frontend asked for which request."""

    def __init__(
        self,
        socket: EngineSocket,
        scheduler: Scheduler,
        caches: Sequence[PrefixCache],
        executor: Executor,
        ready: EngineReady,
        experts: ExpertMonitor | None = None,
        steps: StepLoop | None = None,
    ) -> None:
        """steps: the loop of `scheduler` and `executor`, the plain one if None."""
        self._socket = socket
        self._scheduler = scheduler
        self._caches = caches
        self._executor = executor
        self._ready = ready
        self._experts = experts
        self._frontends: list[bytes] = []
        self._asked_by: dict[str, bytes] = {}
        self._stats = EngineStats(scheduler, caches)
        self._steps = steps or PlainSteps(scheduler, executor)

    def run(self, stop: threading.Event) -> None:
        """Serves until `stop` is set; then every open request gets its terminal output."""
        while not stop.is_set():
            idle = self._scheduler.is_idle
            if idle:
                self._scheduler.check_idle()
                self._executor.check()
                self._send_stats()
            for sender, message in self._socket.drain(_IDLE_POLL_SECONDS if idle else 0.0):
                self._handle(sender, message)
            started = time.monotonic()
            outputs = self._steps.advance()
            if outputs is not None:
                self._stats.count_started(self._scheduler.take_started(), started)
                self._send_outputs(outputs)
                self._stats.count_step(time.monotonic() - started)
                if self._stats.due():
                    self._send_stats()
        for request_id in list(self._asked_by):
            if ended := self._scheduler.abort(request_id):
                ended.finish_reason, ended.error = FinishReason.ERROR, "the engine was stopped"
                self._send_outputs([ended])

    def heartbeat(self) -> Heartbeat:
        """Read by the heartbeat thread: `step` moves while requests are open."""
        return Heartbeat(pid=self._ready.pid, step=self._steps.step, busy=not self._scheduler.is_idle)

    def _handle(self, sender: bytes, message: Any) -> None:
        match message:
            case Generate():
                self._generate(sender, message)
            case Abort():
                self._end(self._scheduler.abort(message.request_id))
            case Finish():
                self._end(self._scheduler.finish(message.request_id, message.keep_tokens))
            case Hello():
                self._send(sender, self._answer_hello(sender, message))
            case Control():
                self._send(sender, self._control(message))

    def _answer_hello(self, sender: bytes, hello: Hello) -> EngineReady | Refused:
        if hello.protocol_version != PROTOCOL_VERSION:
            return Refused(f"protocol version {hello.protocol_version}, the engine speaks {PROTOCOL_VERSION}")
        if hello.model_hash != self._ready.model_hash:
            return Refused("the engine serves another model")
        if sender not in self._frontends:
            self._frontends.append(sender)
        return self._ready

    def _control(self, control: Control) -> ControlResult:
        if control.command == "reset_prefix_cache":
            return ControlResult(control.control_id, {"blocks_freed": sum(cache.reset() for cache in self._caches)})
        if self._experts is not None:
            try:
                return ControlResult(control.control_id, self._experts.command(control.command, control.arguments))
            except ExpertCommandError as error:
                return ControlResult(control.control_id, {}, str(error))
        return ControlResult(control.control_id, {}, f"unknown command {control.command!r}")

    def _generate(self, sender: bytes, message: Generate) -> None:
        request_id = message.request_id
        try:
            token_ids = unpack_token_ids(message.token_ids)
            if not token_ids or min(token_ids) < 0 or max(token_ids) >= self._ready.vocab_size:
                raise ValueError("token ids are empty or out of vocabulary")
            request = Request(request_id, token_ids, message.sampling, message.namespace, message.priority)
            self._scheduler.add(request)
        except QueueFullError as error:
            self._reject(sender, Rejected(request_id, "queue_full", str(error), self._stats.seconds_per_request()))
        except NeverFitsError as error:
            self._reject(sender, Rejected(request_id, "context_length_exceeded", str(error)))
        except (DecodeError, ValueError) as error:
            self._reject(sender, Rejected(request_id, "invalid", str(error)))
        else:
            self._asked_by[request_id] = sender
            self._stats.count_arrival(request, time.monotonic())
            self._send(sender, Admitted(request_id))

    def _reject(self, sender: bytes, rejected: Rejected) -> None:
        self._stats.count_rejection(rejected.code)
        self._send(sender, rejected)

    def _end(self, ended: RequestOutput | None) -> None:
        if ended is not None:
            self._send_outputs([ended])

    def _send_outputs(self, outputs: Iterable[RequestOutput]) -> None:
        of_frontend: dict[bytes, list[Output]] = {}
        for output in outputs:
            request_id = output.request.request_id
            receiver = self._asked_by[request_id]
            of_frontend.setdefault(receiver, []).append(_to_message(output))
            if output.finish_reason is not None:
                del self._asked_by[request_id]
                self._stats.count_end(output.request, time.monotonic())
        for receiver, messages in of_frontend.items():
            self._send(receiver, Outputs(messages))

    def _send_stats(self) -> None:
        stats = self._stats.snapshot(self._steps.step, None if self._experts is None else self._experts.stats())
        for frontend in list(self._frontends):
            self._send(frontend, stats)

    def _send(self, receiver: bytes, message: Message) -> None:
        if self._socket.send(receiver, message):
            return
        if receiver in self._frontends:
            self._frontends.remove(receiver)
            log.info("frontend_gone")
        for request_id in [name for name, asker in self._asked_by.items() if asker == receiver]:
            del self._asked_by[request_id]
            self._scheduler.abort(request_id)


def _to_message(output: RequestOutput) -> Output:
    request = output.request
    is_terminal = output.finish_reason is not None
    return Output(
        request.request_id,
        [] if output.token_id is None else [output.token_id],
        output.finish_reason,
        request.num_cached_tokens,
        request.num_output_tokens if is_terminal else None,
        None if output.logprobs is None else [output.logprobs],
        output.prompt_logprobs,
        output.error,
    )
