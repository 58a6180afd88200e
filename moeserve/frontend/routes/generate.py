"""The routes that generate, in every dialect: one HTTP request from its body to the end of its answer."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.types import Receive, Scope, Send

from moeserve.frontend import limits
from moeserve.frontend.admission import Held, read_terms
from moeserve.frontend.dialects import messages, ollama, responses_answer, tgi
from moeserve.frontend.dialects.internal import Delta, Formatter, GenerateRequest, ModelFacts
from moeserve.frontend.errors import OVERLOADED, ApiError, too_long, unavailable
from moeserve.frontend.exchange import (
    FORMATTERS,
    TOKENS_AT_ONCE,
    DeltaWriter,
    Group,
    Leading,
    Progress,
    Turns,
    answer_of,
    completed,
    generates_of,
    new_answer_id,
    spent_of,
    submitted,
)
from moeserve.frontend.held import Hold, hold_of
from moeserve.frontend.http import (
    LINE_HEADERS,
    STREAM_HEADERS,
    EventStream,
    Headers,
    Piece,
    content_coding,
    receive_body,
    send_body,
    until_disconnect,
    with_headers,
)
from moeserve.frontend.jobs.idempotency import KeyedAnswers
from moeserve.frontend.jobs.jobs import STATUS_WAITS, Jobs, JobView
from moeserve.frontend.keys import Identity, caller_of
from moeserve.frontend.prepare.text_messages import Kind, Prepared, expect
from moeserve.frontend.relay.answer import Answer, asks_for_report
from moeserve.frontend.services import Lend, Services
from moeserve.frontend.store.idempotency import Name
from moeserve.frontend.store.jobs import StoredJob
from moeserve.frontend.usage import UsageBook
from moeserve.frontend.wills import NO_WILL, Will
from moeserve.plan import Terms
from moeserve.wire import Generate

_BACKGROUND = b'"background"'  # a body without it asks for nothing in the background
_MAX_HEADER_CHARS = 200
_JSON = (b"content-type", b"application/json")
# Headers of answers with less than the request asked for: see docs/clients.md.
TELLING_HEADERS = ("x-moeserve-ignored", "x-moeserve-dropped-tools", "x-moeserve-max-tokens")
_PROCESS_ENDED = unavailable("The process that had this request ended: send it again", "http_process_ended", close=True)
_STILL_RUNS = unavailable(
    "The process that had this connection ended, the request goes on: ask for its answer again",
    "http_process_ended",
    close=True,
)

# Stores an answer. Takes its last bytes and returns the bytes to send in their place.
Keep = Callable[[Formatter, bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The parts of one API: how its requests are prepared and its answers written."""

    kind: Kind
    lend: Lend | None = None  # gives the earlier items that a request refers to
    cut: Callable[[ApiError], bytes] = ApiError.event  # the event that ends a stream of unknown content
    keep: Keep | None = None
    headers: Headers = field(default_factory=lambda: STREAM_HEADERS)  # of a stream


CHAT = Dialect("chat")
COMPLETIONS = Dialect("completions")
MESSAGES = Dialect("messages", cut=messages.error_event)
OLLAMA_CHAT = Dialect("ollama_chat", cut=ollama.error_line, headers=LINE_HEADERS)
OLLAMA_GENERATE = Dialect("ollama_generate", cut=ollama.error_line, headers=LINE_HEADERS)
TGI = Dialect("tgi", cut=tgi.tgi_error_event)
TGI_STREAM = Dialect("tgi_stream", cut=tgi.tgi_error_event)
TRITON = Dialect("triton", cut=tgi.triton_error_event)
TRITON_STREAM = Dialect("triton_stream", cut=tgi.triton_error_event)
WARM = Dialect("warm")


