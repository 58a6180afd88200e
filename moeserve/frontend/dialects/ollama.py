"""The dialect of Ollama's API, `/api/...`: requests into internal ones, answers as lines of JSON, errors."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from moeserve.frontend import limits
from moeserve.frontend.dialects import bodies, chat, fields
from moeserve.frontend.dialects.chat_parts import (
    CalledFunction,
    ChatMessage,
    MessageCall,
    arguments_of,
    made_up_id,
    placeholder,
)
from moeserve.frontend.dialects.formats import checked_size
from moeserve.frontend.dialects.internal import (
    ChatPrompt,
    Delta,
    Formatter,
    GenerateRequest,
    ModelFacts,
    OutputFormat,
    Usage,
    Writing,
)
from moeserve.frontend.errors import ApiError, invalid, too_many, unknown_model, unsupported
from moeserve.frontend.text import TextTokenizer

_LATEST = ":latest"
_UNLOAD = re.compile(r"0+(\.0*)?[a-zµ]*")
_THINKING = ("enable_thinking", "thinking")  # the variables of templates whose models can answer without thoughts
_NO_OPTIONS = msgspec.Raw(b"{}")


class OllamaFunction(msgspec.Struct):
    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class OllamaCall(msgspec.Struct):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


class OllamaOptions(msgspec.Struct):
    """The options that an answer depends on here; those for the server's hardware are passed over."""

    num_predict: Annotated[int, Meta(ge=-2, le=limits.MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=limits.MAX_TEMPERATURE)] | None = None
    top_k: fields.TokensOrAll | None = None
    top_p: fields.ShareAboveZero | None = None
    min_p: fields.Share | None = None
    seed: Annotated[int, Meta(ge=limits.MIN_SEED, le=limits.MAX_SEED)] | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=limits.MAX_REPETITION_PENALTY)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-limits.MAX_PENALTY, le=limits.MAX_PENALTY)] | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    model: str | None = None
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: msgspec.Raw = msgspec.field(default_factory=lambda: _NO_OPTIONS)
    think: bool | str | None = None
    keep_alive: str | float | None = None


class OllamaChatBody(OllamaBody, kw_only=True):
    messages: list[OllamaMessage] | None = None
    tools: list[chat.ToolBody] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    template: str | None = None
    context: list[int] | None = None


# The fields of a generation that would change its prompt, and are refused unless they are empty.
REFUSED = ("images", "template", "context")


def parse_chat(data: bytes, model: ModelFacts) -> GenerateRequest:
    """Return the internal request. Raise ApiError with the status that the client gets."""
    asked, ignored = bodies.decode_json(data, OllamaChatBody)
    return _chat_request(asked, _chat_messages(asked.messages or []), asked.tools, model, ignored)


def parse_generate(data: bytes, model: ModelFacts) -> GenerateRequest:
    """Return the internal request of a text: of a chat with one message unless it is `raw`. Raise ApiError."""
    asked, ignored = bodies.decode_json(data, OllamaGenerateBody)
    for name in REFUSED:
        if getattr(asked, name):
            raise unsupported(name)
    if not asked.prompt:
        raise invalid("`prompt` must not be empty", "prompt")
    if not asked.raw:
        said = [ChatMessage("system", asked.system)] if asked.system else []
        request = _chat_request(asked, [*said, ChatMessage("user", asked.prompt)], None, model, ignored)
        (prompt,) = request.prompts
        assert isinstance(prompt, ChatPrompt)
        return replace(request, prompts=[replace(prompt, request_field="prompt")])
    if asked.system:
        raise invalid("`raw` and `system` cannot be used together: a raw prompt is all there is", "system")
    shared, passed_over = _shared(asked, model)
    body = fields.SamplingBody(**shared)
    unused = () if asked.think is None else ("think",)
    own = {"output_format": _output_format(asked.format), "ignored": (*ignored, *passed_over, *unused)}
    sampling = fields.read_sampling(body, model, None)
    return fields.read_request(body, model, [asked.prompt], body.max_tokens, sampling, **own)


