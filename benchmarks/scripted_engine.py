"""An engine that computes nothing: it answers every request with the tokens of a script, one a step, in lockstep."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import zmq

from moeserve import wire
from moeserve.plan import FinishReason
from moeserve.wire import (
    Admitted,
    EngineReady,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Output,
    Outputs,
    RunContext,
)

_BEAT_S = 0.1
_PID = 1


class ScriptedEngine:
    """Speaks the wire's protocol on the sockets of a run, in a thread.

    It waits until `streams` requests are there; then each step gives every one its next token of `script`, `step_s`
    after the step before. `on_step(number)` is called before each step; `max_tokens` of the first request is their
    number.
    """

    def __init__(
        self, run: RunContext, script: Sequence[int], vocab_size: int, eos: int, *, streams: int, step_s: float
    ) -> None:
        self.on_step: Callable[[int], None] = lambda _: None
        self._run, self._script, self._streams, self._step_s = run, script, streams, step_s
        self._ready = EngineReady(
            pid=_PID,
            model_hash=run.model_hash,
            max_model_len=65_536,
            vocab_size=vocab_size,
            eos_token_ids=[eos],
            default_sampling={},
            max_num_seqs=streams,
            max_num_queued_reqs=streams,
            num_blocks=1,
            block_size=16,
            device="cpu",
            dtype="float32",
            weights_bytes=1,
            kv_bytes=1,
        )
        self._waiting: list[Generate] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def __enter__(self) -> ScriptedEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _loop(self) -> None:
        context = zmq.Context()
        router, beats = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        router.bind(self._run.engine_address)
        beats.bind(self._run.heartbeat_address)
        beat_at = 0.0
        while not self._stop.is_set():
            if router.poll(2):
                self._receive(router, *router.recv_multipart())
            if time.monotonic() >= beat_at:
                beat_at = time.monotonic() + _BEAT_S
                beats.send(wire.encode(Heartbeat(_PID, 0, False), self._run.incarnation))
        context.destroy(linger=0)

    def _receive(self, router: zmq.Socket[bytes], peer: bytes, frame: bytes) -> None:
        _, message = wire.decode(frame, wire.ToEngine)
        if isinstance(message, Hello):
            self._send(router, peer, self._ready)
        elif isinstance(message, Generate):
            self._send(router, peer, Admitted(message.request_id))
            self._waiting.append(message)
            if len(self._waiting) == self._streams:
                self._answer(router, peer)

    def _answer(self, router: zmq.Socket[bytes], peer: bytes) -> None:
        """Give all that wait their tokens. Steps keep their pace, however long sending takes."""
        waiting, self._waiting = self._waiting, []
        steps = waiting[0].sampling.max_tokens
        due = time.monotonic()
        for step in range(steps):
            self.on_step(step)
            token, ends = self._script[step % len(self._script)], step == steps - 1
            outputs = [
                Output(
                    generate.request_id,
                    [token],
                    finish_reason=FinishReason.LENGTH if ends else None,
                    num_cached_tokens=0 if step == 0 else None,
                    num_output_tokens=steps if ends else None,
                )
                for generate in waiting
            ]
            self._send(router, peer, Outputs(outputs))
            due += self._step_s
            time.sleep(max(0.0, due - time.monotonic()))

    def _send(self, router: zmq.Socket[bytes], peer: bytes, message: Message) -> None:
        router.send_multipart([peer, wire.encode(message, self._run.incarnation)])
