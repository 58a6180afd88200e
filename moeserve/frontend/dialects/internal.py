"""The internal form of requests and answers, which every dialect reads into and writes from.

The parts of answers that dialects write alike come last: events, counts of tokens and log probabilities.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from moeserve.frontend.beam_search import BeamParams
from moeserve.frontend.errors import ApiError
from moeserve.frontend.http import DONE, KEEP_ALIVE, RESUMED
from moeserve.frontend.text import TextTokenizer
from moeserve.kv_transfer import KvTicket
from moeserve.plan import PromptProgress, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about the model that reading a request needs. `default_sampling` holds the checkpoint's defaults.

    keeps_states: prompts are resumed from snapshots of recurrent states. moves_kv: services compute prompts for each
    other. drafts: draft tokens are made, so a predicted text makes answers faster. default_max_tokens: the longest
    answer to a request that sets no bound, longest_answer: to any request; None for all that the context leaves.
    mapped_efforts: the efforts of reasoning for which the service sets a budget of thought. takes_any_name: requests
    may name any model.
    """

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    max_logprobs: int
    keeps_states: bool = False
    moves_kv: bool = False
    drafts: bool = False
    default_max_tokens: int | None = None
    longest_answer: int | None = None
    mapped_efforts: tuple[str, ...] = ()
    takes_any_name: bool = False

    def bound_of(self, max_tokens: int | None) -> int | None:
        """Return the service's own bound for an answer, None without one. max_tokens: as the request asks."""
        if max_tokens is not None or self.default_max_tokens is None:
            return self.longest_answer
        return _least(self.default_max_tokens, self.longest_answer)


def _least(first: int, *others: int | None) -> int:
    return min((first, *(other for other in others if other is not None)))


