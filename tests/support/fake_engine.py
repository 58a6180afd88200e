"""An engine that follows a script: a real ROUTER and PUB socket in a thread, speaking the real messages."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

import zmq

from moeserve import wire
from moeserve.plan import FinishReason, PromptProgress
from moeserve.run_context import RunContext
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
    Prompts,
    Rejected,
)
from tests.support.engine_ready import engine_ready
from tests.support.tiny_model import EOS, VOCAB_SIZE

Script = Callable[["FakeEngine", Generate], None]


def say(text: str, *, finish: FinishReason = FinishReason.STOP, chunk: int = 1, **extra: Any) -> Script:
    """Admits and answers with the bytes of `text`, `chunk` tokens per output, the reason with the last."""

    def script(engine: FakeEngine, generate: Generate) -> None:
        engine.send(Admitted(generate.request_id))
        ids = list(text.encode())
        for start in range(0, len(ids), chunk):
            engine.output(generate, ids[start : start + chunk], num_cached_tokens=3, **extra)
        engine.output(generate, [], finish_reason=finish, num_output_tokens=len(ids), num_cached_tokens=3)

    return script


def admit_only(engine: FakeEngine, generate: Generate) -> None:
    """Queued, and nothing more."""
    engine.send(Admitted(generate.request_id))


def ignore(_engine: FakeEngine, _generate: Generate) -> None:
    """Not even admitted."""


def trickle(text: str) -> Script:
    """Admits and gives the bytes of `text`, but no end."""

    def script(engine: FakeEngine, generate: Generate) -> None:
        engine.send(Admitted(generate.request_id))
        engine.output(generate, list(text.encode()))

    return script


def compute(*counts: tuple[int, int, int]) -> Script:
    """Admits and tells how far the prompt is: (tokens, cached, computed) each. No output follows."""

    def script(engine: FakeEngine, generate: Generate) -> None:
        engine.send(Admitted(generate.request_id))
        for number, count in enumerate(counts):
            engine.send(Prompts([PromptProgress(generate.request_id, *count, 0.5 * number, 41.25)]))

    return script


def reject(code: str, reason: str = "no", retry_after_s: float | None = None) -> Script:
    def script(engine: FakeEngine, generate: Generate) -> None:
        engine.send(Rejected(generate.request_id, code, reason, retry_after_s))

    return script


class FakeEngine:
    """`script` decides what happens to a request; `received` is everything that frontends said, in order."""

    def __init__(
        self,
        run: RunContext,
        *,
        pid: int | None = None,
        introduces: bool = True,
        script: Script | None = None,
        **ready: Any,
    ) -> None:
        self.script = script or say("Hello")
        self.received: list[Message] = []
        self.beating = True
        self.busy = False
        self.stuck = False  # heartbeats come, but the loop that they tell of stands still
        self.answers_commands = True
        self.introduces = introduces
        self._run = run
        self._pid = pid if pid is not None else os.getpid()
        self._ready = ready
        self._news = threading.Condition()
        self._outbox: queue.Queue[Message | bytes] = queue.Queue()
        self._peer: bytes | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> FakeEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def send(self, message: Message | bytes) -> None:
        """Queues a message (or raw frame) to the frontend."""
        self._outbox.put(message)

    def output(self, generate: Generate, token_ids: list[int], **extra: Any) -> None:
        self.send(Outputs([Output(generate.request_id, token_ids, **extra)]))

    def of(self, kind: type) -> list[Any]:
        """The received messages of one kind."""
        with self._news:
            return [message for message in self.received if isinstance(message, kind)]

    def wait_for(self, kind: type, count: int = 1, timeout: float = 60.0) -> list[Any]:
        """Waits until `count` messages of a kind were received."""

        def enough() -> bool:
            return sum(isinstance(message, kind) for message in self.received) >= count

        with self._news:
            assert self._news.wait_for(enough, timeout), f"no {count} x {kind.__name__} within {timeout} s"
        return self.of(kind)

    def ready_message(self) -> EngineReady:
        facts = {
            "pid": self._pid,
            "model_hash": self._run.model_hash,
            "max_model_len": 512,
            "vocab_size": VOCAB_SIZE,
            "eos_token_ids": [EOS],
            "max_num_seqs": 4,
            "max_num_queued_reqs": 4,
            "num_blocks": 64,
            "block_size": 16,
        }
        return engine_ready(**{**facts, **self._ready})

    def _loop(self) -> None:
        context = zmq.Context()
        router, beats = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        router.bind(self._run.engine_address)
        beats.bind(self._run.heartbeat_address)
        beat_at, turn = 0.0, 0
        while not self._stop.is_set():
            if router.poll(2):
                self._receive(*router.recv_multipart())
            self._flush(router)
            if self.beating and time.monotonic() >= beat_at:
                beat_at = time.monotonic() + 0.1
                turn += not self.stuck
                beat = Heartbeat(self._pid, turn, self.busy)
                beats.send(wire.encode(beat, self._run.incarnation))
        context.destroy(linger=0)

    def _receive(self, peer: bytes, frame: bytes) -> None:
        _, message = wire.decode(frame, wire.ToEngine)
        self._peer = peer
        match message:
            case Hello() if self.introduces:
                self.send(self.ready_message())
            case Generate():
                self.script(self, message)
            case Finish():
                self.send(
                    Outputs(
                        [
                            Output(
                                message.request_id,
                                finish_reason=FinishReason.STOP,
                                num_output_tokens=message.keep_tokens,
                            )
                        ]
                    )
                )
            case Abort():
                self.send(Outputs([Output(message.request_id, finish_reason=FinishReason.ABORT)]))
            case Control() if self.answers_commands:
                result = {"requests": [], "total": 0} if message.command == "list_requests" else {"blocks": 7}
                self.send(ControlResult(message.control_id, result))
        with self._news:
            self.received.append(message)
            self._news.notify_all()

    def _flush(self, router: zmq.Socket[bytes]) -> None:
        while self._peer is not None:
            try:
                message = self._outbox.get_nowait()
            except queue.Empty:
                return
            frame = message if isinstance(message, bytes) else wire.encode(message, self._run.incarnation)
            router.send_multipart([self._peer, frame])
