"""One prepared request and its answer: messages to the engine, times on the way, events and whole answers back."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

from moeserve.frontend.account import Spent
from moeserve.frontend.beam_search import BeamParams
from moeserve.frontend.beams import Beams
from moeserve.frontend.dialects import chat, completions, messages, ollama, responses_answer, tgi
from moeserve.frontend.dialects.internal import Delta, Formatter, GenerateRequest, ModelFacts, Usage
from moeserve.frontend.dialects.responses_items import RESPONSE_PREFIX
from moeserve.frontend.errors import ApiError, context_length_exceeded, invalid, longest_output, unavailable
from moeserve.frontend.held import Hold
from moeserve.frontend.keys import Identity, cache_namespace
from moeserve.frontend.metrics import Metrics
from moeserve.frontend.prepare.text_messages import Kind, Prepared
from moeserve.frontend.relay.answer import Answer
from moeserve.frontend.relay.request_group import EngineGone, Past, RequestGroup, RequestRejected
from moeserve.frontend.services import Services, engine_unavailable
from moeserve.frontend.text import TextTokenizer, prompt_tail
from moeserve.plan import BACKGROUND_PRIORITY, DEFAULT_TERMS, FinishReason, Terms
from moeserve.thoughts import ThoughtBudget
from moeserve.wire import Generate, Output, Rejected, pack_token_ids

_SEED_MASK = 2**63 - 1
# Its arguments: the answer's id, UNIX time, the request, the tokenizer and the fingerprint of the model.
MakeFormatter = Callable[[str, int, GenerateRequest, TextTokenizer, str], Formatter]
FORMATTERS: dict[Kind, MakeFormatter] = {
    "chat": chat.ChatFormatter,
    "completions": completions.CompletionFormatter,
    "messages": messages.MessageFormatter,
    "responses": responses_answer.ResponsesFormatter,
    "ollama_chat": ollama.ChatLines,
    "ollama_generate": ollama.TextLines,
    **dict.fromkeys(("tgi", "tgi_stream"), tgi.TgiFormatter),
    **dict.fromkeys(("triton", "triton_stream"), tgi.TritonFormatter),
    "warm": chat.WarmFormatter,
}
ID_PREFIXES: dict[Kind, str] = {
    "chat": "chatcmpl-",
    "completions": "cmpl-",
    "messages": "msg_",
    "responses": RESPONSE_PREFIX,
    "ollama_chat": "ollama-",
    "ollama_generate": "ollama-",
    **dict.fromkeys(("tgi", "tgi_stream"), "tgi-"),
    **dict.fromkeys(("triton", "triton_stream"), "triton-"),
    "warm": "warm-",
}

TOKENS_AT_ONCE = 256  # with log probabilities, in one write
# The requests of an answer, or its beam searches.
Group = RequestGroup | Beams
# An output and its choice; None where another engine, or another HTTP process, took over.
Entry = tuple[int, Output] | None
# Lets one long answer work in a turn of the event loop, and any number of others.
Turns = AbstractAsyncContextManager[None]


def new_answer_id(kind: Kind) -> str:
    return ID_PREFIXES[kind] + secrets.token_hex(12)


def generates_of(
    services: Services, prepared: Prepared, facts: ModelFacts, identity: Identity, **own: Any
) -> list[Generate]:
    """Return the messages of `build_generates`; the same ones for the same arguments. Raise ApiError.

    own: `answer_id`, `seed`, `terms`, and further arguments of it.
    """
    return build_generates(
        prepared,
        namespace=cache_namespace(services.run.secret, identity, prepared.request.cache_salt),
        max_model_len=facts.max_model_len,
        thoughts=thought_budgets(services, prepared),
        **own,
    )


def build_generates(
    prepared: Prepared,
    *,
    answer_id: str,
    namespace: str,
    seed: int,
    max_model_len: int,
    terms: Terms = DEFAULT_TERMS,
    arrived_at: float | None = None,
    thoughts: Sequence[ThoughtBudget | None] | None = None,
) -> list[Generate]:
    """Return one message per choice, in their order, or per prompt for a beam search.

    Raise ApiError if a prompt does not fit.

    A larger `max_tokens` than the context or the service allows is cut to that. thoughts: of each prompt. arrived_at:
    see `Generate`.
    """
    request, wishes = prepared.request, prepared.wishes
    predicted = pack_token_ids(prepared.prediction)
    generates: list[Generate] = []
    for number, prompt in enumerate(prepared.prompts):
        packed = pack_token_ids(prompt)
        most = longest_output(len(prompt), max_model_len, request.prompt_field)
        max_tokens = max(1, request.longest_output(most))
        for sample in range(request.n if request.beams is None else 1):
            # With a client's seed, equal prompts have equal texts; without one every text is a draw of its own.
            place = len(generates) if request.seed is None else sample
            generates.append(
                Generate(
                    f"{answer_id}-{len(generates)}",
                    packed,
                    replace(request.sampling, max_tokens=max_tokens, seed=derive_seed(seed, place)),
                    namespace,
                    BACKGROUND_PRIORITY if terms.background else request.priority,
                    None if wishes is None else wishes[number],
                    terms,
                    arrived_at,
                    thought=None if thoughts is None else thoughts[number],
                    cache_hit_threshold=request.cache_hit_threshold,
                    has_tools=bool(request.tools),
                    offers_kv=request.offers_kv and not generates,  # choices share their prompt, and one ticket
                    ticket=request.ticket,
                    predicted=predicted,
                    reports_progress=request.hears_progress and not sample,  # choices share their prompt
                )
            )
    return generates


def derive_seed(seed: int, sample: int) -> int:
    """Return the seed of sample `sample`: the first one has `seed` itself, the others are independent of it."""
    if sample == 0:
        return seed & _SEED_MASK
    digest = hashlib.blake2b(f"{seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & _SEED_MASK


def thought_budgets(services: Services, prepared: Prepared) -> list[ThoughtBudget | None]:
    """Return the bounds for the thoughts of the answers to each prompt. Raise ApiError."""
    request, shape = prepared.request, services.shape
    if not shape.thinks(request):
        return [None] * len(prepared.prompts)
    budgets = []
    for number, prompt in enumerate(prepared.prompts):
        start = shape.start_of(request, prompt_tail(services.tokenizer, prompt), number)
        budgets.append(services.thoughts.budget(request, start))
    if request.beams is not None and any(budget is not None for budget in budgets):
        raise invalid("A budget of thought cannot be used together with `use_beam_search`", "use_beam_search")
    return budgets


@asynccontextmanager
async def submitted(
    services: Services,
    generates: list[Generate],
    facts: ModelFacts,
    past: Past | None = None,
    beams: BeamParams | None = None,
) -> AsyncIterator[Group]:
    """Send requests to the engine and wait until it has admitted all of them. Leaving the block aborts them.

    past: where they go on from. beams: search for the likeliest texts of each request. Raise ApiError.
    """
    group: Group
    async with AsyncExitStack() as stack:
        try:
            if beams is None:
                group = await stack.enter_async_context(services.engine.submit(generates, past))
            else:
                group = await stack.enter_async_context(Beams(services.engine, generates, beams))
            await group.admitted()
        except EngineGone as error:
            raise engine_unavailable(error) from error
        except RequestRejected as error:
            raise _rejection(services, error.rejected, generates, facts) from None
        yield group


def _rejection(services: Services, rejected: Rejected, generates: list[Generate], facts: ModelFacts) -> ApiError:
    admission, terms, wait_s = services.admission, generates[0].terms, rejected.retry_after_s
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


def answer_of(services: Services, prepared: Prepared, answer_id: str, hold: Hold) -> Answer:
    return Answer(
        prepared.request,
        prepared.prompts,
        services.tokenizer,
        services.shape,
        prepared.prompt_texts,
        thoughts=services.thoughts,
        answer_id=answer_id,
        hold=hold,
    )


def token_fields(answer: Answer) -> dict[str, Any]:
    """Return the counts of an answer for a log line."""
    usage = answer.usage
    return {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }


def spent_of(name: str, answer: Answer) -> Spent:
    """Return the tokens of an answer on the account of the key with the name."""
    usage = answer.usage
    return Spent(name, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


class Progress:
    """Times of one answer, for the metrics and for the log line. `arrival` is the request's, on `time.monotonic`."""

    def __init__(self, metrics: Metrics, arrival: float, num_choices: int) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None
        self._latest: list[float | None] = [None] * num_choices
        self._num_admitted = self._num_ended = 0

    def admit(self) -> None:
        """Record that the engine has admitted every choice."""
        self._num_admitted = len(self._latest)

    def record(self, batch: list[tuple[int, Output]]) -> None:
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

    def headers(self, answer: Answer) -> list[tuple[bytes, bytes]]:
        """Return the headers of a whole answer that say what its prompt took."""
        found = [(b"x-moeserve-cached-tokens", str(answer.usage.cached_tokens).encode())]
        if self._first is not None:
            found.append((b"x-moeserve-ttft-ms", str(round(1000 * (self._first - self._arrival))).encode()))
        return found

    def end(self, answer: Answer) -> dict[str, Any]:
        """Observe the end of the answer, complete or not; return the fields of its log line, none for an answer that
        the engine did not begin."""
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
        if not self._num_admitted:
            return {}
        fields = {**token_fields(answer), "complete": not answer.num_open}
        if self._first is not None:
            fields["ttft_ms"] = round(1000 * (self._first - self._arrival), 1)
        return fields


