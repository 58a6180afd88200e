"""The engine's loop over real sockets, with an executor that counts instead of computing."""

from __future__ import annotations

import errno
import math
import threading
import time
import uuid
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from launcher.watches import ProgressWatch
from moeserve.engine.cache_commands import CacheCommands
from moeserve.engine.commands import Commands
from moeserve.engine.crashes.judgement import LastWork
from moeserve.engine.crashes.record import WorkRecord, read_record
from moeserve.engine.crashes.suspects import Suspects, digest_of
from moeserve.engine.experts.monitor import ExpertCommandError
from moeserve.engine.file_writer import FileJob
from moeserve.engine.loop import Engine
from moeserve.engine.planner import build_parts
from moeserve.engine.socket import EngineSocket, HeartbeatThread
from moeserve.plan import ChunkResult, Computed, FinishReason, Request, SamplingParams, StepPlan, StepResult
from moeserve.scheduling.pacing import UNBOUNDED, Pace
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.steps import Steps
from moeserve.wire import (
    PROTOCOL_VERSION,
    Abort,
    Admitted,
    Continue,
    Control,
    ControlResult,
    Finish,
    FromEngine,
    Generate,
    Heartbeat,
    Hello,
    Message,
    Output,
    Outputs,
    Prompts,
    Refused,
    Rejected,
    Stats,
    Suspicion,
    Turned,
    decode,
    encode,
    pack_token_ids,
)
from radix_cache import PrefixCache
from tests.support.engine_ready import engine_ready
from tests.support.service import wait_until

INCARNATION = 7
# The number of steps that may be made; each is counted one by one.
PLENTY = 1000
PATIENCE_MS = 60_000  # for a message, of a machine that does many other things
FATAL = [9, 9, 9]  # the prompt of a request that ended engines before
READY = engine_ready(model_hash="abc", max_num_seqs=2, max_num_queued_reqs=1, block_size=4)


class CountingExecutor:
    """The next token is the last one plus one; token 50 makes its request fail. Steps wait for `gate`."""

    def __init__(self) -> None:
        self.gate = threading.Semaphore(PLENTY)
        self.device_s: float | None = None

    def launch(self, plans: Sequence[StepPlan]) -> Computed[list[StepResult]]:
        (plan,) = plans
        self.gate.acquire()
        results = []
        for chunk in plan.chunks:
            if chunk.sampling is None:
                results.append(ChunkResult())
            elif chunk.token_ids[-1] == 50:
                results.append(ChunkResult(error="not finite"))
            else:
                results.append(ChunkResult(chunk.token_ids[-1] + 1))
        waited_s = 0.0 if self.device_s is None else 0.5
        return Computed([StepResult(plan.step, results, seconds=self.device_s, waited_s=waited_s)])

    def check(self) -> None:
        """Nothing can be missing."""


class SlowDisk:
    """Stands in for the monitor of experts: its files are written once `disk` is set; that of a trace cannot be."""

    def __init__(self) -> None:
        self.disk = threading.Event()

    def samples(self) -> dict[str, Any]:
        return {}

    def command(self, name: str, arguments: dict[str, Any]) -> FileJob:
        writes = {"save_expert_statistics": self._write, "stop_expert_trace": self._fail}
        if name not in writes:
            raise ExpertCommandError(f"unknown command {name!r}")
        return FileJob(writes[name], {"tokens": 4})

    def _write(self) -> None:
        self.disk.wait()

    def _fail(self) -> None:
        self.disk.wait()
        raise OSError(errno.ENOSPC, "No space left on device")


@dataclass
class Client:
    """told: the Stats that came."""

    socket: zmq.Socket[bytes]
    told: list[Stats] = field(default_factory=list)

    def send(self, message: Message, incarnation: int = INCARNATION) -> None:
        self.socket.send(encode(message, incarnation))

    def receive(self) -> Any:
        """The next message that is not Stats."""
        while isinstance(message := self._receive_any(), Stats):
            pass
        return message

    def stats_until(self, num_tokens: int) -> list[Stats]:
        """All Stats up to the second ones that tell of so many output tokens."""
        while [stats.generation_tokens for stats in self.told].count(num_tokens) < 2:
            self._receive_any()
        return self.told

    def _receive_any(self) -> Any:
        assert self.socket.poll(PATIENCE_MS), "no message came"
        incarnation, message = decode(self.socket.recv(), FromEngine)
        assert incarnation == INCARNATION
        if isinstance(message, Stats):
            self.told.append(message)
        return message

    def outputs_of(self, request_id: str) -> list[Output]:
        """All outputs of a request up to its terminal one, which must be the only such."""
        found: list[Output] = []
        while not found or found[-1].finish_reason is None:
            message = self.receive()
            if isinstance(message, Outputs):
                found += [output for output in message.outputs if output.request_id == request_id]
        return found


