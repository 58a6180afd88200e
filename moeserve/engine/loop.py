"""The engine: requests in, one step after another, outputs out. It handles no text and no HTTP."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import structlog

from moeserve.engine.commands import Commands
from moeserve.engine.crashes.suspects import Suspects
from moeserve.engine.inbox import Inbox
from moeserve.engine.request_commands import RequestCommands
from moeserve.engine.socket import EngineSocket
from moeserve.plan import NO_WISH, Asked, CacheWish, FinishReason, PromptProgress, Request
from moeserve.scheduling.outcomes import NeverFitsError, QueueFullError, RequestOutput, TooLateError
from moeserve.scheduling.parts import Part, overriding
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import Steps
from moeserve.wire import (
    PROTOCOL_VERSION,
    Abort,
    Admitted,
    Continue,
    Control,
    DecodeError,
    EngineReady,
    FeatureSamples,
    Finish,
    Generate,
    Heartbeat,
    Hello,
    Left,
    Message,
    Output,
    Outputs,
    Prompts,
    Refused,
    Rejected,
    Stats,
    Turned,
    unpack_token_ids,
)

_IDLE_POLL_SECONDS = 0.25  # an idle engine looks after its ranks this often
# The poll interval while a file is written, as its end wakes no thread.
_WRITING_POLL_SECONDS = 0.02
_WAITING_POLL_SECONDS = 0.002  # between two looks for messages while all requests wait for KV
_SECONDS_BETWEEN_STATS = 0.5
_MAX_RETENTION_SECONDS = 31 * 86400.0

log = structlog.get_logger(__name__)


class Engine:
    """Runs the loop, and knows the frontend of each request."""

    def __init__(
        self,
        socket: EngineSocket,
        steps: Steps,
        ready: EngineReady,
        suspects: Suspects,
        commands: Commands,
        parts: Sequence[Part] = (),
    ) -> None:
        """suspects: observes `steps`. parts: in their order, see `moeserve.scheduling.parts`."""
        self._socket = socket
        self._steps = steps
        self._scheduler = scheduler = steps.scheduler
        self._ready = ready
        self._suspects = suspects
        self._frontends: list[bytes] = []
        self._asked_by: dict[str, bytes] = {}
        self._inbox = Inbox(socket.receive)
        self._commands = commands
        self._requests = RequestCommands(scheduler, self._cancel)
        self._stats = EngineStats(scheduler)
        self._progress = 0
        self._turn = overriding(parts, Part.turn)
        self._wait = overriding(parts, Part.wait)
        self._is_working = overriding(parts, Part.is_working)
        self._prompts = overriding(parts, Part.prompts)
        self._samples = overriding(parts, Part.samples)
        self._close = overriding(parts, Part.close)
        self._turned = overriding(parts, Part.turned)
        self._continued = overriding(parts, Part.continued)
        self._end_turn = overriding(parts, Part.end_turn)

    def run(self, stop: threading.Event) -> None:
        """Serve until `stop` is set. Open requests are then left to the frontends, which see this process end."""
        while not stop.is_set():
            self._progress += 1
            if self._scheduler.is_idle:
                self._idle()
            for sender, message in self._inbox.turn():
                self._scheduler.set_time(time.monotonic())
                self._handle(sender, message)
                self._progress += 1
            self._commands.advance()
            self._send_answers()
            started = time.monotonic()
            self._scheduler.set_time(started)
            self._drop_late()
            for turn in self._turn:
                turn()
            outputs = self._steps.advance(self._send_prompts)
            if outputs is not None:
                self._stats.count_started(self._scheduler.take_started(), started)
                self._send_outputs(outputs)
                self._suspects.settle(self._steps.step)
                seconds = time.monotonic() - started
                self._stats.count_step(seconds, self._steps.waited_s)
                # A step that was planned ahead has run on its device during an earlier turn too.
                self._scheduler.count_step(self._steps.device_s or seconds)
            elif not self._scheduler.is_idle and not any(wait(_WAITING_POLL_SECONDS) for wait in self._wait):
                self._socket.wait(_WAITING_POLL_SECONDS)
            if self._stats.due():
                self._send_stats()
            for end_turn in self._end_turn:
                end_turn()
        self._commands.close()
        self._send_answers()
        for close in self._close:
            for _ in close():
                self._progress += 1

    def heartbeat(self) -> Heartbeat:
        """Return the state for the heartbeat thread.

        `progress` moves with the loop, idle or not, with each message that a turn handles, and within a step.
        """
        progress = self._progress + self._steps.progress()
        return Heartbeat(pid=self._ready.pid, progress=progress, busy=not self._scheduler.is_idle)

    def _idle(self) -> None:
        """Check memory and ranks between steps, and wait a moment for messages unless there is work."""
        self._scheduler.check_idle()
        self._steps.check()
        if self._inbox or self._commands.is_waiting:
            return
        self._send_stats()
        is_writing = self._commands.is_writing or any(is_working() for is_working in self._is_working)
        self._socket.wait(_WRITING_POLL_SECONDS if is_writing else _IDLE_POLL_SECONDS)

    def _handle(self, sender: bytes, message: Any) -> None:
        match message:
            case Generate():
                with self._suspects.taking(message):
                    self._generate(sender, message)
            case Left():
                self._suspects.record_left(message)
            case Abort() | Finish() if self._inbox.withdraw(message.request_id):
                self._send(sender, Outputs([Output(message.request_id, [], FinishReason.ABORT, 0, 0)]))
            case Abort():
                self._suspects.record_abort(message.request_id)
                self._end(self._scheduler.abort(message.request_id))
            case Finish():
                self._end(self._scheduler.finish(message.request_id, message.keep_tokens))
            case Continue(request_ids=request_ids):
                for continued, request_id in product(self._continued, request_ids):
                    continued(request_id)
            case Turned():
                for turned in self._turned:
                    turned(message.request_id)
            case Hello():
                self._send(sender, self._answer_hello(sender, message))
            case Control() if message.command in self._requests:
                self._send(sender, self._requests.run(message, time.monotonic()))
            case Control():
                self._commands.add(sender, message)

    def _answer_hello(self, sender: bytes, hello: Hello) -> EngineReady | Refused:
        if hello.protocol_version != PROTOCOL_VERSION:
            return Refused(f"protocol version {hello.protocol_version}, the engine speaks {PROTOCOL_VERSION}")
        if hello.model_hash != self._ready.model_hash:
            return Refused("the engine serves another model")
        if sender not in self._frontends:
            self._frontends.append(sender)
        return self._ready

    def _generate(self, sender: bytes, message: Generate) -> None:
        request_id = message.request_id
        if self._suspects.is_culprit(message, time.monotonic()):
            times = "2 times while it had this request" if message.resumes else "when it had this request before"
            self._reject(sender, Rejected(request_id, "engine_crash", f"the engine ended {times}"))
            return
        try:
            self._scheduler.add(request := self._to_request(message))
        except QueueFullError as error:
            self._reject(sender, Rejected(request_id, "queue_full", str(error), self._wait_s(request)))
        except TooLateError as error:
            self._reject(sender, Rejected(request_id, "overloaded", str(error), self._wait_s(request)))
        except NeverFitsError as error:
            self._reject(sender, Rejected(request_id, "context_length_exceeded", str(error)))
        except (DecodeError, ValueError) as error:
            self._reject(sender, Rejected(request_id, "invalid", str(error)))
        else:
            self._asked_by[request_id] = sender
            self._stats.count_arrival(request, time.monotonic())
            self._send(sender, Admitted(request_id))

    def _to_request(self, message: Generate) -> Request:
        """Return the scheduler's request. Raise DecodeError or ValueError."""
        prompt, output = unpack_token_ids(message.token_ids), unpack_token_ids(message.output_token_ids)
        predicted = unpack_token_ids(message.predicted)
        closing = (*message.thought.closing, *message.thought.closing_again) if message.thought is not None else ()
        for token_ids in (prompt, output, closing, predicted):
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._ready.vocab_size:
                raise ValueError("token ids are out of vocabulary")
        if not prompt:
            raise ValueError("the prompt is empty")
        return Request(
            message.request_id,
            prompt,
            message.sampling,
            message.namespace,
            message.priority,
            num_prompt_logprobs=min(max(message.num_prompt_logprobs, 0), len(prompt)),
            terms=message.terms,
            arrived_at=time.monotonic() if message.arrived_at is None else message.arrived_at,
            resumes=message.resumes,
            earlier_output=output,
            asked=Asked(
                message.cache_hit_threshold,
                message.has_tools,
                message.offers_kv,
                message.thought,
                predicted,
                message.reports_progress,
                message.ticket,
                _checked(message.cache or NO_WISH),
                message.led,
                message.forks,
            ),
        )

    def _wait_s(self, request: Request) -> float:
        """Return the Retry-After of a refused request, in seconds; at least 1."""
        load = self._scheduler.load(request.num_uncached_tokens)
        return max(1.0, load.wait_s(request.terms.tenant, request.terms.weight))

    def _drop_late(self) -> None:
        late = self._scheduler.drop_late()
        for _ in late:
            self._stats.count_rejection("late")
        self._send_outputs(late)

    def _reject(self, sender: bytes, rejected: Rejected) -> None:
        self._stats.count_rejection(rejected.code)
        self._send(sender, rejected)

    def _cancel(self, ended: RequestOutput) -> None:
        self._suspects.record_abort(ended.request.request_id)
        self._send_outputs([ended])

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
                self._stats.count_end(output.request)
        for receiver, messages in of_frontend.items():
            self._send(receiver, Outputs(messages))

    def _send_prompts(self) -> None:
        of_frontend: dict[bytes, list[PromptProgress]] = {}
        for prompts in self._prompts:
            for progress in prompts():
                of_frontend.setdefault(self._asked_by[progress.request_id], []).append(progress)
        for receiver, told in of_frontend.items():
            self._send(receiver, Prompts(told))

    def _send_answers(self) -> None:
        for receiver, answer in self._commands.take_answers():
            self._send(receiver, answer)

    def _send_stats(self) -> None:
        samples = self._commands.samples()
        for of_part in self._samples:
            samples |= of_part()
        stats = self._stats.snapshot(self._steps.step, samples)
        for frontend in list(self._frontends):
            self._send(frontend, stats)
            # Frontends observe queue times and count together, so each time goes to only one of them.
            stats.queue_seconds = []

    def _send(self, receiver: bytes, message: Message) -> None:
        if self._socket.send(receiver, message):
            return
        if receiver in self._frontends:
            self._frontends.remove(receiver)
            log.info("frontend_gone")
        for request_id in [name for name, asker in self._asked_by.items() if asker == receiver]:
            del self._asked_by[request_id]
            if (ended := self._scheduler.abort(request_id)) is not None:
                self._stats.count_end(ended.request)


