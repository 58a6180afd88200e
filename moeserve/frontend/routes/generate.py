"""The routes that generate, in every dialect: one HTTP request from its body to the end of its answer."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Receive, Scope, Send

from moeserve.frontend import limits
from moeserve.frontend.admission import Held, read_terms
from moeserve.frontend.dialects import chat, completions, messages_answer, prefixes
from moeserve.frontend.dialects.internal import Delta, Formatter, GenerateRequest, ModelFacts
from moeserve.frontend.http import (
    OVERLOADED,
    ApiError,
    EventStream,
    context_length_exceeded,
    invalid,
    receive_body,
    send_body,
    unavailable,
    until_disconnect,
    with_headers,
)
from moeserve.frontend.keys import cache_namespace
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.prepare.encodings import content_coding
from moeserve.frontend.prepare.messages import Kind, Prepared, expect
from moeserve.frontend.relay.answer import Answer, build_generates
from moeserve.frontend.relay.cache_report import asks_for_report
from moeserve.frontend.relay.request_group import EngineGone, RequestGroup, RequestRejected
from moeserve.frontend.services import Lend, Services, engine_unavailable
from moeserve.frontend.text import TextTokenizer, prompt_tail
from moeserve.frontend.wills import Will
from moeserve.plan import FinishReason, Terms
from moeserve.thoughts import ThoughtBudget
from moeserve.wire import Generate, Output, Rejected

_BACKGROUND = b'"background"'  # a body without it asks for nothing in the background
_MAX_HEADER_CHARS = 200
_TOKENS_AT_ONCE = 256  # with log probabilities, in one write
_JSON = (b"content-type", b"application/json")
# Of answers, where the server did less than it was asked: see docs/clients.md.
TELLING_HEADERS = ("x-moeserve-ignored", "x-moeserve-dropped-tools", "x-moeserve-max-tokens")
# A comment in a stream that goes on in another life of the engine: usage tells of it only where it is asked for.
_RESUMED = b": resumed\n\n"
_PROCESS_ENDED = unavailable("The process that had this request ended: send it again", "http_process_ended", close=True)
# The status of a stream waits for its first token at most this many times the seconds between comments. While it
# waits, a request that is dropped can still be refused.
_STATUS_WAITS = 1.5


# Keeps an answer; takes and returns the bytes with which it ends.
Keep = Callable[[Formatter, bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Dialect:
    """The parts of one API: how its requests are prepared, the prefix of its answer ids, how it writes answers.

    lend: gives what a request refers to. cut: the event that ends a stream of unknown content. keep: is given
    the last bytes of an answer, returns them, or others, once the answer is kept.
    """

    kind: Kind
    id_prefix: str
    formatter: Callable[[str, int, GenerateRequest, TextTokenizer, str], Formatter]
    lend: Lend | None = None
    cut: Callable[[ApiError], bytes] = ApiError.event
    keep: Keep | None = None


CHAT = Dialect("chat", "chatcmpl-", chat.ChatFormatter)
COMPLETIONS = Dialect("completions", "cmpl-", completions.CompletionFormatter)
MESSAGES = Dialect("messages", "msg_", messages_answer.MessageFormatter, cut=messages_answer.error_event)
WARM = Dialect("warm", "warm-", prefixes.WarmFormatter)


class GenerateRoute:
    """The ASGI endpoint of a dialect."""

    def __init__(self, services: Services, dialect: Dialect) -> None:
        self._services = services
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        services, admission = self._services, self._services.admission
        services.check_serving()
        coding = content_coding(scope["headers"])
        body = await receive_body(scope, receive, services.run.config.max_request_bytes)
        facts = services.check_serving()
        # Overload is told before any work is done for the request, so before it is read.
        may_be_background = coding is not None or _BACKGROUND in body
        unread = read_terms(scope, services.run.secret, services.slo, background=may_be_background)
        will = Will.of(scope)
        leave_refusal(will, scope, _PROCESS_ENDED)
        asking = services.prepare(
            self._dialect.kind, body, scope, reports=asks_for_report(scope), lend=self._dialect.lend
        )
        del body
        try:
            with admission.hold(1, services.capacity, unread) as held:
                prepared = expect(await until_disconnect(receive, asking), Prepared)
                send = self._warn(scope, send, prepared.request)
                terms = self._change(scope, held, prepared.request)
                await until_disconnect(receive, self._serve(scope, send, prepared, facts, terms, will))
        finally:
            asking.close()
            will.revoke()

    def _change(self, scope: Scope, held: Held, request: GenerateRequest) -> Terms:
        """Hold the places of a request that was read; return its terms. Raises ApiError."""
        services = self._services
        terms = read_terms(scope, services.run.secret, services.slo, request.priority, background=request.background)
        services.admission.change(held, request.num_choices, services.capacity, terms)
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
        self, scope: Scope, send: Send, prepared: Prepared, facts: ModelFacts, terms: Terms, will: Will
    ) -> None:
        services, state = self._services, scope["state"]
        request = prepared.request
        answer_id = self._dialect.id_prefix + secrets.token_hex(12)
        generates = build_generates(
            request,
            prepared.prompts,
            request_id=answer_id,
            namespace=cache_namespace(services.run.secret, state["identity"], request.cache_salt),
            seed=services.draw_seed() if request.seed is None else request.seed,
            max_model_len=facts.max_model_len,
            wishes=prepared.wishes,
            terms=terms,
            arrived_at=state["arrival"],
            thought=self._thought_budget(prepared),
            session=_session_of(scope, request),
        )
        send = _tell_cut(send, request, generates)
        answer = Answer(
            request,
            prepared.prompts,
            services.tokenizer,
            services.shape,
            prepared.prompt_texts,
            thoughts=services.thoughts,
        )
        progress = Progress(services.metrics, state["arrival"], request.num_choices)
        turns: Turns = services.long_answers if request.shows_prompts else nullcontext()
        formatter = self._dialect.formatter(
            answer_id, int(time.time()), request, services.tokenizer, services.fingerprint
        )
        try:
            async with AsyncExitStack() as stack:
                group = await self._submit(stack, generates, facts)
                progress.admit()
                stack.callback(_note_deaths, group, state["log"])
                if request.stream:
                    scope.setdefault("extensions", {})["moeserve.half_closed"] = group.interrupt
                    stream = EventStream(send, will, self._dialect.cut(_PROCESS_ENDED))
                    await _Streaming(group, answer, formatter, progress, stream, turns, self._dialect.keep).run()
                else:
                    choices = await _whole(group, answer, progress, turns)
                    content = await _completed(formatter, choices, answer, services.long_answers)
                    if self._dialect.keep is not None:
                        content = await self._dialect.keep(formatter, content)
                    will.revoke()
                    await send_body(send, 200, content)
        except ApiError as error:
            if error.code == OVERLOADED and error.retry_after_s is None:
                raise services.admission.late(terms) from None
            raise
        finally:
            progress.end(answer, state["log"])

    def _thought_budget(self, prepared: Prepared) -> ThoughtBudget | None:
        """Return the bound for the thoughts of an answer. Only chats have thoughts, and a chat has one prompt."""
        services, request = self._services, prepared.request
        if not services.shape.thinks(request):
            return None
        start = services.shape.start_of(request, prompt_tail(services.tokenizer, prepared.prompts[0]))
        return services.thoughts.budget(request, start)

    async def _submit(self, stack: AsyncExitStack, generates: list[Generate], facts: ModelFacts) -> RequestGroup:
        """Send the requests to the engine and wait until it has admitted all of them."""
        try:
            group = await stack.enter_async_context(self._services.engine.submit(generates))
            await group.admitted()
        except EngineGone as error:
            raise engine_unavailable(error) from error
        except RequestRejected as error:
            raise self._rejection(error.rejected, generates, facts) from None
        return group

    def _rejection(self, rejected: Rejected, generates: list[Generate], facts: ModelFacts) -> ApiError:
        admission, terms, wait_s = self._services.admission, generates[0].terms, rejected.retry_after_s
        match rejected.code:
            case "queue_full":
                return admission.full(terms, wait_s)
            case "overloaded":
                return admission.late(terms, wait_s)
            case "draining":
                return unavailable("The server is shutting down", "draining", wait_s or 1.0, close=True)
            case "context_length_exceeded":
                index = next(i for i, generate in enumerate(generates) if generate.request_id == rejected.request_id)
                tokens = len(generates[index].token_ids) // 4
                return context_length_exceeded(facts.max_model_len, tokens, generates[index].sampling.max_tokens)
            case _:
                return invalid(rejected.reason[:500])


def leave_refusal(will: Will, scope: Scope, error: ApiError) -> None:
    """Leave an error as the whole answer to a request."""
    if will.connection is not None:
        will.answer(error.status, [_JSON, *error.headers()], scope["state"]["error_body"](error))


def _session_of(scope: Scope, request: GenerateRequest) -> str:
    """Return a name that the turns of a conversation share: a digest of the client's, or nothing."""
    named = next((value for name, value in scope["headers"] if name == b"x-session-id"), b"")
    found: bytes = named or (request.cache.key or "").encode()
    return hashlib.blake2b(found, digest_size=16).hexdigest() if found else ""