@dataclass
class Served:
    client: Client
    executor: CountingExecutor
    stop: threading.Event
    thread: threading.Thread
    context: zmq.Context[zmq.Socket[bytes]]
    address: str
    scheduler: Scheduler
    engine: Engine
    disk: threading.Event
    cache: PrefixCache

    def connect(self) -> Client:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(self.address)
        return Client(socket)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"inproc://{uuid.uuid4()}"
    socket = EngineSocket(context, address, INCARNATION)
    cache = PrefixCache(32, 4)
    culprit = digest_of(generate("culprit", FATAL))
    suspicion = Suspicion({"suspect": 4, "other suspect": 4}, ((culprit, math.inf),))
    suspects = Suspects(WorkRecord(tmp_path / "work", INCARNATION, 2), suspicion)
    parts = build_parts([cache], suspects.until, Pace(UNBOUNDED, 8, 2))
    limits = {"max_num_seqs": 2, "max_num_queued_reqs": 1}
    scheduler = Scheduler([cache], max_num_batched_tokens=8, max_model_len=64, **limits, parts=parts)
    executor = CountingExecutor()
    experts = SlowDisk()
    steps = Steps(scheduler, executor, 0, [suspects])
    commands = Commands(CacheCommands([cache]), experts)  # type: ignore[arg-type]
    engine = Engine(socket, steps, READY, suspects, commands, parts)
    stop = threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop,))
    served = Served(Client(None), executor, stop, thread, context, address, scheduler, engine, experts.disk, cache)  # type: ignore[arg-type]
    served.client = served.connect()
    thread.start()
    yield served
    stop.set()
    experts.disk.set()
    executor.gate.release(PLENTY)
    thread.join(60)
    assert not thread.is_alive()
    socket.close()
    context.destroy(0)


def generate(request_id: str, prompt: list[int], **sampling: Any) -> Generate:
    return Generate(request_id, pack_token_ids(prompt), SamplingParams(**{"max_tokens": 5, **sampling}))


def test_a_request_is_admitted_streams_and_ends_once(served: Served) -> None:
    served.client.send(Hello(PROTOCOL_VERSION, "abc"))
    assert served.client.receive() == READY
    served.client.send(generate("r", [10, 11, 12]))
    assert served.client.receive() == Admitted("r")
    outputs = served.client.outputs_of("r")
    assert [output.token_ids for output in outputs] == [[13], [14], [15], [16], [17]]
    assert outputs[-1].finish_reason == FinishReason.LENGTH
    assert outputs[-1].num_output_tokens == 5


def test_who_asks_hears_how_far_its_prompt_is_before_each_step_and_nobody_else_does(served: Served) -> None:
    other = served.connect()
    for client, name, asks in ((served.client, "asks", True), (other, "other", False)):
        client.send(msgspec.structs.replace(generate(name, [10] * 20, max_tokens=1), reports_progress=asks))
        messages: list[Any] = [client.receive()]
        while not isinstance(messages[-1], Outputs):
            messages.append(client.receive())
        told = [message for message in messages if isinstance(message, Prompts)]
        assert messages == [Admitted(name), *told, messages[-1]]
        counts = [(p.request_id, p.num_tokens, p.num_computed) for prompts in told for p in prompts.prompts]
        assert counts == ([("asks", 20, 0), ("asks", 20, 8), ("asks", 20, 16)] if asks else [])


def test_another_protocol_or_model_is_refused(served: Served) -> None:
    served.client.send(Hello(PROTOCOL_VERSION + 1, "abc"))
    assert isinstance(served.client.receive(), Refused)
    served.client.send(Hello(PROTOCOL_VERSION, "xyz"))
    assert isinstance(served.client.receive(), Refused)


def test_garbage_and_frames_of_another_life_harm_nobody(served: Served) -> None:
    served.client.socket.send(b"\xc1\xff\x00")
    served.client.socket.send_multipart([b"a", b"b", b"c"])
    served.client.send(generate("old", [1]), incarnation=INCARNATION - 1)
    served.client.send(generate("r", [10]))
    assert served.client.receive() == Admitted("r")
    assert len(served.client.outputs_of("r")) == 5


