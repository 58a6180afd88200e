"""The dialects of two other servers: TGI's `/generate`, and the generate extension of Triton Inference Server.

Both continue a text. Their sampling is read into the fields that all dialects share.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, fields
from moeserve.frontend.dialects.formats import checked_size
from moeserve.frontend.dialects.internal import (
    Delta,
    Formatter,
    GenerateRequest,
    ModelFacts,
    OutputFormat,
    TokenText,
    Usage,
    Writing,
    finite,
)
from moeserve.frontend.errors import ApiError, invalid, unsupported
from moeserve.frontend.text import TextTokenizer

_TGI_MAX_TOKENS = 100  # of an answer whose request sets no bound, as TGI has it
_TRITON_MAX_TOKENS = 16  # as Triton's backend for vLLM has it
_NONE = msgspec.Raw(b"{}")
_ONE_SAMPLE = (None, 1)


class Grammar(msgspec.Struct):
    type: str
    value: Any = None


class TgiParameters(msgspec.Struct):
    best_of: int | None = None
    temperature: Annotated[float, Meta(gt=0, le=limits.MAX_TEMPERATURE)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    top_k: fields.TokensOrAll | None = None
    top_p: fields.ShareAboveZero | None = None
    typical_p: float | None = None
    do_sample: bool | None = None
    max_new_tokens: fields.Tokens | None = None
    return_full_text: bool | None = None
    stop: list[str] | None = None
    truncate: fields.Tokens | None = None
    watermark: bool | None = None
    details: bool | None = None
    decoder_input_details: bool | None = None
    seed: Annotated[int, Meta(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    top_n_tokens: int | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None


class TgiBody(msgspec.Struct):
    inputs: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: _NONE)
    stream: bool | None = None


# Parameters that would change the answer, with the values that ask for nothing.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "best_of": _ONE_SAMPLE,
    "typical_p": _ONE_SAMPLE,
    "watermark": (None, False),
    "decoder_input_details": (None, False),
    "top_n_tokens": (None, 0),
    "adapter_id": (None,),
}
_SAMPLED = ("do_sample", "temperature", "top_k", "top_p")


class _Shown(msgspec.Struct, frozen=True):
    """Fields of the request that shape the answer. details: tokens and reason are asked for. prompt: the answer begins
    with this text."""

    details: bool = False
    prompt: str = ""


def parse_tgi(data: bytes, model: ModelFacts, *, streams: bool = False) -> GenerateRequest:
    """Return the internal request of a body of TGI. Raise ApiError. streams: whatever the body says."""
    asked, ignored = bodies.decode_json(data, TgiBody)
    given, passed_over = bodies.decode_json(_raw(asked.parameters), TgiParameters)
    for name, values in _REFUSED.items():
        if getattr(given, name) not in values:
            raise unsupported(f"parameters.{name}")
    if not asked.inputs:
        raise invalid("`inputs` must not be empty", "inputs")
    stream = streams or bool(asked.stream)
    body = fields.SamplingBody(
        model=model.names[0],
        stream=stream,
        # It is greedy unless the request asks for samples.
        temperature=given.temperature if any(getattr(given, name) for name in _SAMPLED) else 0.0,
        top_p=given.top_p,
        top_k=given.top_k,
        frequency_penalty=given.frequency_penalty,
        repetition_penalty=given.repetition_penalty,
        seed=given.seed,
        stop=given.stop,
        truncate_prompt_tokens=given.truncate,
    )
    max_tokens = given.max_new_tokens or _TGI_MAX_TOKENS
    details = bool(given.details) or stream
    shown = _Shown(details, asked.inputs if given.return_full_text else "")
    return fields.read_request(
        body,
        model,
        [asked.inputs],
        max_tokens,
        fields.read_sampling(body, model, 0 if details else None),
        output_format=_grammar(given.grammar),
        repeated=msgspec.json.encode(shown),
        ignored=(*ignored, *(f"parameters.{name}" for name in passed_over)),
    )


def _grammar(asked: Grammar | None) -> OutputFormat | None:
    where = "parameters.grammar"
    if asked is None:
        return None
    if asked.type == "json" and isinstance(asked.value, dict):
        return OutputFormat("json_schema", checked_size(asked.value, where), where)
    if asked.type == "regex" and isinstance(asked.value, str):
        return OutputFormat("regex", asked.value, where)
    raise invalid(f"`{where}` must be a `json` schema or a `regex`", where)


class TritonBody(msgspec.Struct):
    """A body of Triton's generate extension. Parameters lie beside the text, or in an object of their own."""

    text_input: str | None = None
    id: str | None = None
    parameters: msgspec.Raw = msgspec.field(default_factory=lambda: _NONE)
    stream: bool | None = None
    exclude_input_in_output: bool | None = None
    max_tokens: fields.Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_p: fields.ShareAboveZero | None = None
    top_k: fields.TokensOrAll | None = None
    min_p: fields.Share | None = None
    seed: Annotated[int, Meta(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    stop_words: str | list[str] | None = None
    presence_penalty: Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    ignore_eos: bool | None = None
    min_tokens: fields.TokensOrNone | None = None


_OF_TRITON = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "ignore_eos", "min_tokens"),
)