class Leading:
    """Leads an answer to its end, for a connection or for a journal: outputs of the engine in, deltas out."""

    def __init__(self, group: Group, answer: Answer, progress: Progress) -> None:
        """group: has been admitted."""
        self._group = group
        self._answer = answer
        self._progress = progress
        self._num_deaths = 0
        progress.admit()

    async def next(self, patience_s: float | None = None) -> list[Entry]:
        """Return the next outputs, none if none come in time. Raise ApiError where none will come."""
        try:
            batch = await self._group.next(patience_s)
        except EngineGone as error:
            raise engine_unavailable(error) from error
        if not batch:
            return []
        self._progress.record(batch)
        num_deaths, self._num_deaths = self._num_deaths, self._group.num_deaths
        return [*[None] * (self._num_deaths > num_deaths), *batch]

    def take(self, entry: Entry) -> list[Delta]:
        """Return the deltas of an entry. Tell the engine of a stop string, or of calls, that the answer has found.

        Raise ApiError for the output of a failure."""
        deltas = take_entry(self._answer, entry)
        while self._answer.finishes:
            self._group.finish(*self._answer.finishes.pop())
        while self._answer.turns:
            self._group.turn(self._answer.turns.pop())
        return deltas

    async def whole(self, turns: Turns) -> list[Delta]:
        """Wait for the whole answer, and return its choices. Raise ApiError."""
        while self._answer.num_open:
            for entry in await self.next():
                async with turns:
                    self._answer.keep(self.take(entry))
                    # An output may bring a whole prompt's tokens with it.
                    await asyncio.sleep(0)
        return self._answer.choices()