@pytest.mark.parametrize("prompt", [[], [100], [-1]])
def test_token_ids_out_of_vocabulary_are_rejected(served: Served, prompt: list[int]) -> None:
    served.client.send(generate("r", prompt))
    rejected = served.client.receive()
    assert isinstance(rejected, Rejected)
    assert rejected.code == "invalid"


def test_what_never_fits_is_rejected_with_both_counts(served: Served) -> None:
    served.client.send(generate("r", [1] * 60, max_tokens=30))
    rejected = served.client.receive()
    assert rejected.code == "context_length_exceeded"
    assert "maximum context length is 64 tokens" in rejected.reason
    assert "60 in the prompt" in rejected.reason


def test_a_full_queue_rejects_with_a_time_to_retry_and_an_abort_makes_room(served: Served) -> None:
    served.executor.gate = threading.Semaphore(0)
    for name in ("a", "b", "c", "d"):
        served.client.send(generate(name, [10], max_tokens=50))
    answers = [served.client.receive()]
    served.executor.gate.release(3)
    while len(answers) < 4:
        message = served.client.receive()
        if not isinstance(message, Outputs):
            answers.append(message)
    rejected = [answer for answer in answers if isinstance(answer, Rejected)]
    assert [(r.request_id, r.code) for r in rejected] == [("d", "queue_full")]
    assert rejected[0].retry_after_s is not None
    assert rejected[0].retry_after_s >= 1.0
    served.client.send(Abort("c"))
    served.executor.gate.release(PLENTY)
    assert served.client.outputs_of("c")[-1].finish_reason == FinishReason.ABORT


def test_finish_keeps_what_the_frontend_counts(served: Served) -> None:
    served.executor.gate = threading.Semaphore(3)
    served.client.send(generate("r", [10], max_tokens=60))
    assert served.client.receive() == Admitted("r")
    while not isinstance(served.client.receive(), Outputs):
        pass
    served.client.send(Finish("r", 1))
    served.executor.gate.release(PLENTY)
    last = served.client.outputs_of("r")[-1]
    assert last.finish_reason == FinishReason.STOP
    assert last.num_output_tokens == 1


def test_a_turn_is_retained_once_its_frontend_tells_that_it_calls_tools(served: Served) -> None:
    for name, has_tools in (("plain", False), ("turn", True)):
        ask = generate(name, list(range(1, 14)), stop_token_ids=(16,))
        served.client.send(msgspec.structs.replace(ask, has_tools=has_tools))
        assert served.client.outputs_of(name)[-1].finish_reason == FinishReason.STOP
        assert served.cache.retentions.num_blocks == 0
        served.client.send(Turned(name))
    wait_until(lambda: served.cache.retentions.num_blocks == 3)


def test_a_led_request_waits_behind_each_token_until_its_client_lets_it_go_on(served: Served) -> None:
    served.client.send(msgspec.structs.replace(generate("led", [10], max_tokens=2), led=True))
    assert served.client.receive() == Admitted("led")
    assert served.client.receive() == Outputs([Output("led", [11], None, 0)])
    served.client.send(generate("free", [20], max_tokens=3))
    assert [output.token_ids for output in served.client.outputs_of("free")] == [[21], [22], [23]]
    served.client.send(Continue(["led"]))
    assert [output.token_ids for output in served.client.outputs_of("led")] == [[12]]


def test_a_failing_request_fails_alone(served: Served) -> None:
    served.client.send(generate("bad", [49]))
    served.client.send(generate("good", [10]))
    bad = served.client.outputs_of("bad")
    assert bad[-1].finish_reason == FinishReason.ERROR
    assert bad[-1].error == "not finite"
    served.client.send(generate("next", [49, 3]))
    assert served.client.outputs_of("next")[-1].finish_reason == FinishReason.LENGTH


def test_outputs_go_to_who_asked(served: Served) -> None:
    other = served.connect()
    other.send(generate("theirs", [20], max_tokens=2))
    served.client.send(generate("mine", [10], max_tokens=2))
    assert [o.token_ids for o in other.outputs_of("theirs")] == [[21], [22]]
    assert [o.token_ids for o in served.client.outputs_of("mine")] == [[11], [12]]


