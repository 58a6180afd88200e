"""The internal form of requests and answers, which every dialect reads into and writes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from moeserve.plan import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts about the model that reading a request needs. `default_sampling` holds the checkpoint's defaults."""

    names: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    default_sampling: dict[str, float]
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages for the chat template; `variables` are passed to it."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A client's request, in no dialect.

    Every prompt gives `n` choices; choice `p * n + j` is sample j of prompt p. `max_tokens` None is the remainder of
    the context, `seed` None draws one; the values of these two in `sampling` do not count. `ignored` names the unknown
    fields.
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
    echo: bool = False
    priority: int = 0
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n

    @property
    def prompt_field(self) -> str:
        """The request field of the prompts."""
        return "messages" if isinstance(self.prompts[0], ChatPrompt) else "prompt"


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of an answer: `offset` is where its text begins, in characters from the start of the choice's text."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Delta:
    """New text of one choice, or its end. `tokens` is filled only if log probabilities were asked for."""

    index: int
    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Usage:
    """Token counts of an answer; `cached_tokens` of the prompt tokens came from the prefix cache."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Formatter(Protocol):
    """Writes an answer in one dialect. Events are whole SSE events."""

    def start(self, index: int) -> bytes:
        """Return the event before the first delta of a choice, possibly none."""
        ...

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        """Return the event of one delta; `usage` is given if it was asked for with every event."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """Return the last event before `[DONE]`, if the client asked for usage."""
        ...

    def complete(self, choices: list[Delta], usage: Usage) -> bytes:
        """Return the body of an answer that is not streamed."""
        ...