def _chat_request(
    asked: OllamaBody,
    said: list[ChatMessage],
    tools: list[chat.ToolBody] | None,
    model: ModelFacts,
    ignored: tuple[str, ...],
) -> GenerateRequest:
    shared, passed_over = _shared(asked, model)
    if isinstance(asked.think, bool):
        shared["chat_template_kwargs"] = dict.fromkeys(_THINKING, asked.think)
    else:
        shared["reasoning_effort"] = fields.read_effort("think", asked.think)
    body = chat.ChatBody(messages=said, tools=tools, **shared)
    prompt = chat.read_chat_prompt(body)
    prompt = replace(prompt, switches={"think": tuple(prompt.variables)} if prompt.variables else {})
    form = _output_format(asked.format)
    return chat.read_chat_request(body, prompt, model, output_format=form, ignored=(*ignored, *passed_over))


def _shared(asked: OllamaBody, model: ModelFacts) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the fields of a body as the other dialects name them, and the options that are passed over."""
    given = asked.options if bytes(asked.options) != b"null" else _NO_OPTIONS
    options, passed_over = bodies.decode_json(bytes(given), OllamaOptions)
    shared = {
        "model": served_name(asked.model, model.names, takes_any=model.takes_any_name),
        "stream": asked.stream is not False,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
        "seed": None if options.seed == -1 else options.seed,
        "repetition_penalty": options.repeat_penalty,
        **{name: getattr(options, name) for name in ("temperature", "top_k", "top_p", "min_p", "stop")},
        **{name: getattr(options, name) for name in ("presence_penalty", "frequency_penalty")},
    }
    return shared, tuple(f"options.{name}" for name in passed_over)


def _output_format(asked: str | dict[str, Any] | None) -> OutputFormat | None:
    if not asked and not isinstance(asked, dict):
        return None
    if asked == "json":
        return OutputFormat("json_object", None, "format")
    if isinstance(asked, str):
        raise invalid('`format` must be "json" or a JSON schema', "format")
    return OutputFormat("json_schema", checked_size(asked, "format"), "format")


def _chat_messages(given: list[OllamaMessage]) -> list[ChatMessage]:
    """Return the messages as chat has them. Results without an id answer the calls before them, by name or in order."""
    said: list[ChatMessage] = []
    waiting: list[MessageCall] = []
    for index, message in enumerate(given):
        where, of_tool = f"messages[{index}]", message.role == "tool"
        images = message.images or []
        if images and not of_tool:
            raise unsupported(f"{where}.images")
        if len(images) > limits.MAX_CONTENT_PARTS:
            raise too_many(f"{where}.images", limits.MAX_CONTENT_PARTS, "images")
        texts = [message.content or "", *(placeholder("image") or "" for _ in images)]
        made = ChatMessage(message.role, "\n".join(text for text in texts if text))
        if of_tool:
            made.name = message.tool_name or message.name
            made.tool_call_id = message.tool_call_id or _answered(waiting, made.name)
        elif message.role == "assistant":
            made.reasoning_content = message.thinking
            made.tool_calls = [
                MessageCall(
                    call.id or made_up_id(index, f"{place}:{call.function.name}"),
                    function=CalledFunction(call.function.name, call.function.arguments),
                )
                for place, call in enumerate(message.tool_calls or ())
            ]
            waiting = list(made.tool_calls)
        said.append(made)
    return said


def _answered(waiting: list[MessageCall], name: str | None) -> str | None:
    """Take the first call of that name, or of any, out of those that wait; return its id."""
    for call in waiting:
        if name is None or (call.function is not None and call.function.name == name):
            waiting.remove(call)
            return call.id
    return None


def read_load(data: bytes, kind: type[OllamaBody], names: Sequence[str], *, takes_any: bool = False) -> LoadWish | None:
    """Return the wish of a body that asks for no answer, None of one that does. Raise ApiError."""
    asked, _ = bodies.decode_json(data, kind)
    if getattr(asked, "messages" if kind is OllamaChatBody else "prompt"):
        return None
    alive = asked.keep_alive
    unloads = _UNLOAD.fullmatch(alive) is not None if isinstance(alive, str) else alive == 0
    return LoadWish(served_name(asked.model, names, takes_any=takes_any), unloads)


class LoadWish(msgspec.Struct, frozen=True):
    """The wish that a model is in memory, or is not."""

    model: str
    unloads: bool

    def answer(self, kind: type[OllamaBody], created: int) -> dict[str, Any]:
        lines = ChatLines if kind is OllamaChatBody else TextLines
        head = {"model": self.model, "created_at": rfc3339(created), **lines.said("", "", [])}
        return {**head, "done": True, "done_reason": "unload" if self.unloads else "load"}


def served_name(name: str | None, names: Sequence[str], *, takes_any: bool = False) -> str:
    """Return the served name that a client means: it may add `:latest`, leave it out, or name none.

    Raise ApiError for another one, unless the service takes any.
    """
    if not name:
        return names[0]
    for meant in (name, name.removesuffix(_LATEST), name + _LATEST):
        if meant in names:
            return meant
    if takes_any:
        return name
    raise unknown_model(name, names)


def rfc3339(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def error_body(error: ApiError, _: str) -> bytes:
    """Return an error in the shape of Ollama's API: a sentence."""
    return msgspec.json.encode({"error": error.message})