def parse_triton(data: bytes, model: ModelFacts, *, streams: bool = False) -> GenerateRequest:
    """Return the internal request of a body of Triton. Raise ApiError. streams: whatever the body says."""
    asked, ignored = bodies.decode_json(data, TritonBody)
    beside, passed_over = bodies.decode_json(_raw(asked.parameters), TritonBody)
    if not asked.text_input:
        raise invalid("`text_input` must not be empty", "text_input")

    def given(name: str) -> Any:
        value = getattr(asked, name)
        return getattr(beside, name) if value is None else value

    stop = given("stop") or given("stop_words") or None
    chosen = {name: given(name) for name in _OF_TRITON}
    body = fields.SamplingBody(model=model.names[0], stream=streams or bool(given("stream")), stop=stop, **chosen)
    prompt = asked.text_input if given("exclude_input_in_output") is False else ""
    return fields.read_request(
        body,
        model,
        [asked.text_input],
        given("max_tokens") or _TRITON_MAX_TOKENS,
        fields.read_sampling(body, model, None),
        repeated=msgspec.json.encode(_Shown(prompt=prompt)),
        ignored=(*ignored, *(f"parameters.{name}" for name in passed_over)),
    )


def _raw(parameters: msgspec.Raw) -> bytes:
    return b"{}" if bytes(parameters) == b"null" else bytes(parameters)


parse_tgi_stream = partial(parse_tgi, streams=True)
parse_triton_stream = partial(parse_triton, streams=True)


def tgi_error(error: ApiError, _: str) -> bytes:
    """Return an error in the shape of TGI: a sentence and a kind."""
    kind = "overloaded" if error.status in (429, 503) else "validation" if error.status < 500 else "generation"
    if error.status in (401, 403):
        kind = error.type  # Clients take the kinds of TGI for faults of the body.
    return msgspec.json.encode({"error": error.message, "error_type": kind})


def triton_error(error: ApiError, _: str) -> bytes:
    """Return an error in the shape of Triton: a sentence."""
    return msgspec.json.encode({"error": error.message})


def tgi_error_event(error: ApiError) -> bytes:
    return b"data:" + tgi_error(error, "") + b"\n\n"


def triton_error_event(error: ApiError) -> bytes:
    return b"data: " + triton_error(error, "") + b"\n\n"


class TgiFormatter(Formatter):
    """Writes TGI's answers: an event for each token, the last of them with the whole text."""

    def __init__(
        self, answer_id: str, created: int, request: GenerateRequest, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._shown = msgspec.json.decode(request.repeated, type=_Shown)
        self._tokenizer = tokenizer
        self._text = self._shown.prompt
        self._count = 0

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        self._text += delta.text
        tokens = [self._token(token, "") for token in delta.tokens]
        if tokens:
            # What several tokens say together is the text of the last one.
            tokens[-1]["text"] = delta.text
        elif delta.text or delta.finish_reason:
            tokens.append({"id": 0, "text": delta.text, "logprob": None, "special": not delta.text})
        events = []
        for token in tokens:
            self._count += 1
            events.append({"index": self._count, "token": token, "generated_text": None, "details": None})
        if delta.finish_reason is not None:
            events[-1] |= {"generated_text": self._text, "details": _details(delta, usage)}
        return b"".join(b"data:" + msgspec.json.encode(event) + b"\n\n" for event in events)

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return tgi_error_event(error)

    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        yield from ()
        (choice,) = choices
        answer: dict[str, Any] = {"generated_text": self._shown.prompt + choice.text}
        if self._shown.details:
            tokens = [self._token(token, self._tokenizer.decode([token.token_id])) for token in choice.tokens]
            answer["details"] = {**_details(choice, usage), "seed": None, "prefill": [], "tokens": tokens}
        return msgspec.json.encode(answer)

    def _token(self, token: TokenText, text: str) -> dict[str, Any]:
        logprob = None if token.logprobs is None else finite(token.logprobs.logprob)
        return {"id": token.token_id, "text": text, "logprob": logprob, "special": False}


def _details(choice: Delta, usage: Usage) -> dict[str, Any]:
    reason = {"length": "length"}.get(choice.finish_reason or "", "eos_token")
    if choice.matched_stop is not None:
        reason = "stop_sequence"
    counts = {"generated_tokens": usage.completion_tokens, "input_length": usage.prompt_tokens}
    return {"finish_reason": reason, **counts}


class TritonFormatter(Formatter):
    """Writes the answers of Triton's generate extension; streamed, each event has a piece of the text."""

    def __init__(
        self, answer_id: str, created: int, request: GenerateRequest, tokenizer: TextTokenizer, fingerprint: str
    ) -> None:
        self._head = {"model_name": request.model, "model_version": "1"}
        self._prompt = msgspec.json.decode(request.repeated, type=_Shown).prompt

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        if not delta.text:
            return b""
        return b"data: " + msgspec.json.encode({**self._head, "text_output": delta.text}) + b"\n\n"

    def end(self, usage: Usage) -> bytes:
        return b""

    def error(self, error: ApiError) -> bytes:
        return triton_error_event(error)

    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        yield from ()
        (choice,) = choices
        return msgspec.json.encode({**self._head, "text_output": self._prompt + choice.text})