@dataclass(frozen=True, slots=True)
class InputForm:
    """The form of a custom tool's input: a regular expression for the whole text. where: the request field that has
    it."""

    pattern: str
    where: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call.

    parameters: the JSON schema of its arguments, None for any object. strict: hold every call to the schema, also where
    the model is free to call or not. input_form: of the one text of a custom tool, None for any text.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False
    input_form: InputForm | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """A client's rule for calls: `none` forbids them, `auto` leaves them to the model, `required` demands one.

    names: the tools that the model may call; all where it is empty.
    """

    mode: Literal["none", "auto", "required"] = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Tag:
    """A part of an answer: from `trigger` on, with which `begin` begins, it is `begin`, JSON of a schema, and `end`."""

    trigger: str
    begin: str
    schema: Any
    end: str


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """A text that may hold tags. at_least_one: it holds one. stop_after_first: it ends with its first tag."""

    tags: tuple[Tag, ...]
    at_least_one: bool = False
    stop_after_first: bool = False


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form of the answer's text. `value` is a JSON schema, a pattern, a grammar, a list of texts to choose from, or
    `StructuralTags`; None for `json_object`. `where` is the request field that holds the value, for errors."""

    kind: Literal["json_object", "json_schema", "regex", "grammar", "choice", "structural_tag"]
    value: Any = None
    where: str = "response_format"


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template; `variables` and `tools` are passed to it.

    A message is a dict with `role` (system, developer, user, assistant or tool) and `content`, a text. An assistant's
    may have `reasoning_content`, and `tool_calls`: `[{"id", "type": "function", "function": {"name", "arguments"}}]`
    with arguments as an object, so that templates render them alike however the client spelled them. A tool's has
    `tool_call_id` and perhaps `name`. continue_final: the answer continues the last message's text. `request_field` is
    the field of the request that errors name. switches: the fields of the request that set variables, with the names of
    these: without effect where the template reads none of them.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    variables: dict[str, Any] = field(default_factory=dict)
    tools: tuple[Tool, ...] = ()
    continue_final: bool = False
    request_field: str = field(default="messages", compare=False)
    switches: dict[str, tuple[str, ...]] = field(default_factory=dict, compare=False)

    @property
    def continued(self) -> str | None:
        """The text that the answer continues, if it does."""
        return str(self.messages[-1]["content"]) if self.continue_final else None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """The wishes of a client for the prompt cache.

    seconds: how long to retain the whole prompt, None not to. breakpoints: (number of leading messages, seconds) of
    prefixes to retain; 0 messages are the tools alone. report: say where and why the match of the prompt ended.
    """

    seconds: float | None = None
    breakpoints: tuple[tuple[int, float], ...] = ()
    report: bool = False


@dataclass(frozen=True, slots=True)
class ThoughtOptions:
    """The wishes of a client for the thoughts of an answer.

    max_tokens: their budget, -1 for no bound, None where the client leaves it open. effort: the name of one. fields:
    the request's fields that set `max_tokens`. starts: where each prompt that is no chat leaves off; empty where its
    answer has no thoughts.
    """

    max_tokens: int | None = None
    effort: str | None = None
    fields: tuple[str, ...] = ()
    starts: tuple[Literal["reasoning", "answer"], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A client's request, in no dialect.

    Every prompt gives `n` choices; choice `p * n + j` is sample j of prompt p. `max_tokens` None is the remainder of
    the context, and a larger number is cut to that. `seed` None draws one; the values of `max_tokens` and `seed` in
    `sampling` do not count. `output_format` holds for the text of an answer that calls no tool. `background`: use what
    other requests leave. `detached`: the client fetches the answer later.
    `prediction` is the answer's text as the client expects it.
    `ignored` names the unknown fields, `dropped_tools` the kinds of built-in tools that were
    asked for and do not exist here; `repeated` is JSON that the dialect writes for its own answer, `own_items` a JSON
    list of the items that are kept beside a response. `bound` is the most tokens that the service lets the answer have
    (`ModelFacts.bound_of`).

    `max_tokens` 0 asks for nothing but the prompt. `echo` puts the prompt before the text, of a chat the text that is
    continued. `best` is how many of the `n` choices of each prompt the client gets, by the best mean log
    probability; all where it is None. `prompt_logprobs` asks for that many alternatives to each prompt token.
    `truncate` is how many tokens at the end of each prompt are kept. `include_stop` leaves the stop string in the text,
    `skip_special_tokens` special tokens out of it. A prompt is computed only if at least the share
    `cache_hit_threshold` of it is cached: otherwise its choices end as `cache_threshold`. For
    `offers_kv` and `ticket` see `Generate`. `reports_progress`: a stream tells how far its prompts are. `beams`:
    search for the `n` likeliest texts.
    """

    model: str
    prompts: list[ChatPrompt | str | list[int]]
    sampling: SamplingParams
    max_tokens: int | None
    seed: int | None
    n: int = 1
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    reports_progress: bool = False
    echo: bool = False
    priority: int = 0
    background: bool = False
    detached: bool = False
    cache_salt: str = ""
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    output_format: OutputFormat | None = None
    cache: CacheOptions = CacheOptions()
    cache_hit_threshold: float = 0.0
    offers_kv: bool = False
    ticket: KvTicket | None = None
    thought: ThoughtOptions = ThoughtOptions()
    prediction: str = ""
    best: int | None = None
    beams: BeamParams | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    returns_token_ids: bool = False
    truncate: int | None = None
    ignored: tuple[str, ...] = ()
    dropped_tools: tuple[str, ...] = ()
    repeated: bytes = b"{}"
    own_items: bytes = b"[]"
    bound: int | None = None

    def longest_output(self, room: int) -> int:
        """Return how many tokens a choice may have. room: tokens that the context leaves."""
        return _least(room, self.max_tokens, self.bound)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_sequences(self) -> int:
        """The number of texts that are computed at once."""
        return self.num_choices if self.beams is None else len(self.prompts) * self.beams.width

    @property
    def hears_progress(self) -> bool:
        """True if the answer tells how far its prompts are."""
        return self.reports_progress and self.stream and not self.detached

    @property
    def shows_prompts(self) -> bool:
        """True if the answer shows its prompts, and so needs their texts."""
        return self.echo or self.prompt_logprobs is not None

    @property
    def prompt_field(self) -> str:
        prompt = self.prompts[0]
        return prompt.request_field if isinstance(prompt, ChatPrompt) else "prompt"


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of an answer: `offset` is where its text begins, in characters from the start of the choice's text."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class ToolCallPart:
    """A part of one tool call: the first has `call_id` and `name`, all have a piece of the JSON of the arguments.

    `place` counts the calls of a choice from 0.
    """

    place: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(slots=True)