def error_line(error: ApiError) -> bytes:
    """Return the line that ends a stream in an error."""
    return error_body(error, "") + b"\n"


class _Lines(Formatter, ABC):
    """Writes an answer as lines of JSON, or as one object. Calls come whole, behind the text.

    Durations are nanoseconds of this process's clock. Of an answer in one piece nobody here sees the first token:
    `eval_duration` is all of its time.
    """

    def __init__(
        self,
        answer_id: str,
        created: int,
        request: GenerateRequest,
        tokenizer: TextTokenizer,
        fingerprint: str,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._head = {"model": request.model, "created_at": rfc3339(created)}
        self._clock = clock
        self._began = clock()
        self._first: int | None = None
        self._last = Delta(0)  # calls and end

    @staticmethod
    @abstractmethod
    def said(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the fields of a part of an answer."""

    def delta(self, delta: Delta, usage: Usage) -> bytes:
        if self._first is None:
            self._first = self._clock()
        self._last.append(Delta(0, finish_reason=delta.finish_reason, calls=delta.calls))
        return self._line(self.said(delta.text, delta.reasoning, [])) if delta.text or delta.reasoning else b""

    def end(self, usage: Usage) -> bytes:
        calls = [self._line(self.said("", "", _calls(self._last)))] if self._last.calls else []
        end = {**self._head, **self.said("", "", []), **self._end(self._last, usage)}
        return b"".join([*calls, msgspec.json.encode(end), b"\n"])

    def error(self, error: ApiError) -> bytes:
        return error_line(error)

    def ping(self) -> bytes:
        return self._line(self.said("", "", []))

    def resumed(self) -> bytes:
        return b""

    def complete(self, choices: list[Delta], usage: Usage) -> Writing:
        yield from ()
        (choice,) = choices
        said = self.said(choice.text, choice.reasoning, _calls(choice))
        return msgspec.json.encode({**self._head, **said, **self._end(choice, usage)})

    def _line(self, said: dict[str, Any]) -> bytes:
        return msgspec.json.encode({**self._head, **said, "done": False}) + b"\n"

    def _end(self, choice: Delta, usage: Usage) -> dict[str, Any]:
        now = self._clock()
        first = self._began if self._first is None else self._first
        return {
            "done": True,
            "done_reason": "length" if choice.finish_reason == "length" else "stop",
            "total_duration": now - self._began,
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": first - self._began,
            "eval_count": usage.completion_tokens,
            "eval_duration": now - first,
        }


class ChatLines(_Lines):
    """Writes the answers of `/api/chat`."""

    @staticmethod
    def said(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        extra = ({"thinking": thinking} if thinking else {}) | ({"tool_calls": calls} if calls else {})
        return {"message": {"role": "assistant", "content": text, **extra}}


class TextLines(_Lines):
    """Writes the answers of `/api/generate`, which call no tools."""

    @staticmethod
    def said(text: str, thinking: str, calls: list[dict[str, Any]]) -> dict[str, Any]:
        return {"response": text, **({"thinking": thinking} if thinking else {})}


def _calls(choice: Delta) -> list[dict[str, Any]]:
    return [
        {
            "id": call.call_id,
            "function": {"index": call.place, "name": call.name, "arguments": arguments_of(call.arguments)},
        }
        for call in choice.calls
    ]