class GenerateRoute:
    """The ASGI endpoint of a dialect."""

    def __init__(
        self, services: Services, dialect: Dialect, jobs: Jobs, answers: KeyedAnswers, book: UsageBook
    ) -> None:
        """answers: to requests with an `Idempotency-Key`."""
        self._services = services
        self._dialect = dialect
        self._jobs = jobs
        self._answers = answers
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, admission = self._services, self._services.admission
        services.check_serving()
        coding = content_coding(scope["headers"])
        body = await receive_body(scope, receive, services.run.config.max_request_bytes)
        caller, name = caller_of(scope), _name_of(scope, body)
        if name is not None and await self._has_repeated(scope, receive, send, name):
            return
        await self._book.enter(caller)
        facts = services.check_serving()
        # Overload is answered before any work is done for the request, so before it is read.
        may_be_background = coding is not None or _BACKGROUND in body
        unread = read_terms(scope, services.run.secret, services.slo, background=may_be_background)
        will = Will.of(scope)
        leave_refusal(will, scope, _PROCESS_ENDED)
        asking = services.prepare(
            self._dialect.kind,
            body,
            scope["state"]["identity"],
            coding=coding,
            reports=asks_for_report(scope),
            lend=self._dialect.lend,
        )
        del body
        try:
            with ExitStack() as places:
                held = places.enter_context(admission.hold(1, services.capacity, unread))
                prepared = expect(await until_disconnect(receive, asking), Prepared)
                hold = hold_of(scope)
                hold.set(prepared.num_bytes)
                terms = self._change(scope, held, prepared.request)
                if prepared.request.detached:
                    places.close()
                    job = await self._begin_job(scope, prepared, facts, terms, name)
                    send = self._warn(scope, send, prepared.request)
                    del prepared
                    hold.set(0)
                    await self._show(scope, receive, send, job)
                    return
                work = partial(self._serve, scope, prepared, facts, terms)
                if name is None:
                    await until_disconnect(receive, work(hold, send, will))
                    return
                hold.set(0)
                scope["state"]["line"].set_apart()
                hold = places.enter_context(services.held.hold(caller))
                hold.set(prepared.num_bytes)
                answer = self._answers.begin(caller, name, partial(work, hold), places.pop_all())
                await give(answer, scope, receive, send, _PROCESS_ENDED, self._dialect.cut)
        finally:
            asking.close()
            will.revoke()

    async def _has_repeated(self, scope: Scope, receive: Receive, send: Send, name: Name) -> bool:
        """Answer with the answer that the key of a request has already. Return False if it has none."""
        caller = caller_of(scope)
        earlier = await self._answers.find(caller, name)
        if earlier is None:
            return False
        if isinstance(earlier, str):
            await self._show(scope, receive, send, await self._jobs.get(caller, earlier))
        else:
            await give(earlier, scope, receive, send, _PROCESS_ENDED, self._dialect.cut)
        return True

    async def _begin_job(
        self, scope: Scope, prepared: Prepared, facts: ModelFacts, terms: Terms, name: Name | None
    ) -> StoredJob:
        """Begin a response in the background; return it, or the one that was begun with the same key."""
        services, request = self._services, prepared.request
        answer_id = new_answer_id(self._dialect.kind)
        seed = services.draw_seed() if request.seed is None else request.seed
        identity: Identity = scope["state"]["identity"]
        # A prompt that does not fit is refused before there is a job.
        generates_of(services, prepared, facts, identity, answer_id=answer_id, seed=seed, terms=terms)
        return await self._jobs.create(identity.digest, prepared, terms, answer_id=answer_id, seed=seed, name=name)

    async def _show(self, scope: Scope, receive: Receive, send: Send, job: StoredJob) -> None:
        """Answer with a job: its events, or its response as it stands."""
        view = JobView(self._services, self._jobs, job, hold_of(scope))
        if view.streams:
            await give_events(view, scope, receive, send)
        else:
            await send_body(send, 200, (await view.response()).response)

    def _change(self, scope: Scope, held: Held, request: GenerateRequest) -> Terms:
        """Hold the places of a request that was read; return its terms. Raise ApiError."""
        services = self._services
        terms = read_terms(
            scope,
            services.run.secret,
            services.slo,
            request.priority,
            background=request.background,
            detached=request.detached,
        )
        services.admission.change(held, request.num_sequences, services.capacity, terms)
        return terms

    def _warn(self, scope: Scope, send: Send, request: GenerateRequest) -> Send:
        """Count fields that are ignored, and built-in tools that do not exist here; return a `send` that names both in
        headers."""
        headers = []
        self._services.metrics.count_ignored(request.ignored)
        if request.ignored:
            headers.append((b"x-moeserve-ignored", _header_list(request.ignored)))
        if request.dropped_tools:
            kinds = _header_list(request.dropped_tools)
            self._services.metrics.count_ignored(["server_tools"])
            scope["state"]["log"]["dropped_tools"] = kinds.decode()
            headers.append((b"x-moeserve-dropped-tools", kinds))
        return with_headers(send, headers) if headers else send

    async def _serve(
        self,
        scope: Scope,
        prepared: Prepared,
        facts: ModelFacts,
        terms: Terms,
        hold: Hold,
        send: Send,
        will: Will = NO_WILL,
    ) -> bool:
        """Answer a request; return whether the answer is whole. hold: counts the bytes that it takes."""
        services, state = self._services, scope["state"]
        request, identity = prepared.request, self._book.require(caller_of(scope))
        send = self._warn(scope, send, request)
        answer_id = new_answer_id(self._dialect.kind)
        generates = generates_of(
            services,
            prepared,
            facts,
            identity,
            answer_id=answer_id,
            seed=services.draw_seed() if request.seed is None else request.seed,
            terms=terms,
            arrived_at=state["arrival"],
        )
        send = _tell_cut(send, request, generates)
        answer = answer_of(services, prepared, answer_id, hold)
        progress = Progress(services.metrics, state["arrival"], request.num_choices)
        turns: Turns = services.long_answers if request.shows_prompts else nullcontext()
        formatter = FORMATTERS[self._dialect.kind](
            answer_id, int(time.time()), request, services.tokenizer, services.fingerprint
        )
        try:
            async with AsyncExitStack() as stack:
                group = await stack.enter_async_context(submitted(services, generates, facts, beams=request.beams))
                leading = Leading(group, answer, progress)
                stack.callback(_record_deaths, group, state["log"])
                if request.stream:
                    scope.setdefault("extensions", {})["moeserve.half_closed"] = group.interrupt
                    stream = EventStream(send, will, self._dialect.cut(_PROCESS_ENDED))
                    keep, headers = self._dialect.keep, self._dialect.headers
                    await _Streaming(group, leading, answer, formatter, stream, turns, keep, headers).run()
                else:
                    choices = await leading.whole(turns)
                    content = await completed(formatter, choices, answer, services.long_answers)
                    if self._dialect.keep is not None:
                        content = await self._dialect.keep(formatter, content)
                    will.revoke()
                    await send_body(send, 200, content, progress.headers(answer))
            return not answer.num_open
        except ApiError as error:
            if error.code == OVERLOADED and error.retry_after_s is None:
                raise services.admission.late(terms) from None
            raise
        finally:
            if fields := progress.end(answer):
                fields |= {"answer_id": answer_id, "request_id": state["request_id"]}
                fields |= {"key": identity.name} if identity.name else {}
                state["line"].spend(spent_of(identity.name, answer), fields)


