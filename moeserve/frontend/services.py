"""The services that the routes of one frontend share."""

from __future__ import annotations

import asyncio
import os
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from moeserve.frontend.admission import Admission, most_choices
from moeserve.frontend.dialects.fields import EFFORT
from moeserve.frontend.dialects.internal import ModelFacts
from moeserve.frontend.dialects.responses_items import Earlier, Named
from moeserve.frontend.errors import ApiError, key_gone, unavailable
from moeserve.frontend.held import HeldBytes
from moeserve.frontend.http import content_coding, receive_body, until_disconnect
from moeserve.frontend.keys import Identity
from moeserve.frontend.live import LiveStats, Process
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.parsers.counting import Thoughts
from moeserve.frontend.parsers.shape import PLAIN, OutputShape, choose_shape, model_type_of
from moeserve.frontend.prepare.prepare import Preparer
from moeserve.frontend.prepare.templates import read_sources
from moeserve.frontend.prepare.text_messages import Ask, Kind, NeedsEarlier, Reply, Watch
from moeserve.frontend.prepare.text_processes import TextProcesses, check_model_texts
from moeserve.frontend.relay.engine_client import EngineClient
from moeserve.frontend.relay.request_group import (
    CrashSuspect,
    EngineAsleep,
    EngineBusy,
    EngineGone,
    EngineSilent,
    KeyGone,
)
from moeserve.frontend.text import TextTokenizer
from moeserve.run_context import RunContext
from moeserve.scheduling.pacing import service_slo
from moeserve.settings.generation import parse_effort_budgets
from moeserve.wire import ControlResult, Rest, Stats, Tick

_RETRY_WHILE_LOADING_S = 5.0
_RETRY_ELSEWHERE_S = 10.0

# Variables of chat templates that switch thinking, or say how much of it is wanted.
_SWITCHES = ("enable_thinking", "thinking", EFFORT)

# Returns the kept items with these names.
Lend = Callable[[Named], Awaitable[Earlier]]