def take_entry(answer: Answer, entry: Entry) -> list[Delta]:
    """Return the deltas of an entry. Raise ApiError for the output of a failure."""
    if entry is None:
        answer.resume()
        return []
    return answer.take(*entry)


class DeltaWriter:
    """Writes the events of deltas, and before the first delta of a choice the events that begin it."""

    def __init__(self, formatter: Formatter) -> None:
        self._formatter = formatter
        self._started: set[int] = set()

    def events(self, delta: Delta, usage: Usage) -> bytes:
        if delta.index in self._started:
            return self._formatter.delta(delta, usage)
        self._started.add(delta.index)
        return self._formatter.start(delta.index, usage) + self._formatter.delta(delta, usage)


async def completed(formatter: Formatter, choices: list[Delta], answer: Answer, long_answers: Turns) -> bytes:
    """Return the body of an answer. Other work of the event loop goes on between its parts."""
    writing = formatter.complete(choices, answer.usage)
    num_tokens = sum(len(choice.tokens) + len(choice.prompt) for choice in choices)
    turns: Turns = nullcontext() if num_tokens <= TOKENS_AT_ONCE else long_answers
    while True:
        async with turns:
            try:
                next(writing)
            except StopIteration as done:
                body: bytes = done.value
                return body
            await asyncio.sleep(0)
