"""The internal request that every dialect is read into, and the pieces of answers that all are written from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from moeserve.plan import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What reading a request needs to know of the model. `default_sampling` holds the checkpoint's own defaults."""

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
    """What a client asked for, whichever the dialect.

    Every prompt gives `n` choices; choice `p * n + j` is sample j of prompt p. `max_tokens` None is the remainder of
    the context, `seed` None draws one; what `sampling` holds for these two does not count. `ignored` names the fields
    that were not understood.
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
        """The field that the prompts came in."""
        return "messages" if isinstance(self.prompts[0], ChatPrompt) else "prompt"


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of an answer: `offset` is where its text begins, in characters from the start of the choice's text."""

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class Delta:
    """What one choice gained. `tokens` is filled only where log probabilities were asked for."""

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
        """What precedes the first delta of a choice, possibly nothing."""
        ...

    def delta(self, delta: Delta, usage: Usage | None) -> bytes:
        """The event of one delta; `usage` is given where it was asked for with every event."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The last event before `[DONE]`, where the client asked for usage."""
        ...

    def complete(self, choices: list[Delta], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        ...