def test_requests_of_a_frontend_that_is_gone_give_their_memory_back_and_others_go_on(served: Served) -> None:
    other = served.connect()
    for client in (other, served.client):
        client.send(Hello(PROTOCOL_VERSION, "abc"))
        assert client.receive() == READY
    served.executor.gate = threading.Semaphore(2)
    other.send(generate("theirs", [20, 21], max_tokens=60))
    other.send(generate("theirs too", [30, 31], max_tokens=60))
    other.send(generate("theirs that waits", [40, 41], max_tokens=60))
    assert [other.receive().request_id for _ in range(1)] == ["theirs"]
    other.socket.close()
    served.executor.gate.release(10**6)
    wait_until(lambda: served.scheduler.is_idle)
    # There is room for it at once.
    served.client.send(generate("mine", [10], max_tokens=2))
    assert served.client.receive() == Admitted("mine")
    assert [o.token_ids for o in served.client.outputs_of("mine")] == [[11], [12]]
    cache = served.cache
    assert cache.counts.num_leased == 0
    assert cache.counts.num_free + cache.counts.num_cached == 32


def test_frontends_hear_of_each_queue_time_once(served: Served) -> None:
    other = served.connect()
    for client in (other, served.client):
        client.send(Hello(PROTOCOL_VERSION, "abc"))
        assert client.receive() == READY
    for number in range(3):
        served.client.send(generate(f"r{number}", [10], max_tokens=2))
        served.client.outputs_of(f"r{number}")
    told = [stats for client in (other, served.client) for stats in client.stats_until(6)]
    assert sum(len(stats.queue_seconds) for stats in told) == 3