class Delta:
    """New parts of one choice, in the order reasoning, text, calls; or its end.

    `tokens` is filled only if log probabilities were asked for, `prompt` only in a last delta, if log probabilities of
    the prompt were; `token_ids` and, in a first delta, `prompt_token_ids`, only if these were. `finish_reason` is
    `stop`, `length` or `tool_calls`; `matched_stop` is the stop string that made the end.
    """

    index: int
    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None
    reasoning: str = ""
    calls: list[ToolCallPart] = field(default_factory=list)
    matched_stop: str | None = None
    prompt: list[TokenText] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    prompt_token_ids: list[int] | None = None

    def append(self, later: Delta) -> None:
        """Add what the choice said later, its end with it. Calls become whole."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.tokens += later.tokens
        self.prompt += later.prompt
        self.token_ids += later.token_ids
        self.prompt_token_ids = self.prompt_token_ids or later.prompt_token_ids
        self.finish_reason = later.finish_reason
        self.matched_stop = later.matched_stop
        for part in later.calls:
            if part.name:
                self.calls.append(ToolCallPart(part.place, part.arguments, part.call_id, part.name))
            else:
                self.calls[part.place].arguments += part.arguments


@dataclass(slots=True)
class Usage:
    """Token counts of an answer; `cached_tokens` of the prompt tokens came from the prefix cache, `reasoning_tokens` of
    the completion tokens were reasoning. `cache_report`: what `CacheOptions.report` asked for, of one prompt or, as a
    list, of several. `resumed`: an engine ended while it had the request, and another one went on with it.
    `tier_tokens` of the cached tokens came from the host's memory below a GPU's, and from disk; None where the cache
    is in memory alone. `ticket`: for the KV of the prompt, which is held for another service. Tokens of the client's
    prediction that were tried are accepted if they came, else rejected."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    cache_report: dict[str, Any] | list[dict[str, Any]] | None = None
    resumed: bool = False
    tier_tokens: tuple[int, int] | None = None
    ticket: KvTicket | None = None
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    @property
    def handed_over(self) -> dict[str, Any]:
        """The field of an answer with which another service fetches the prompt's KV, if it is held."""
        return {} if self.ticket is None else {"kv_transfer_params": self.ticket.params()}

    @property
    def extensions(self) -> dict[str, Any]:
        """The fields of the usage that no dialect has of its own, as far as there is something to say."""
        found: dict[str, Any] = {} if self.cache_report is None else {"cache_report": self.cache_report}
        if self.tier_tokens is not None:
            found["cached_tokens_details"] = by_tier(self.cached_tokens, self.tier_tokens)
        if self.resumed:
            found["resumed"] = True
        return found


def by_tier(num_cached: int, tier_tokens: tuple[int, int]) -> dict[str, int]:
    """Return cached tokens by the tier that had them. On a CPU the device is the host's own memory, and `host` is 0."""
    on_host, on_disk = tier_tokens
    return {"device": num_cached - on_host - on_disk, "host": on_host, "disk": on_disk}


# Yields between pieces of work, and returns the text.
Writing = Generator[None, None, bytes]


class Formatter(ABC):
    """Writes one answer in one dialect. Events are whole SSE events, or lines, any number of them in one value."""

    def start(self, index: int, usage: Usage) -> bytes:
        """Return the events before the first delta of a choice; for the first, the answer's first events too."""
        return b""

    @abstractmethod
    def delta(self, delta: Delta, usage: Usage) -> bytes:
        """Return the events of one delta. usage: so far."""

    @abstractmethod
    def end(self, usage: Usage) -> bytes:
        """Return the last events, when every choice has ended."""

    def error(self, error: ApiError) -> bytes:
        """Return the events that end a stream in an error."""
        return error.event()

    def ping(self) -> bytes:
        """Return an event, or a comment, that keeps the connection open."""
        return KEEP_ALIVE

    def progress(self, index: int, progress: PromptProgress) -> bytes:
        """Return the event that tells how far the prompt of a choice is; nothing where the dialect has none."""
        return b""

    def resumed(self) -> bytes:
        """Return the event that tells that another engine went on with the answer."""
        return RESUMED

    @abstractmethod
    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        """Return the body of an answer that is not streamed. Yields between parts of it, so that a long one lets others
        go on."""


WRITTEN_AT_ONCE = 256  # tokens with log probabilities
_LEAST_LOGPROB = -9999.0


