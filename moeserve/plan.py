"""Requests, the plan of a step and its results. A plan is complete: executing it needs no other state."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum
from math import inf
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from moeserve.kv_transfer import KvTicket
from moeserve.thoughts import ThoughtBudget
from radix_cache import Lease, Room


class FinishReason(StrEnum):
    """Why a request ended; every request gets exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    LATE = "late"  # it waited too long, and was dropped before it was computed
    CACHE_THRESHOLD = "cache_threshold"  # too little of its prompt was cached, and it was not computed


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are sampled and when to stop. The frontend validates the values.

    A `temperature` of 0, or below 1e-5, is greedy. `top_k` 0, `top_p` 1, `min_p` 0 and penalties 0 / 0 / 1 switch a
    filter off. `logprobs` is the number of alternatives to report beside the sampled token; None reports nothing.
    `prompt_logprobs` asks the same of every prompt token and makes the request bypass cached prefixes. `stop_token_ids`
    end the request and count as output; the model's EOS ids are among them unless EOS is ignored. `seed` makes the
    sample at a position reproducible in any batch; the frontend draws a seed if the client gave none. `grammar` is the
    text of a llguidance grammar that the output has to match (`moeserve.frontend.dialects.formats`); EOS may then be
    sampled only where the grammar may end, and has to be among `stop_token_ids`.
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
    grammar: str | None = None

    @property
    def penalises(self) -> bool:
        """True if logits depend on how often tokens occurred."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def needs_history(self) -> bool:
        """True if the sampled token depends on the earlier tokens."""
        return self.grammar is not None or self.penalises


@dataclass(frozen=True, slots=True)
class CacheWish:
    """The wishes of a request for the prefix cache, beside its use.

    `retentions`: (prompt tokens, seconds) of prefixes to be retained once the request has ended. `report`: explain
    where the match ended. `borders`: numbers of prompt tokens after which other prompts are likely to diverge, for
    models with recurrent states. `tells_salts`: the report may tell that the prompt is cached for the account under
    another salt.
    """

    retentions: tuple[tuple[int, float], ...] = ()
    report: bool = False
    borders: tuple[int, ...] = ()
    tells_salts: bool = False


NO_WISH = CacheWish()


# The priority of background requests, behind every priority that a client may ask for.
BACKGROUND_PRIORITY = 2**31


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms on which a request waits and runs.

    Requests of one `tenant` (the account of an API key) share the service by its `weight` among the tenants that have
    requests. `running` and `queue` are the largest shares of the running and the waiting places that it gets. Beyond
    the share `cached` of the KV blocks its cached prefixes are evicted first. `retained` is the share of the KV blocks
    that it may retain, None for the service's.

    `ttft_s` bounds the time to the first token and `tpot_s` the time per output token, None for the service's bounds. A
    `patient` request is neither refused nor dropped because of its wait. A `background` request uses capacity that
    others leave.
    """

    tenant: str = ""
    weight: float = 1.0
    running: float = 1.0
    queue: float = 1.0
    cached: float = 1.0
    retained: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    patient: bool = False
    background: bool = False


DEFAULT_TERMS = Terms()


@dataclass(frozen=True, slots=True)
class Asked:
    """A client's wishes to the parts of a service (`moeserve.scheduling.parts`)."""

    least_cached: float = 0.0  # the share of the prompt that must be cached for the request to be computed
    has_tools: bool = False  # the answer may call tools
    offers_kv: bool = False  # the blocks of the prompt are to be held for another service
    thought: ThoughtBudget | None = None  # the bound for the answer's thoughts
    predicted: array[int] = field(default_factory=lambda: array("i"))  # the answer as its client predicts it
    progress: bool = False  # the client wants to know how far its prompt is
    ticket: KvTicket | None = None  # the blocks are to be fetched from another service; None once that has begun
    cache: CacheWish = NO_WISH
    led: bool = False  # behind each token the request waits until its client lets it go on
    forks: str = ""  # the id of a led request with whose text it began, but for the last token


NOTHING_ASKED = Asked()


class PromptProgress(NamedTuple):
    """How far a prompt of `num_tokens` is: `num_computed` of them are there, of which `num_cached` were found cached.

    Its first step began `seconds` ago, the rest is predicted to take `seconds_left`.
    """

    request_id: str
    num_tokens: int
    num_cached: int
    num_computed: int
    seconds: float
    seconds_left: float