def test_pacing_learns_what_the_device_took_and_the_hosts_waits_are_counted(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[float] = []
    monkeypatch.setattr(served.scheduler, "count_step", learnt.append)
    served.executor.device_s = 1000.0
    served.client.send(Hello(PROTOCOL_VERSION, "abc"))
    served.client.send(generate("r", [10], max_tokens=4))
    last = served.client.stats_until(4)[-1]
    assert learnt == [1000.0] * 4
    assert last.features["moeserve_device_wait_seconds"] == [[2.0]]
    assert last.step_seconds < 1000


def test_the_prefix_cache_can_be_reset(served: Served) -> None:
    served.client.send(generate("r", list(range(10, 22)), max_tokens=2))
    served.client.outputs_of("r")
    served.client.send(Control(3, "drop_prefixes", {"namespace": None}))
    assert served.client.receive() == ControlResult(3, {"blocks_freed": 3})
    served.client.send(Control(4, "format_disk"))
    assert served.client.receive().error is not None


def test_a_request_goes_on_behind_the_output_of_an_earlier_life(served: Served) -> None:
    rest = generate("r", [10, 11], max_tokens=5)
    served.client.send(msgspec.structs.replace(rest, output_token_ids=pack_token_ids([12, 13, 14])))
    assert served.client.receive() == Admitted("r")
    outputs = served.client.outputs_of("r")
    assert [output.token_ids for output in outputs] == [[15], [16]]
    assert (outputs[-1].finish_reason, outputs[-1].num_output_tokens) == (FinishReason.LENGTH, 5)
    assert served.scheduler.counters.prompt_tokens == 0


@pytest.mark.parametrize("output", [[1, 2, 3, 4, 5], [100], [-1]])
def test_an_earlier_output_that_cannot_be_is_rejected(served: Served, output: list[int]) -> None:
    rest = generate("r", [10, 11], max_tokens=5)
    served.client.send(msgspec.structs.replace(rest, output_token_ids=pack_token_ids(output)))
    assert served.client.receive().code == "invalid"


def last_work(tmp_path: Path) -> LastWork:
    found = read_record(tmp_path / "work", INCARNATION)
    assert found is not None
    return found


def test_the_requests_of_a_step_are_on_record_while_it_is_computed(served: Served, tmp_path: Path) -> None:
    served.executor.gate = threading.Semaphore(0)
    served.client.send(generate("a", [10, 11], max_tokens=2))
    wait_until(lambda: last_work(tmp_path).named == {"a": 2})
    served.executor.gate.release(1)
    wait_until(lambda: last_work(tmp_path).named == {"a": 3})
    served.executor.gate.release(PLENTY)
    served.client.outputs_of("a")
    wait_until(lambda: last_work(tmp_path).named == {})


def test_one_suspect_at_a_time_is_in_a_step_and_all_pass(served: Served, tmp_path: Path) -> None:
    served.executor.gate = threading.Semaphore(0)
    for name in ("suspect", "other suspect"):
        served.client.send(generate(name, [10, 11, 12], max_tokens=6))
    wait_until(lambda: last_work(tmp_path).named == {"suspect": 3})
    assert [name for name, _ in last_work(tmp_path).trials] == ["suspect"]
    assert last_work(tmp_path).suspects == {"suspect": 4, "other suspect": 4}
    served.executor.gate.release(PLENTY)
    served.client.outputs_of("other suspect")
    wait_until(lambda: last_work(tmp_path) == LastWork({}, [], {}))


def test_a_request_that_ended_engines_is_refused(served: Served) -> None:
    for resumes, message in ((False, "had this request before"), (True, "2 times")):
        again = msgspec.structs.replace(generate("again", FATAL, seed=7), resumes=resumes)
        served.client.send(again)
        rejected = served.client.receive()
        assert isinstance(rejected, Rejected)
        assert rejected.code == "engine_crash"
        assert message in rejected.reason
    assert served.scheduler.is_idle


def test_an_engine_that_is_stopped_says_no_more_about_open_requests(served: Served) -> None:
    served.executor.gate = threading.Semaphore(2)
    served.client.send(generate("r", [10], max_tokens=60))
    assert served.client.receive() == Admitted("r")
    while not isinstance(served.client.receive(), Outputs):
        pass
    served.stop.set()
    served.executor.gate.release(PLENTY)
    served.thread.join(60)
    last: list[Output] = []
    while served.client.socket.poll(0):
        _, message = decode(served.client.socket.recv(), FromEngine)
        last += message.outputs if isinstance(message, Outputs) else []
    assert all(output.finish_reason is None for output in last)


def test_an_idle_engine_goes_on_turning(served: Served) -> None:
    first = served.engine.heartbeat()
    assert not first.busy
    deadline = time.monotonic() + 60
    while served.engine.heartbeat().progress < first.progress + 2:
        assert time.monotonic() < deadline, "the loop stands still"


def test_a_write_that_hangs_holds_up_no_request_and_no_second_write_begins(served: Served) -> None:
    served.client.send(Control(1, "save_expert_statistics", {}))
    served.client.send(generate("r", [10], max_tokens=2))
    assert served.client.outputs_of("r")[-1].finish_reason == FinishReason.LENGTH
    served.client.send(Control(2, "save_expert_statistics", {}))
    refused = served.client.receive()
    assert (refused.control_id, refused.error) == (2, "A file is still being written for an earlier command.")
    served.disk.set()
    assert served.client.receive() == ControlResult(1, {"tokens": 4})


def test_a_file_that_cannot_be_written_is_told_to_its_asker(served: Served) -> None:
    served.disk.set()
    served.client.send(Control(1, "stop_expert_trace", {}))
    assert served.client.receive().error == "The file cannot be written (No space left on device)."


class SteppingExecutor(CountingExecutor):
    """Its steps are over once `gate` is open; `parts` counts what they have done so far."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.parts = 0
        self.begun = threading.Event()

    def launch(self, plans: Sequence[StepPlan]) -> Computed[list[StepResult]]:
        self.begun.set()
        return super().launch(plans)


def test_a_step_that_makes_progress_is_no_hang_and_one_that_stands_still_is(served: Served) -> None:
    executor, limits = SteppingExecutor(), {"max_num_seqs": 2, "max_num_queued_reqs": 1, "max_model_len": 64}
    scheduler = Scheduler([served.cache], max_num_batched_tokens=8, **limits)
    steps = Steps(scheduler, executor, depth=0, progress=lambda: executor.parts)
    # This engine's loop stays in its step; its socket serves the other engine.
    commands = Commands(CacheCommands([served.cache]))
    engine = Engine(served.engine._socket, steps, READY, served.engine._suspects, commands)
    scheduler.add(Request("r", array("i", [10]), SamplingParams(max_tokens=1)))
    step = threading.Thread(target=steps.advance)
    step.start()
    assert executor.begun.wait(60)
    watch = ProgressWatch(10.0, 0.0)
    for now in range(0, 60, 3):
        executor.parts += 1
        watch.observe(engine.heartbeat(), float(now))
        assert watch.verdict(float(now)) is None
    verdicts = []
    for now in range(60, 72, 3):
        watch.observe(engine.heartbeat(), float(now))
        verdicts.append(watch.verdict(float(now)))
    executor.gate.release()
    step.join(60)
    assert verdicts[:-1] == [None] * 3
    assert verdicts[-1] == "busy without progress for 10 s"


def test_heartbeats_carry_the_turn(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = f"ipc://{tmp_path}/heartbeat"
    thread = HeartbeatThread(context, address, INCARNATION, lambda: Heartbeat(1, 42, True))
    subscriber = context.socket(zmq.SUB)
    subscriber.setsockopt(zmq.SUBSCRIBE, b"")
    subscriber.connect(address)
    thread.start()
    assert subscriber.poll(PATIENCE_MS)
    assert decode(subscriber.recv(), FromEngine) == (INCARNATION, Heartbeat(1, 42, True))
    thread.stop()
    context.destroy(0)


def test_token_ids_survive_the_wire() -> None:
    message = Generate("r", pack_token_ids([0, 2**31 - 1]), SamplingParams(max_tokens=1, logit_bias={3: -1.5}), "n", 2)
    incarnation, decoded = decode(encode(message, 9), Generate)
    assert (incarnation, decoded) == (9, message)
    assert array("i", [0, 2**31 - 1]).tobytes() == decoded.token_ids


def test_a_flood_of_commands_costs_a_stream_one_slice_per_step(served: Served) -> None:
    served.client.send(generate("r", list(range(10, 22)), max_tokens=2))
    served.client.outputs_of("r")
    served.executor.gate = threading.Semaphore(0)
    served.client.send(generate("stream", [10], max_tokens=40))
    assert served.client.receive() == Admitted("stream")
    for number in range(1000):
        arguments = {"namespace": "", "limit": 1000}
        served.client.send(Control(number, "list_prefixes", arguments, f"key {number % 20}"))
    served.executor.gate.release(PLENTY)
    since_output, most, answered, tokens = 0, 0, set(), 0
    while tokens < 40 or len(answered) < 1000:
        message = served.client.receive()
        if isinstance(message, Outputs):
            tokens += len(message.outputs)
            since_output = 0
        elif not message.is_refused:
            since_output += tokens < 40
            most = max(most, since_output)
            assert message.error is None
        if isinstance(message, ControlResult):
            assert message.control_id not in answered
            answered.add(message.control_id)
    assert most <= 2


def test_an_abort_passes_the_requests_that_wait_to_be_read_and_reaches_them(served: Served) -> None:
    served.executor.gate = threading.Semaphore(1)
    served.client.send(generate("first", [10], max_tokens=50))
    assert served.client.receive() == Admitted("first")
    names = [f"r{number}" for number in range(300)]
    for name in names:
        served.client.send(generate(name, [10], max_tokens=50))
    served.client.send(Abort("first"))
    served.client.send(Abort("r299"))
    served.executor.gate.release(PLENTY)
    ends: dict[str, list[str]] = {}
    order = []
    while len(ends) < 301:
        message = served.client.receive()
        if isinstance(message, Rejected):
            ends.setdefault(message.request_id, []).append(message.code)
        elif isinstance(message, Outputs):
            for output in message.outputs:
                if output.finish_reason is not None:
                    ends.setdefault(output.request_id, []).append(output.finish_reason)
                    order.append(output.request_id)
    assert all(len(reasons) == 1 for reasons in ends.values())
    assert ends["first"] == ends["r299"] == [FinishReason.ABORT]
    assert set(order[:2]) == {"first", "r299"}


class FloodedSocket:
    """Stands in for the socket of an engine: a hundred messages have arrived, and heartbeats are read meanwhile."""

    def __init__(self) -> None:
        self.waiting = [Abort(f"r{number}") for number in range(100)]
        self.progress: list[int] = []
        self.engine: Engine

    def wait(self, seconds: float) -> None:
        """Something has arrived."""

    def receive(self) -> tuple[bytes, Message] | None:
        self.progress.append(self.engine.heartbeat().progress)
        return (b"f", self.waiting.pop()) if self.waiting else None

    def send(self, receiver: bytes, message: Message) -> bool:
        return True


def test_heartbeats_tell_the_progress_within_a_turn(tmp_path: Path) -> None:
    socket, stop = FloodedSocket(), threading.Event()
    cache = PrefixCache(32, 4)
    scheduler = Scheduler([cache], max_num_seqs=2, max_num_batched_tokens=8, max_num_queued_reqs=1, max_model_len=64)

    class Stopping(CountingExecutor):
        def check(self) -> None:
            stop.set()

    steps = Steps(scheduler, Stopping(), depth=0)
    suspects = Suspects(WorkRecord(tmp_path / "work", INCARNATION, 2), Suspicion())
    socket.engine = Engine(socket, steps, READY, suspects, Commands(CacheCommands([cache])))  # type: ignore[arg-type]
    socket.engine.run(stop)
    assert len(set(socket.progress)) == 101
