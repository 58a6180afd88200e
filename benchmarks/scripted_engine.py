"""Engines that compute nothing: they speak the wire's protocol, and a script gives their answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import zmq

from moeserve import wire
from moeserve.config import ServeConfig
from moeserve.plan import FinishReason
from moeserve.run_context import RunContext
from moeserve.scheduling.pacing import Backlog, Load
from moeserve.wire import Admitted, EngineReady, Generate, Heartbeat, Hello, Message, Output, Outputs, Stats

MODEL = "m"
MAX_MODEL_LEN = 65_536
_PID = 1

Send = Callable[[Message], None]


def run_context(model: Path, folder: Path, **settings: Any) -> RunContext:
    """Return the context of a run in `folder` that serves MODEL."""
    return RunContext(
        config=ServeConfig(**settings),
        model_dir=str(model),
        model_hash="0",
        run_dir=str(folder),
        incarnation=1,
        secret="00" * 32,
        served_model_names=(MODEL,),
    )


class Script(Protocol):
    """Answers in the engine's thread. `send` goes to the frontend that has sent last."""

    def receive(self, message: Message, send: Send) -> None:
        """Answer a message other than `Hello`."""

    def turn(self, send: Send) -> None:
        """Do the due work every `turn_s`."""


class ScriptedEngine:
    """Speaks the wire's protocol on the sockets of a run, in a thread; a heartbeat follows each turn."""

    def __init__(
        self, run: RunContext, script: Script, vocab_size: int, *, max_num_seqs: int, turn_s: float = 0.1
    ) -> None:
        self._run, self._script, self._turn_s = run, script, turn_s
        self._ready = EngineReady(
            pid=_PID,
            model_hash=run.model_hash,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=vocab_size,
            eos_token_ids=[0],
            default_sampling={},
            max_num_seqs=max_num_seqs,
            max_num_queued_reqs=4 * max_num_seqs,
            num_blocks=1,
            block_size=16,
            device="cpu",
            dtype="float32",
            weights_bytes=1,
            kv_bytes=1,
        )
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
        peer, due, turn = b"", time.monotonic(), 0

        def send(message: Message) -> None:
            router.send_multipart([peer, wire.encode(message, self._run.incarnation)])

        while not self._stop.is_set():
            if router.poll(max(0, round(1000 * (due - time.monotonic())))):
                peer, frame = router.recv_multipart()
                message = wire.decode(frame, wire.ToEngine)[1]
                if isinstance(message, Hello):
                    send(self._ready)
                else:
                    self._script.receive(message, send)
            if time.monotonic() >= due:
                due, turn = due + self._turn_s, turn + 1
                beats.send(wire.encode(Heartbeat(_PID, turn, False), self._run.incarnation))
                self._script.turn(send)
        context.destroy(linger=0)


class Overloaded:
    """Answers nothing and reports a load behind which every request would wait for a minute."""

    def receive(self, message: Message, send: Send) -> None:
        """Ignore requests that came before the load was reported."""

    def turn(self, send: Send) -> None:
        backlog = Backlog(weight=1.0, running=64, waiting=60, tokens=6000, request_tokens=100)
        load = Load(time.monotonic(), 2.0, 0.5, 200, 64, 1.0, 100, {"": backlog})
        send(Stats(0, 64, 60, 0, 0, 1, 0, 0, 0, 0, 0, 0, {}, 0.0, load=load))


class Lockstep:
    """Waits until `streams` requests are there; then each step gives every one its next token, `step_s` after the step
    before.

    tokens: repeated as often as `max_tokens` of the first request asks. `on_step(number)` is called before each step.
    """

    def __init__(self, tokens: Sequence[int], *, streams: int, step_s: float, on_step: Callable[[int], None]) -> None:
        self._tokens, self._streams, self._step_s, self._on_step = tokens, streams, step_s, on_step
        self._waiting: list[Generate] = []

    def receive(self, message: Message, send: Send) -> None:
        if isinstance(message, Generate):
            send(Admitted(message.request_id))
            self._waiting.append(message)
            if len(self._waiting) == self._streams:
                self._answer(send)

    def turn(self, send: Send) -> None:
        """Nothing is due between the crowds."""

    def _answer(self, send: Send) -> None:
        """Give all that wait their tokens. Steps keep their pace, however long sending takes."""
        waiting, self._waiting = self._waiting, []
        steps = waiting[0].sampling.max_tokens
        due = time.monotonic()
        for step in range(steps):
            self._on_step(step)
            token, ends = self._tokens[step % len(self._tokens)], step == steps - 1
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
            send(Outputs(outputs))
            due += self._step_s
            time.sleep(max(0.0, due - time.monotonic()))