def _header_list(names: Sequence[str]) -> bytes:
    """Return names that a client wrote as the value of a header."""
    return re.sub(r"[^\w.,-]", "?", ",".join(dict.fromkeys(names)), flags=re.ASCII)[:_MAX_HEADER_CHARS].encode()


def _tell_cut(send: Send, request: GenerateRequest, generates: list[Generate]) -> Send:
    """Return a `send` that tells in a header to how many tokens the context has cut the output of some choice."""
    least = min(generate.sampling.max_tokens for generate in generates)
    if not request.max_tokens or least >= request.max_tokens:
        return send
    return with_headers(send, [(b"x-moeserve-max-tokens", str(least).encode())])


def _note_deaths(group: RequestGroup, log_fields: dict[str, Any]) -> None:
    """Add to the log line how often the request went on in, or ended with, another life of the engine."""
    if group.num_deaths:
        log_fields["engine_deaths"] = group.num_deaths


# Lets one long answer work in a turn of the event loop, and any number of others.
Turns = AbstractAsyncContextManager[None]


async def _whole(group: RequestGroup, answer: Answer, progress: Progress, turns: Turns) -> list[Delta]:
    """Wait for the whole answer, and return its choices."""
    choices: dict[int, Delta] = {}
    try:
        while answer.num_open:
            batch = await group.next()
            for number in range(len(batch)):
                async with turns:
                    for delta in _take(group, answer, batch[number : number + 1], progress):
                        choices.setdefault(delta.index, Delta(delta.index)).append(delta)
                    # An output may bring a whole prompt's tokens with it.
                    await asyncio.sleep(0)
    except EngineGone as error:
        raise engine_unavailable(error) from error
    return answer.best([choices[index] for index in sorted(choices)])