class Services:
    """The shared services of one frontend's routes."""

    def __init__(
        self,
        run: RunContext,
        tokenizer: TextTokenizer,
        shape: OutputShape = PLAIN,
        num_dropped_lines: Callable[[], int] = lambda: 0,
        news_fd: int | None = None,
        number: int = 0,
        switches: frozenset[str] = frozenset(),
        drain_logs: Callable[[float], bool] = lambda _: True,
    ) -> None:
        """shape: how the model writes reasoning and calls. num_dropped_lines: of this process's logs, for a metric.
        news_fd: see `EngineClient`. number: of this frontend in the service, from 0. switches: variables of
        the chat template that switch thinking. drain_logs: see `UsageBook`."""
        self.run = run
        self.number = number
        self.drain_logs = drain_logs
        # Set by an operator who asks to read the keys and the public prefixes again.
        self.asked_to_reload = asyncio.Event()
        self.tokenizer = tokenizer
        self.shape = shape
        self.switches = switches
        self.thoughts = Thoughts(tokenizer, shape, run.config)
        self.metrics = Metrics(
            num_dropped_lines,
            lambda: self.engine.num_restarts,
            run.shared_metrics,
            is_awake=lambda: self.engine.rest is Rest.AWAKE,
        )
        self.live = LiveStats(self.metrics, process=self._process)
        self.engine = EngineClient(run, self._on_stats, news_fd)
        config = run.config
        inline = Preparer(tokenizer, shape, Watch())
        self.text = TextProcesses(Path(run.model_dir), config.tool_call_parser, config.reasoning_parser, inline)
        self.held = HeldBytes()
        # Held by the answer that works in a turn of the event loop, if it has a long prompt or many log probabilities.
        self.long_answers = asyncio.Lock()
        self.slo = service_slo(run.config)
        self.stats: Stats | None = None
        self.admission = Admission(self.metrics.rejections, random.random, num_frontends=run.config.num_frontends)
        self._draining = False
        self._wishes: Counter[Rest] = Counter()
        self._num_submitted_before = 0
        self.created = int(time.time())
        # Each frontend draws seeds of its own.
        self._seeds = random.Random(run.config.seed + (number << 64))
        self._facts: ModelFacts | None = None

    @classmethod
    def load(
        cls,
        run: RunContext,
        num_dropped_lines: Callable[[], int] = lambda: 0,
        news_fd: int | None = None,
        number: int = 0,
        drain_logs: Callable[[float], bool] = lambda _: True,
    ) -> Services:
        """Read the checkpoint's tokenizer and template. Raise ModelError if they cannot be used."""
        folder = Path(run.model_dir)
        check_model_texts(folder)
        tokenizer = TextTokenizer.from_file(folder / "tokenizer.json")
        sources = read_sources(folder)
        parsers = run.config.tool_call_parser, run.config.reasoning_parser
        shape = choose_shape(sources, model_type_of(folder), *parsers, tokenizer.added_ids)
        switches = frozenset(name for name in _SWITCHES if any(re.search(rf"\b{name}\b", text) for text in sources))
        return cls(run, tokenizer, shape, num_dropped_lines, news_fd, number, switches, drain_logs)

    async def start(self) -> None:
        """Connect to the engine without waiting, and start the text processes, so that no request does."""
        await self.engine.start()
        self.text.start()

    async def stop(self) -> None:
        """Leave the engine and end the processes beside this one."""
        await self.engine.stop()
        await self.text.stop()

    def begin_drain(self) -> None:
        self._draining = True

    @property
    def is_draining(self) -> bool:
        """Return whether new generations are refused because this process is to end."""
        return self._draining

    def not_ready_reason(self) -> str | None:
        """Return why no generation would be admitted now, or None."""
        if self._draining:
            return "draining"
        engine = self.engine
        if engine.dead_reason is not None or (engine.away_reason is not None and engine.rest is Rest.AWAKE):
            return engine.dead_reason or engine.away_reason
        return self.admission.overload() if engine.ready is not None else "the model is loading"

    def check_serving(self) -> ModelFacts:
        """Return the model's facts. Raise ApiError (503) unless generations are admitted."""
        if self._draining:
            raise unavailable("The server is shutting down", "draining", _RETRY_ELSEWHERE_S, close=True)
        if self.engine.dead_reason is not None:
            raise unavailable("The engine is not running", "engine_dead", _RETRY_ELSEWHERE_S)
        # Requests wait for the end of a short pause, and of a sleep, which they end themselves.
        is_away = self.engine.away_reason is not None and self.engine.rest is Rest.AWAKE
        if is_away and self.engine.restart_seconds > self.run.config.engine_timeout:
            raise unavailable("The engine is being restarted", "engine_restarting", self.engine.restart_seconds)
        ready = self.engine.ready
        if ready is None:
            raise unavailable("The model is still loading", "loading", _RETRY_WHILE_LOADING_S)
        if self._facts is None or self._facts.max_model_len != ready.max_model_len:
            self._facts = ModelFacts(
                names=self.run.served_model_names,
                max_model_len=ready.max_model_len,
                vocab_size=ready.vocab_size,
                eos_token_ids=tuple(ready.eos_token_ids),
                default_sampling=ready.default_sampling,
                max_logprobs=self.run.config.max_logprobs,
                keeps_states=ready.keeps_states,
                moves_kv=self.run.config.kv_transfer_config is not None,
                drafts=ready.drafts,
                default_max_tokens=ready.default_max_tokens,
                longest_answer=ready.longest_answer,
                mapped_efforts=tuple(parse_effort_budgets(self.run.config.reasoning_effort_budgets)),
                takes_any_name=self.run.takes_any_name,
            )
        return self._facts

    async def reach(self, rest: Rest) -> None:
        """Wish that the service sleeps (once it has no request) or wakes, as long as the caller waits. Return when it
        does.

        Raise EngineGone if no engine will come any more.
        """
        self._wishes[rest] += 1
        try:
            await self.engine.until_rest(rest)
        finally:
            self._wishes[rest] -= 1

    def tick(self) -> Tick:
        """Return the state that the supervisor needs."""
        engine = self.engine
        is_new, self._num_submitted_before = engine.num_submitted != self._num_submitted_before, engine.num_submitted
        tick = Tick(0)
        if self.not_ready_reason() is None:
            tick |= Tick.READY
        if is_new or engine.num_requests or self.admission.in_flight:
            tick |= Tick.BUSY
        if self._wishes[Rest.ASLEEP]:
            tick |= Tick.SLEEP
        if engine.rest is not Rest.AWAKE and (self._wishes[Rest.AWAKE] or engine.num_requests):
            tick |= Tick.WAKE
        return tick

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the engine that computes answers. Before one was ready, that of the model."""
        ready = self.engine.ready
        return f"fp_{(self.run.model_hash if ready is None else ready.fingerprint)[:12]}"

    @property
    def capacity(self) -> int:
        """The number of choices that the engine runs and queues."""
        ready = self.engine.ready
        return ready.max_num_seqs + ready.max_num_queued_reqs if ready is not None else 0

    async def command(self, name: str, arguments: dict[str, Any] | None = None, tenant: str = "") -> ControlResult:
        """Return the engine's answer to a command (`EngineClient.control`). Raise ApiError where none comes."""
        try:
            return await self.engine.control(name, arguments, tenant)
        except EngineGone as error:
            raise engine_unavailable(error) from error

    def _process(self) -> Process:
        """Return the memory of the engine's process, as the system counts it, and how often one was restarted."""
        ready, memory = self.engine.ready, None
        if ready is not None and self.engine.away_reason is None:
            with suppress(OSError, ValueError, IndexError):
                pages = int(Path(f"/proc/{ready.pid}/statm").read_text().split()[1])
                memory = pages * os.sysconf("SC_PAGESIZE")
        return Process(memory, self.engine.num_restarts)

    def draw_seed(self) -> int:
        return self._seeds.getrandbits(63)

    def _on_stats(self, stats: Stats) -> None:
        self.stats = stats
        self.metrics.on_stats(stats)
        self.live.on_stats(stats)
        if stats.load is not None:
            self.admission.on_load(stats.load)

    async def prepare(
        self,
        kind: Kind,
        body: bytes,
        identity: Identity,
        *,
        coding: bytes | None = None,
        reports: bool = False,
        lend: Lend | None = None,
    ) -> Reply:
        """Return the prepared request of a caller's body, or the error that its client gets.

        coding: in which the body came. reports: the answer tells about the prompt cache. lend: gives the earlier
        responses that the body refers to. Raise ApiError (503) while the model loads.
        """
        ask = Ask(
            kind,
            self.check_serving(),
            owner=identity.digest,
            tells_salts=identity.is_admin,
            reports=reports,
            coding=coding,
            max_bytes=self.run.config.max_request_bytes,
            max_choices=most_choices(self.capacity),
        )
        reply = await self.text.prepare(ask, body)
        if isinstance(reply, NeedsEarlier) and lend is not None:
            with self.held.hold(identity.digest) as hold:
                earlier = await lend(reply.named)
                hold.grow(earlier.num_bytes)
                reply = await self.text.prepare(msgspec.structs.replace(ask, earlier=earlier), body)
        return reply

    async def receive(self, kind: Kind, scope: Scope, receive: Receive) -> Reply:
        """Receive the body of a request; return as `prepare`. Raise ApiError, and ClientDisconnected."""
        self.check_serving()
        coding = content_coding(scope["headers"])
        body = await receive_body(scope, receive, self.run.config.max_request_bytes)
        asking = self.prepare(kind, body, scope["state"]["identity"], coding=coding)
        return await until_disconnect(receive, asking)

    async def prepare_own(self, kind: Kind, body: bytes) -> Reply:
        """Return the reply to an operator's body."""
        return await self.text.prepare(Ask(kind, self.check_serving()), body)


def engine_unavailable(error: EngineGone) -> ApiError:
    """503: the engine is gone, or it has not answered in time. 500 for a request that may have ended it."""
    message = str(error)[:1].upper() + str(error)[1:]
    match error:
        case KeyGone():
            return key_gone()
        case EngineSilent():
            return unavailable(message, "engine_silent", _RETRY_WHILE_LOADING_S)
        case EngineAsleep():
            return unavailable(message, "asleep", _RETRY_WHILE_LOADING_S)
        case EngineBusy():
            return ApiError(429, message, type="rate_limit_error", code="key_commands_full", retry_after_s=1.0)
        case CrashSuspect():
            return ApiError(500, message, type="server_error", code="engine_crash", may_retry=False)
        case _:
            return unavailable(message, "engine_dead")