async def give_events(view: JobView, scope: Scope, receive: Receive, send: Send, after: int = -1) -> None:
    """Answer with the events of a job behind that of a number."""
    await give(view.events(after), scope, receive, send, _STILL_RUNS, responses_answer.error_event)


async def give(
    answer: AsyncGenerator[Piece],
    scope: Scope,
    receive: Receive,
    send: Send,
    last_word: ApiError,
    cut: Callable[[ApiError], bytes],
) -> None:
    """Send an answer as it comes. last_word: the client's error if this process dies. cut: see `Dialect`."""
    will = Will.of(scope)
    stream, has_events = EventStream(send), False

    async def send_all() -> None:
        nonlocal stream, has_events
        has_begun = False
        async for headers, piece, is_last in answer:
            if not has_begun:
                has_begun, has_events = True, STREAM_HEADERS[0] in headers or LINE_HEADERS[0] in headers
                if has_events:
                    stream = EventStream(send, will, cut(last_word))
                else:
                    will.revoke()
                await stream.start(headers)
            await stream.write(piece, last=is_last)

    leave_refusal(will, scope, last_word)
    try:
        await until_disconnect(receive, send_all())
    except ApiError as error:
        if not has_events:
            raise
        await stream.write(cut(error), last=True)
    finally:
        will.revoke()
        await answer.aclose()