async def _completed(formatter: Formatter, choices: list[Delta], answer: Answer, long_answers: Turns) -> bytes:
    """Return the body of an answer. Other work of the event loop goes on between its parts."""
    writing = formatter.complete(choices, answer.usage)
    num_tokens = sum(len(choice.tokens) + len(choice.prompt) for choice in choices)
    turns: Turns = nullcontext() if num_tokens <= _TOKENS_AT_ONCE else long_answers
    while True:
        async with turns:
            try:
                next(writing)
            except StopIteration as done:
                body: bytes = done.value
                return body
            await asyncio.sleep(0)


def _take(group: RequestGroup, answer: Answer, batch: list[tuple[int, Any]], progress: Progress) -> list[Delta]:
    """Return the deltas of a batch of outputs, and tell the engine about stop strings that were found."""
    progress.note(batch)
    if group.num_deaths:
        answer.resume()
    deltas = [delta for choice, output in batch for delta in answer.take(choice, output)]
    while answer.finishes:
        group.finish(*answer.finishes.pop())
    while answer.turns:
        group.turn(*answer.turns.pop())
    return deltas


@dataclass(slots=True)
class _Streaming:
    """Sends the answer as events while it is generated."""

    group: RequestGroup
    answer: Answer
    formatter: Formatter
    progress: Progress
    stream: EventStream
    turns: Turns
    keep: Keep | None
    _started: set[int] = field(default_factory=set, init=False)
    _num_deaths: int = field(default=0, init=False)

    async def run(self) -> None:
        """Write events until every choice has ended, or until an error event.

        The status waits for the first outputs, within bounds. Raises ApiError, with nothing written, if the request
        fails or is dropped by then.
        """
        first = await self._next(_STATUS_WAITS * limits.KEEP_ALIVE_S)
        await self.stream.start()
        try:
            await self._write(first)
            while self.answer.num_open:
                await self._write(await self._next(limits.KEEP_ALIVE_S))
            end = self.formatter.end(self.answer.usage)
            await self.stream.write(end if self.keep is None else await self.keep(self.formatter, end), last=True)
        except ApiError as error:
            await self.stream.write(self.formatter.error(error), last=True)

    async def _next(self, patience_s: float) -> list[Delta] | None:
        """Return the deltas of the next outputs, None if none come in time. Raises ApiError if the request failed."""
        try:
            batch = await self.group.next(patience_s)
        except EngineGone as error:
            raise engine_unavailable(error) from error
        return _take(self.group, self.answer, batch, self.progress) if batch else None

    async def _write(self, deltas: list[Delta] | None) -> None:
        """Write the events of some deltas, a comment for None."""
        if deltas is None:
            await self.stream.write(self.formatter.ping())
            return
        events = []
        if self.group.num_deaths > self._num_deaths:
            self._num_deaths = self.group.num_deaths
            events.append(_RESUMED)
        usage, num_tokens = self.answer.usage, 0
        for delta in deltas:
            num_tokens += len(delta.tokens)
            if num_tokens > _TOKENS_AT_ONCE:
                # A prompt with its log probabilities: others go on between its parts.
                await self.stream.write(b"".join(events))
                async with self.turns:
                    await asyncio.sleep(0)
                events, num_tokens = [], 0
            if delta.index not in self._started:
                self._started.add(delta.index)
                events.append(self.formatter.start(delta.index, usage))
            events.append(self.formatter.delta(delta, usage))
        if events:
            await self.stream.write(b"".join(events))


