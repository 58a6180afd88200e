"""What a client asked for, and what the scheduler knows of it while it runs."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum

from radix_cache import Lease


class FinishReason(StrEnum):
    """Why a request ended; exactly one is told per request."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop. Values are validated by the frontend.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and penalties 0 / 0 / 1 switch a filter off.
    `logprobs` is the number of alternatives to report beside the chosen token (0: the chosen one alone), None for none.
    `prompt_logprobs` asks the same of every prompt token and makes the request bypass cached prefixes.
    `stop_token_ids` end the request and count as output; the model's EOS ids are among them unless EOS is ignored.
    `seed` makes the draw at a position reproducible in any batch; the frontend draws one where the client gave none.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()

    @property
    def needs_history(self) -> bool:
        """Whether the draw depends on the tokens so far."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0


@dataclass(eq=False, slots=True)
class Request:
    """One request inside the scheduler, which alone mutates it.

    "Prefill" and "decode" are not states: `num_computed_tokens` catches up with `len(token_ids)`, and whatever a prefix
    hit, a chunk or a preemption does is a change of that number. `num_scheduled_tokens` are in plans whose results have
    not come yet. `lease` is None while the request waits; otherwise it is one of rank `rank`. `finished` says that it
    ended while a plan still named it, `failed` that it ended with an error. `num_prompt_logprobs` log probabilities of
    prompt tokens were reported, which survives a preemption. `annotation` is what is kept with the cached prefix, until
    a chunk carries it.
    """

    request_id: str
    token_ids: array[int]
    sampling: SamplingParams
    namespace: str = ""
    priority: int = 0
    arrival: int = 0
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_overtakers: int = 0
    num_prompt_logprobs: int = 0
    rank: int = 0
    lease: Lease | None = None
    annotation: bytes | None = None
    finished: bool = False
    failed: bool = False
    is_plain: bool = field(init=False)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)
        sampling = self.sampling
        self.is_plain = not (sampling.needs_history or sampling.min_tokens or sampling.prompt_logprobs is not None)

    @property
    def num_planned_tokens(self) -> int:
        """Tokens computed once every plan in flight is."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether log probabilities of prompt tokens are still to be reported; the first token has none."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def queue_key(self) -> tuple[int, int]:
        """Order of service: lower first."""
        return (self.priority, self.arrival)