@dataclass(eq=False, slots=True)
class Request:
    """One request inside the scheduler, which alone mutates it. Parts keep what they know of it beside it.

    What each step reads of every request is a field: a look-up by id would slow large steps down.

    "Prefill" and "decode" are not states: `num_computed_tokens` catches up with `len(token_ids)`, and a prefix hit, a
    chunk or a preemption only changes that number.
    """

    request_id: str
    token_ids: array[int]  # of the prompt, then of the output
    sampling: SamplingParams
    namespace: str = ""
    priority: int = 0  # lower first
    arrival: int = 0  # the number of requests that arrived before it
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # in plans whose results have not come yet; draft tokens do not count
    num_forced_tokens: int = 0  # behind the last sampled one, which parts have forced; they are computed together
    num_cached_tokens: int = 0  # of the prompt, as its client found them
    num_uncached_tokens: int = field(init=False)  # of the prompt, when it arrived
    found_below: tuple[int, int] | None = None  # cached tokens by tier: host's memory, disk; None without tiers
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # that were reported, also over preemptions and lives of the engine
    rank: int = 0
    lease: Lease | None = None  # on `rank`; None while the request waits
    prefix_names: list[bytes] = field(default_factory=list)  # of its first blocks in the lower tier, as far as known
    no_room: Room | None = None  # what there was when it last could not run for lack of room
    finished: bool = False  # it has ended; a plan may name it still
    failed: bool = False  # it has ended with an error
    yields: bool = False  # it must leave its place as soon as no plan in flight names it
    terms: Terms = DEFAULT_TERMS
    asked: Asked = NOTHING_ASKED
    arrived_at: float = 0.0  # on the scheduler's clock
    resumes: bool = False  # an earlier life of the engine had it, so it comes before all that came since
    is_always_plain: bool = field(init=False)  # see `is_plain`
    earlier_output: InitVar[array[int] | None] = None  # of an earlier life: it goes on like a preempted request

    def __post_init__(self, earlier_output: array[int] | None) -> None:
        self.num_prompt_tokens = self.num_uncached_tokens = len(self.token_ids)
        if earlier_output:
            self.token_ids = self.token_ids + earlier_output
            self.num_preemptions = 1
        sampling = self.sampling
        self.is_always_plain = not (
            sampling.needs_history or sampling.min_tokens or sampling.prompt_logprobs is not None
        )

    @property
    def held(self) -> Lease:
        """The lease of a request that runs."""
        assert self.lease is not None
        return self.lease

    @property
    def is_in_flight(self) -> bool:
        """True if a plan in flight names the request."""
        return self.num_scheduled_tokens > 0

    @property
    def num_planned_tokens(self) -> int:
        """The number of tokens that are computed once every plan in flight is committed."""
        return self.num_computed_tokens + self.num_scheduled_tokens

    @property
    def num_pending_tokens(self) -> int:
        """The number of known tokens that no plan computes yet."""
        return len(self.token_ids) - self.num_computed_tokens - self.num_scheduled_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_plain(self) -> bool:
        """True if the request's next chunk needs nothing but its tokens, and its sampling nothing but the logits."""
        if self.is_always_plain:
            return True
        sampling = self.sampling
        is_banned = self.num_output_tokens < sampling.min_tokens
        return not (sampling.needs_history or is_banned or self.wants_prompt_logprobs)

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True if log probabilities of prompt tokens are missing; the first token has none."""
        return self.sampling.prompt_logprobs is not None and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    @property
    def keeps_its_turn(self) -> bool:
        """True if no younger request of its tenant may go first: it has begun already, or is patient."""
        return self.num_preemptions > 0 or self.terms.patient

    @property
    def queue_key(self) -> tuple[int, float, int]:
        """The order of service: lower first."""
        return (self.priority, self.arrived_at if self.resumes else inf, self.arrival)


@dataclass(slots=True)
class StateUse:
    """The recurrent state of a chunk's request. All fields are row numbers in the rank's pool of states.

    Of `num_state_slots + num_snapshots` rows the first `num_state_slots` are slots, the others snapshots.

    `slot`: the request's state slot. `load`: the row to copy into the slot before the chunk, None to go on from the
    slot (a chunk that starts at position 0 starts from the zero state). It is a snapshot, or for a chunk with drafts
    the request's slot so far, from which the request goes on if a draft is wrong. `save`: the snapshot that receives a
    copy of the slot after the chunk, None for none.
    """

    slot: int
    load: int | None = None
    save: int | None = None


@dataclass(slots=True)
class WindowTable:
    """The block table of a chunk for layers with window blocks.

    Position p lies in window block ``blocks[p // block_size - first]``; the chunk's tokens see no block before number
    `first`.
    """

    first: int
    blocks: array[int]


# Begins the error of a request whose grammar cannot be enforced; its text may be shown to the client.
GRAMMAR_FAILED = "The grammar failed: "
CANCELLED = "cancelled by an operator"  # the error of a request that `Scheduler.cancel` ends


@dataclass(slots=True)
class Chunk:
    """One request's part of a step: `token_ids` enter at position `start`, their KV goes to the slots of `block_table`.

    `sampling` is None for a chunk that does not reach the end of the request's tokens. `block_table` is the request's
    own array, which only grows while the plan is in flight. `extras` is None for most chunks.

    The last `num_drafts` of `token_ids` are guesses. The token before them and each guess is then sampled after as if
    it were the last one of a chunk without guesses (`row_chunks`). The sampled tokens count up to the first guess that
    is wrong; keys and values of wrong guesses are overwritten later. A recurrent state that has taken in a wrong guess
    is discarded, with all that the chunk has computed.

    `drawn_by` is set if the previous plan is still in flight: the chunk has one token, which is number `drawn_by` among
    the tokens that the earlier plan will sample, and `token_ids` holds a zero in its place.

    `following` is the token behind a chunk that is not sampled, where a source of drafts needs it; else None.

    `state` is None for models without recurrent states. `window` is None where layers with a sliding window use the
    block table like all other layers.
    """

    request_id: str
    token_ids: array[int]
    start: int
    block_table: array[int]
    sampling: SamplingParams | None
    extras: ChunkExtras | None = None
    drawn_by: int | None = None
    state: StateUse | None = None
    window: WindowTable | None = None
    num_drafts: int = 0
    following: int | None = None

    @property
    def num_logit_rows(self) -> int:
        """The number of last tokens that need logits: all tokens for log probabilities of the prompt."""
        if self.extras is not None and self.extras.prompt_targets:
            return len(self.token_ids)
        return self.num_sampled_rows

    @property
    def num_sampled_rows(self) -> int:
        """The number of last tokens after which a token is sampled."""
        return 0 if self.sampling is None else 1 + self.num_drafts


@dataclass(slots=True)
class ChunkExtras:
    """Further inputs, which few chunks need.

    `history` (prompt and output so far) is set if penalties depend on it; for a chunk with `drawn_by` it lacks the
    drawn token. `mask` is set if a grammar says which tokens may be sampled: bit b of byte i stands for token 8 i + b,
    tokens beyond the last byte are forbidden, and the bytes are whole words of 32 bits. `banned_token_ids` may not be
    sampled (EOS before `min_tokens`); where there is a mask, it is without them already.
    `prompt_targets` are the prompt tokens that follow the chunk's tokens and whose log probabilities are requested;
    None without a request.

    In a chunk with drafts `history` and `mask` belong to its first row. `draft_masks` are the masks of the rows after
    it, and only the first `num_banned_rows` rows are sampled without `banned_token_ids`.
    """

    history: array[int] | None = None
    num_prompt_tokens: int = 0
    banned_token_ids: tuple[int, ...] = ()
    prompt_targets: array[int] | None = None
    num_top_logprobs: int = 0
    mask: bytes | None = None
    draft_masks: tuple[bytes, ...] = ()
    num_banned_rows: int = 1


def row_chunks(chunk: Chunk) -> list[Chunk]:
    """Return, for each row of a chunk that is sampled, the chunk that it would be sampled for if nothing were guessed.

    Block tables, states and windows are not looked at when a token is sampled, so the chunks of drafts lack them.
    """
    if not chunk.num_drafts:
        return [chunk]
    extras, first = chunk.extras, len(chunk.token_ids) - chunk.num_sampled_rows
    token_ids, start = chunk.token_ids[first:], chunk.start + first
    rows = []
    for row in range(1 + chunk.num_drafts):
        of_row = None if extras is None else _row_extras(extras, row, token_ids[1 : row + 1])
        tokens = token_ids[row : row + 1]
        rows.append(Chunk(chunk.request_id, tokens, start + row, chunk.block_table, chunk.sampling, of_row))
    return rows


def _row_extras(extras: ChunkExtras, row: int, guessed: array[int]) -> ChunkExtras:
    """Return the further inputs of one row of a chunk with drafts. guessed: the drafts up to the row."""
    return ChunkExtras(
        history=None if extras.history is None else extras.history + guessed,
        num_prompt_tokens=extras.num_prompt_tokens,
        banned_token_ids=extras.banned_token_ids if row < extras.num_banned_rows else (),
        mask=extras.draft_masks[row - 1] if row and extras.draft_masks else extras.mask,
    )


@dataclass(slots=True)
class StepPlan:
    """The chunks of one forward, in row order.

    `zeroed_blocks`, and `zeroed_windows` among the window blocks, have a new owner and are cleared before any write.
    `copied_blocks` are (source, target) pairs, one behind the other: before blocks are cleared each target gets the
    content of its source, all at once.
    """

    step: int
    chunks: list[Chunk]
    zeroed_blocks: array[int] = field(default_factory=lambda: array("i"))
    zeroed_windows: array[int] = field(default_factory=lambda: array("i"))
    copied_blocks: array[int] = field(default_factory=lambda: array("i"))

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_logit_rows(self) -> int:
        """The number of tokens that need logits."""
        return sum(chunk.num_logit_rows for chunk in self.chunks)


def wanted_logits(chunks: Sequence[Chunk]) -> tuple[list[int], list[range]]:
    """Return the rows of a step that need logits, and each chunk's range among these rows."""
    wanted: list[int] = []
    places = []
    row = 0
    for chunk in chunks:
        row += len(chunk.token_ids)
        first_place = len(wanted)
        wanted.extend(range(row - chunk.num_logit_rows, row))
        places.append(range(first_place, len(wanted)))
    return wanted, places


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of one token; `top` holds (token id, logprob) of the likeliest tokens, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class ChunkResult:
    """The result of a chunk: the sampled token (None without sampling), or the error that fails its request alone.

    `further` are the tokens sampled after drafts that were right, with their log probabilities: draft i is right if it
    is the i-th token of the result. `drafts` are tokens that may follow all these, as the model predicts them.
    """

    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    further: tuple[tuple[int, TokenLogprobs | None], ...] = ()
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[tuple[int, TokenLogprobs | None]]:
        """All sampled tokens in order, with their log probabilities."""
        return [] if self.token_id is None else [(self.token_id, self.logprobs), *self.further]


@dataclass(slots=True)
class StepResult:
    """One `ChunkResult` per chunk of the plan, in the plan's order.

    `routing`: the experts that the gates chose for the plan's rows, if recorded: bytes of `experts.routing.choices`, or
    an object that becomes these bytes on demand, as it does before it travels. `sent`: on one of several ranks, the
    rows that it has sent to each rank since the start, then the bytes. `seconds`: of the step on ranks that share the
    layers, or on a device with a queue, by its clock; None where launching it took all its time. `waited_s`: the host's
    wait for the device.
    """

    step: int
    chunks: list[ChunkResult]
    routing: Any = None
    sent: list[int] | None = None
    seconds: float | None = None
    waited_s: float = 0.0


ResultT = TypeVar("ResultT")
ResultT_co = TypeVar("ResultT_co", covariant=True)


class Pending(Protocol[ResultT_co]):
    """A step that was launched: queued on a device, sent to other ranks, or computed already."""

    @property
    def done(self) -> bool:
        """True if `result` returns without waiting for a device."""

    def result(self) -> ResultT_co:
        """Wait for the step and return its result. To be called once, and in the order of the steps."""


@dataclass(frozen=True, slots=True)
class Computed(Generic[ResultT]):
    """A step that was computed while it was launched, as on a CPU."""

    value: ResultT

    @property
    def done(self) -> bool:
        return True

    def result(self) -> ResultT:
        return self.value