def _name_of(scope: Scope, body: bytes) -> Name | None:
    """Return the key that a client chose for a request, None without one. Raise ApiError for a key that is too
    long."""
    key = next((value for header, value in scope["headers"] if header == b"idempotency-key"), b"")
    if len(key) > limits.MAX_IDEMPOTENCY_KEY_CHARS:
        raise too_long("Idempotency-Key", limits.MAX_IDEMPOTENCY_KEY_CHARS, "characters")
    if not key:
        return None
    content = hashlib.sha256(scope["path"].encode() + b"\0" + body).digest()
    return Name(hashlib.sha256(key).digest(), content)


def leave_refusal(will: Will, scope: Scope, error: ApiError) -> None:
    """Leave an error as the whole answer to a request."""
    if will.connection is not None:
        will.answer(error.status, [_JSON, *error.headers()], scope["state"]["error_body"](error))


def _header_list(names: Sequence[str]) -> bytes:
    """Return names that a client wrote as the value of a header."""
    return re.sub(r"[^\w.,-]", "?", ",".join(dict.fromkeys(names)), flags=re.ASCII)[:_MAX_HEADER_CHARS].encode()


def _tell_cut(send: Send, request: GenerateRequest, generates: list[Generate]) -> Send:
    """Return a `send` that tells in a header to how many tokens the context, or the service, cuts the output of some
    choice."""
    least = min(generate.sampling.max_tokens for generate in generates)
    is_free = request.max_tokens is None and request.bound is None
    if is_free or request.max_tokens == 0 or (request.max_tokens is not None and least >= request.max_tokens):
        return send
    return with_headers(send, [(b"x-moeserve-max-tokens", str(least).encode())])


def _record_deaths(group: Group, log_fields: dict[str, Any]) -> None:
    """Add to the log line how often the request went on in, or ended with, another life of the engine."""
    if group.num_deaths:
        log_fields["engine_deaths"] = group.num_deaths


@dataclass(slots=True)
class _Streaming:
    """Sends the answer as events while it is generated."""

    group: Group
    leading: Leading
    answer: Answer
    formatter: Formatter
    stream: EventStream
    turns: Turns
    keep: Keep | None
    headers: Headers
    _writer: DeltaWriter = field(init=False)
    _has_resumed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._writer = DeltaWriter(self.formatter)

    async def run(self) -> None:
        """Write events until every choice has ended, or until an error event.

        The status waits for the first outputs, within bounds. Raise ApiError, with nothing written, if the request
        fails or is dropped by then.
        """
        first = await self._next(STATUS_WAITS * limits.KEEP_ALIVE_S)
        await self.stream.start(self.headers)
        try:
            await self._write(first)
            while self.answer.num_open:
                await self._write(await self._next(limits.KEEP_ALIVE_S))
            end = self.formatter.end(self.answer.usage)
            await self.stream.write(end if self.keep is None else await self.keep(self.formatter, end), last=True)
        except ApiError as error:
            await self.stream.write(self.formatter.error(error), last=True)

    async def _next(self, patience_s: float) -> list[Delta] | None:
        """Return the deltas of the next outputs, None if none come in time. Raise ApiError if the request failed."""
        entries = await self.leading.next(patience_s)
        if not entries:
            return None
        self._has_resumed |= None in entries
        deltas = [delta for entry in entries for delta in self.leading.take(entry)]
        if self.keep is not None:
            for delta in deltas:
                self.answer.hold(delta)
        return deltas

    async def _write(self, deltas: list[Delta] | None) -> None:
        """Write the events of some deltas; for None how far prompts are, a comment where that is not asked for."""
        if deltas is None:
            told = [self.formatter.progress(choice, at) for choice, at in self.group.take_progress()]
            await self.stream.write(b"".join(told) or self.formatter.ping())
            return
        events = []
        if self._has_resumed:
            self._has_resumed = False
            events.append(self.formatter.resumed())
        usage, num_tokens = self.answer.usage, 0
        for delta in deltas:
            num_tokens += len(delta.tokens)
            if num_tokens > TOKENS_AT_ONCE:
                # A prompt with its log probabilities: others go on between its parts.
                await self.stream.write(b"".join(events))
                async with self.turns:
                    await asyncio.sleep(0)
                events, num_tokens = [], 0
            events.append(self._writer.events(delta, usage))
        if events:
            await self.stream.write(b"".join(events))