def _to_message(output: RequestOutput) -> Output:
    """Return the message to a frontend."""
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
        output.miss,
        request.found_below,
        output.offered,
        output.judged,
    )


def _checked(wish: CacheWish) -> CacheWish:
    """Return a request's wish. Raise ValueError for invalid times."""
    if not all(0 < seconds <= _MAX_RETENTION_SECONDS for _, seconds in wish.retentions):
        raise ValueError("a retention's time is out of range")
    return wish


class EngineStats:
    """Counters of the engine's loop, for metrics. Times are `time.monotonic` seconds."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rejections: dict[str, int] = {}
        self._step_seconds = 0.0
        self._waited_s = 0.0
        self._arrived: dict[str, float] = {}
        self._queue_seconds: list[float] = []
        self._last_sent = 0.0

    def count_arrival(self, request: Request, now: float) -> None:
        self._arrived[request.request_id] = now

    def count_started(self, requests: list[Request], now: float) -> None:
        for request in requests:
            self._queue_seconds.append(now - self._arrived.pop(request.request_id, now))

    def count_end(self, request: Request) -> None:
        self._arrived.pop(request.request_id, None)

    def count_step(self, seconds: float, waited_s: float) -> None:
        """waited_s: the host's waits for devices since the start."""
        self._step_seconds += seconds
        self._waited_s = waited_s

    def count_rejection(self, code: str) -> None:
        self._rejections[code] = self._rejections.get(code, 0) + 1

    def due(self) -> bool:
        return time.monotonic() - self._last_sent >= _SECONDS_BETWEEN_STATS

    def snapshot(self, step: int, features: FeatureSamples) -> Stats:
        """Return the message for the frontends. Every queue time is in one message only."""
        self._last_sent = time.monotonic()
        queue_seconds, self._queue_seconds = self._queue_seconds, []
        counters = self._scheduler.counters
        num_free, num_cached, num_leased = self._scheduler.num_blocks
        return Stats(
            step=step,
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            blocks_free=num_free,
            blocks_cached=num_cached,
            blocks_leased=num_leased,
            slots_empty=self._scheduler.num_empty_slots,
            prefix_query_tokens=counters.prefix_query_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            preemptions=counters.preemptions,
            rejections=dict(self._rejections),
            step_seconds=self._step_seconds,
            queue_seconds=queue_seconds,
            features=features | self._device_samples(),
            load=self._scheduler.load(),
        )

    def _device_samples(self) -> FeatureSamples:
        return {"moeserve_device_wait_seconds": [[self._waited_s]]} if self._waited_s else {}
