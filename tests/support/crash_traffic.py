"""Requests of every kind that a crash of the engine must not change, and their answers in comparable form."""

from __future__ import annotations

import json
import math
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx2

_LONG = "It was the best of times, it was the worst of times; " * 8
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 40}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "describe", "parameters": _PERSON}}
_CHAT = [{"role": "user", "content": "Describe a pet."}]
# Letters and spaces, so that a stop string is found some time, and text is text.
_LETTERS = {str(token): 100.0 for token in b"abcdefgh "}


def _completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    body = {"prompt": _LONG, "max_tokens": 80, "ignore_eos": True, "temperature": 0, **fields}
    return "/v1/completions", body


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": _CHAT, "max_tokens": 80, "temperature": 1.2, "seed": 11, **fields}


# By what they are about: path and body of one request each.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": _completion(),
    "greedy stream": _completion(stream=True),
    "sampled stream": _completion(stream=True, temperature=1.3, seed=5, top_p=0.95, top_k=80, min_p=0.001),
    "penalties": _completion(
        temperature=0.8, seed=6, presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.2, stream=True
    ),
    "log probabilities": _completion(temperature=1.0, seed=7, logprobs=4, stream=True),
    "log probabilities of the prompt": _completion(temperature=1.0, seed=8, logprobs=2, echo=True, max_tokens=60),
    "stop string": _completion(temperature=1.0, seed=9, stop=["abcd"], logit_bias=_LETTERS, max_tokens=300),
    "bias and least tokens": _completion(temperature=1.0, seed=9, min_tokens=60, ignore_eos=False, stream=True),
    "several choices": _completion(temperature=1.0, seed=10, n=3, stream=True),
    "several prompts": _completion(prompt=["one", "two two"], temperature=1.0, seed=12, n=2),
    "beams": _completion(use_beam_search=True, best_of=4, n=2, logprobs=1, length_penalty=0.7, early_stopping="never"),
    "chat": _chat(stream=True, logprobs=True, top_logprobs=2, stream_options={"include_usage": True}),
    "schema": _chat(
        stream=True,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": _PERSON}},
        max_tokens=400,
    ),
    "tool call": _chat(tools=[_TOOL], tool_choice="required", stream=True, max_tokens=400),
    "pattern": _completion(temperature=1.0, seed=13, guided_regex=r"[a-f ]{50,79}", stream=True),
    "message": ("/v1/messages", {"messages": _CHAT, "max_tokens": 80, "temperature": 1.0, "stream": True}),
    "response": ("/v1/responses", {"input": "Describe a pet.", "max_output_tokens": 80, "temperature": 0.0}),
}
# Their dialect takes no seed.
UNSEEDED = {"message"}


@dataclass
class Answered:
    """The outcome of one request: its status and its body, or events, without ids, times and cache counts.

    error: of a connection that was cut. ended_at: on `time.monotonic`. resumed: the answer says that another engine
    went on with it.
    """

    status: int = 0
    content: Any = None
    num_events: int = 0
    error: str | None = None
    ended_at: float = field(default=0.0, compare=False)
    resumed: bool = field(default=False, compare=False)


@dataclass
class Traffic:
    """Requests of some kinds, all at once, each on a thread of its own.

    `admitted` is set when all streamed answers have begun, `started` with the first events of one. `key`: of the API.
    """

    base_url: str
    kinds: dict[str, tuple[str, dict[str, Any]]]
    key: str = "none"
    answers: dict[str, Answered] = field(default_factory=dict)
    admitted: threading.Event = field(default_factory=threading.Event)
    started: threading.Event = field(default_factory=threading.Event)
    _begun: list[float] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> Traffic:
        for name, (path, body) in self.kinds.items():
            self.answers[name] = Answered()
            self._threads.append(threading.Thread(target=self._ask, args=(self.answers[name], path, body)))
            self._threads[-1].start()
        return self

    def wait(self) -> dict[str, Answered]:
        for thread in self._threads:
            thread.join(100)
            assert not thread.is_alive(), "a request has no end"
        return self.answers

    @property
    def has_ended(self) -> bool:
        """Whether every request has its end."""
        return not any(thread.is_alive() for thread in self._threads)

    def _note_head(self, body: dict[str, Any]) -> None:
        if body.get("stream"):
            self._begun.append(time.monotonic())
            if len(self._begun) == sum(bool(body.get("stream")) for _, body in self.kinds.values()):
                self.admitted.set()

    def _ask(self, answered: Answered, path: str, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {self.key}"}
        try:
            with (
                httpx2.Client(base_url=self.base_url, timeout=90, headers=headers) as client,
                client.stream("POST", path, json={"model": "m", **body}) as response,
            ):
                answered.status = response.status_code
                self._note_head(body)
                if not body.get("stream") or response.status_code != 200:
                    whole = json.loads(response.read())
                    answered.content = comparable(whole)
                    answered.resumed = (whole.get("usage") or {}).get("resumed", False)
                    return
                answered.content = []
                for line in response.iter_lines():
                    answered.resumed |= line == ": resumed"
                    if line.startswith("data: {"):
                        answered.content.append(comparable(json.loads(line.removeprefix("data: "))))
                        answered.num_events += 1
                        if answered.num_events == 5:
                            self.started.set()
        except httpx2.HTTPError as error:
            answered.error = repr(error)
        finally:
            answered.ended_at = time.monotonic()
            if isinstance(answered.content, list):
                # Choices of one answer need not take turns.
                answered.content.sort(key=choice_of)


def comparable(value: Any) -> Any:
    """Return a JSON value without what differs from request to request, or by what the cache holds."""
    if isinstance(value, dict):
        differs = {"id", "created", "created_at", "completed_at", "cached_tokens", "cache_read_input_tokens", "item_id"}
        # Of a service that moves experts it names the placement, which a new life may begin with another one.
        differs |= {"system_fingerprint"}
        differs.add("resumed")
        return {key: comparable(item) for key, item in value.items() if key not in differs}
    return [comparable(item) for item in value] if isinstance(value, list) else value


def choice_of(event: dict[str, Any]) -> float:
    """Return the number of an event's choice; events without one come last."""
    choices = event.get("choices")
    return float(choices[0]["index"]) if choices else math.inf


def errors_in(answered: Answered) -> list[Any]:
    """Return the error events of a stream, or the error of a whole answer."""
    events = answered.content if isinstance(answered.content, list) else [answered.content]
    return [event["error"] for event in events if isinstance(event, dict) and event.get("error") is not None]