class Progress:
    """Times of one answer, for the metrics and for the log line. `arrival` is the request's, on `time.monotonic`."""

    def __init__(self, metrics: Metrics, arrival: float, num_choices: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._latest: list[float | None] = [None] * num_choices
        self._num_admitted = self._num_ended = 0

    def admit(self) -> None:
        """Note that the engine has admitted every choice."""
        self._num_admitted = len(self._latest)

    def note(self, batch: list[tuple[int, Output]]) -> None:
        """Observe outputs that have just arrived."""
        now = time.monotonic()
        for choice, output in batch:
            if output.finish_reason is not None:
                self._num_ended += 1
                self._metrics.count_ended(output.finish_reason)
            if not output.token_ids:
                continue
            latest = self._latest[choice]
            self._latest[choice] = now
            if latest is not None:
                self._metrics.inter_token.observe((now - latest) / len(output.token_ids))
            elif self._first is None:
                self._first = now
                self._metrics.time_to_first_token.observe(now - self._arrival)

    def end(self, answer: Answer, log_fields: dict[str, Any]) -> None:
        """Observe the end of the answer, complete or not, and add its counts to the log line."""
        usage = answer.usage
        now = time.monotonic()
        if not answer.num_open:
            self._metrics.end_to_end.observe(now - self._arrival)
            self._metrics.prompt_tokens.observe(usage.prompt_tokens)
            self._metrics.generation_tokens.observe(usage.completion_tokens)
            if self._first is not None:
                self._metrics.decode_time.observe(now - self._first)
        if left := self._num_admitted - self._num_ended:
            self._metrics.count_ended(FinishReason.ABORT, left)
        log_fields |= {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": usage.completion_tokens,
            "complete": not answer.num_open,
        }
        if self._first is not None:
            log_fields["ttft_ms"] = round(1000 * (self._first - self._arrival), 1)