class EventWriter:
    """Writes server-sent events with one object each, as chat and completions have them.

    The common fields of an answer are encoded once. Usage is in the last event or in every event if the client asked
    for that.
    """

    def __init__(self, head: dict[str, Any], request: GenerateRequest) -> None:
        """head: the fields before the choices."""
        self._head = b"data: " + msgspec.json.encode(head)[:-1]
        self._include_usage, self._continuous_usage = request.include_usage, request.continuous_usage
        self._tail = b',"usage":null}\n\n' if request.include_usage else b"}\n\n"

    def choice(
        self,
        index: int,
        content: bytes,
        logprobs: bytes = b"null",
        finish: str | None = None,
        usage: Usage | None = None,
        beside: bytes = b"",
    ) -> bytes:
        """Return the event of one choice. content: JSON of one or more fields, `"name":value`; logprobs: JSON.
        beside: JSON of fields beside the choices, each with a comma before it."""
        return b'%b,"choices":[{"index":%d,%b,"logprobs":%b,"finish_reason":%b}]%b%b' % (
            self._head,
            index,
            content,
            logprobs,
            b"null" if finish is None else b'"' + finish.encode() + b'"',
            beside,
            _usage_tail(usage, is_last=False) if usage is not None and self._continuous_usage else self._tail,
        )

    def progress(self, index: int, content: bytes, progress: PromptProgress) -> bytes:
        """Return the event of a prompt on its way, as llama.cpp has it. content: see `choice`."""
        tail = b',"prompt_progress":' + progress_json(progress) + self._tail
        return b'%b,"choices":[{"index":%d,%b,"finish_reason":null}]%b' % (self._head, index, content, tail)

    def end(self, usage: Usage) -> bytes:
        return (self._head + b',"choices":[]' + _usage_tail(usage) if self._include_usage else b"") + DONE


def progress_json(progress: PromptProgress) -> bytes:
    """Return llama.cpp's `prompt_progress`, and how long the rest is predicted to take."""
    counts = {"total": progress.num_tokens, "cache": progress.num_cached, "processed": progress.num_computed}
    times = {"time_ms": round(1000 * progress.seconds), "left_ms": round(1000 * progress.seconds_left)}
    return msgspec.json.encode({**counts, **times})


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Return the `usage` object of chat and of completions."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": min(usage.accepted_prediction_tokens, usage.completion_tokens),
            "rejected_prediction_tokens": usage.rejected_prediction_tokens,
        },
        **usage.extensions,
    }


def written(tokens: Sequence[TokenText], entry: Callable[[TokenText], Any]) -> Generator[None, None, msgspec.Raw]:
    """Return the JSON of a list with an entry for each token. Yields between parts of it."""
    parts = []
    for start in range(0, len(tokens), WRITTEN_AT_ONCE):
        if start:
            yield
        part = [entry(token) for token in tokens[start : start + WRITTEN_AT_ONCE]]
        parts.append(msgspec.json.encode(part)[1:-1])
    return msgspec.Raw(b"[" + b",".join(parts) + b"]")


def logprob_entry(token: TokenText, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return a token with its log probability and the likeliest tokens, as chat and Responses have it."""

    def alternative(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": data.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(data)}

    logprobs = token.logprobs
    entry = alternative(token.token_id, logprobs.logprob if logprobs else 0.0)
    return {**entry, "top_logprobs": [alternative(*found) for found in (logprobs.top if logprobs else ())]}


def prompt_logprobs(tokens: Sequence[TokenText], tokenizer: TextTokenizer) -> Generator[None, None, msgspec.Raw]:
    """Return the log probabilities of a prompt: for each token null, or an object of alternatives by token id."""
    return written(tokens, lambda token: None if token.logprobs is None else _by_id(token, token.logprobs, tokenizer))


def _by_id(token: TokenText, logprobs: TokenLogprobs, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the likeliest tokens with their ranks, and the prompt's own one first; its rank is null below them."""
    ranks = {token_id: rank for rank, (token_id, _) in enumerate(logprobs.top, start=1)}
    found = {token.token_id: logprobs.logprob} | dict(logprobs.top)
    return {
        str(token_id): {
            "logprob": finite(logprob),
            "rank": ranks.get(token_id),
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob in found.items()
    }


def _usage_tail(usage: Usage, *, is_last: bool = True) -> bytes:
    """Return the end of an event with the counts so far; the cache report is in the last one alone."""
    counts = openai_usage(usage)
    if not is_last:
        counts.pop("cache_report", None)
    return b',"usage":' + msgspec.json.encode(counts) + b"}\n\n"


def finite(logprob: float) -> float:
    """Return a number that JSON can hold: a masked token has -inf, for which clients get -9999."""
    return max(logprob, _LEAST_LOGPROB)
