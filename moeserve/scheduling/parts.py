"""Parts: optional features beside the spine of scheduler and engine, which call them and know none by name.

A part keeps its own state by request id. Parts are called in the order of the list that scheduler and engine are given:
first the parts that end requests, then the sources of KV (other services before the tier below memory), then the parts
that hold requests back, then the parts that say how texts go on (thoughts, then drafts, then grammars, which correct
drafts), then the parts that follow ended requests, last the engine's. Of several parts with waiting requests the first
one gets the engine's wait. A part that does not override a hook is not called for it.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from moeserve.plan import Chunk, ChunkResult, PromptProgress, Request
from moeserve.scheduling.cost_model import StepSize
from moeserve.scheduling.draft_room import DraftRoom
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.plan_draft import PlanDraft
from moeserve.scheduling.request_memory import RequestMemory

P = ParamSpec("P")
T = TypeVar("T")


class Prefixes(Protocol):
    """Where the prefixes of waiting requests are."""

    def count_found(self, request: Request) -> None:
        """Let a request that is declined report what was found of its prompt."""

    def num_found(self, request: Request) -> int:
        """Count the request's tokens that are in memory, stored as far as is known, or held by another service."""

    def is_looked_for(self, request: Request) -> bool:
        """Return whether more of the request's tokens may be found: files are sought, or blocks are being fetched."""


class Part:
    """A feature of scheduler and engine. Every method does nothing; a part overrides the ones that it needs.

    A part watches the requests for which its `enter` returns True. The hooks of watched requests, from `keeps_out` to
    `computed`, are called for these requests alone.
    """

    tells_following = False  # whether chunks that are not sampled have to name the token behind them

    def set_time(self, now: float) -> None:
        """Receive the time on the scheduler's clock."""

    def check(self, request: Request) -> None:
        """Look at a new request that may yet be refused."""

    def enter(self, request: Request) -> bool:
        """Take in a new request. Return whether the part watches it."""
        return False

    def keeps_out(self, request: Request) -> bool:
        """Return whether a request that is to wait stays outside of the queue until `ready` returns it."""
        return False

    def holds(self, request: Request) -> bool:
        """Return whether the step that is planned may not name the request."""
        return False

    def needs_token(self, request: Request) -> bool:
        """Return whether the request's next chunk depends on the token that is being sampled."""
        return False

    def most_drafts(self, request: Request, most: int) -> int:
        """Return how many of `most` drafts the request's next chunk may have."""
        return most

    def begins(self, request: Request, memory: RequestMemory, draft: PlanDraft) -> None:
        """Receive a request that runs now, before the step in `draft` gets its first chunk."""

    def planned(self, request: Request, chunk: Chunk) -> None:
        """Receive the request's chunk of the step, which the part may complete."""

    def forced(self, request: Request) -> Sequence[int]:
        """Return the tokens that have to come next, whatever is sampled."""
        return ()

    def appended(self, request: Request, token_id: int) -> None:
        """Receive the next token of the output."""

    def computed(self, request: Request, num_tokens: int) -> None:
        """Receive that the request has computed `num_tokens` in all."""

    def begin_step(self) -> None:
        """Begin to plan a step."""

    def drafts(self, draft: PlanDraft, room: DraftRoom) -> Mapping[str, array[int]]:
        """Return by request id the draft tokens that the step in `draft` verifies, where there are any."""
        return {}

    def begin_commit(self, draft: PlanDraft) -> None:
        """Begin to receive the results of a step."""

    def followed(
        self,
        request: Request,
        memory: RequestMemory,
        chunk: Chunk,
        computed: ChunkResult,
        outputs: Sequence[RequestOutput],
    ) -> None:
        """Receive what has become of a chunk: the tokens in `outputs`, the last of its request, which goes on or ends
        with them. The part may complete the outputs."""

    def committed(self) -> None:
        """Receive that all results of a step were received."""

    def counted(self, size: StepSize, seconds: float, *, has_prompts: bool) -> None:
        """Receive the seconds that the last committed step took."""

    def declined(self, prefixes: Prefixes) -> Iterable[RequestOutput]:
        """Return the last outputs of requests that are to end now. Called before each step is planned."""
        return ()

    def ready(self) -> Iterable[Request]:
        """Return the requests that the part no longer keeps out of the queue. Called behind `declined`."""
        return ()

    def sought_first(self) -> Iterable[Request]:
        """Return the requests whose prefixes are looked for whatever their places in the queue."""
        return ()

    def is_worth_reading(self, request: Request, prefixes: Prefixes) -> bool:
        """Return whether blocks may be read for a waiting request."""
        return True

    def started(self, request: Request) -> None:
        """Receive a request that runs now."""

    def hit(self, request: Request, num_tokens: int) -> None:
        """Receive a hit of `num_tokens`, the last ones that a running request has computed."""

    def preempted(self, request: Request, num_running: int) -> None:
        """Receive a request that is about to lose its lease. num_running: the requests beside it."""

    def left(self, output: RequestOutput) -> None:
        """Forget a request that has ended, and complete its last output. A request that ran has its lease still."""

    def num_held_blocks(self) -> int:
        """Return the number of blocks that the part holds for no request."""
        return 0

    def turn(self) -> None:
        """Do the part's work of a turn of the engine's loop, before its step is planned."""

    def wait(self, seconds: float) -> bool:
        """Wait for the part's next event, and do the work of a turn. Return False, at once, if no request waits here.

        Called while every open request waits for something.
        """
        return False

    def is_working(self) -> bool:
        """Return whether an idle engine has to come back to the part soon."""
        return False

    def prompts(self) -> Sequence[PromptProgress]:
        """Return how far prompts are whose clients asked for it and have not heard it. Called before each launch."""
        return ()

    def samples(self) -> Mapping[str, list[list[str | int | float]]]:
        """Return figures for metrics."""
        return {}

    def close(self) -> Iterator[None]:
        """Do the part's last work, in slices, and end its threads."""
        return iter(())

    def turned(self, request_id: str) -> None:
        """Receive the id of an ended request whose answer calls tools."""

    def continued(self, request_id: str) -> None:
        """Receive that the client lets a request go on with the token that it has sampled."""

    def end_turn(self) -> None:
        """End a turn of the engine's loop, idle or not, without waiting."""


def overriding(parts: Iterable[Part], hook: Callable[Concatenate[Part, P], T]) -> tuple[Callable[P, T], ...]:
    """Return the methods of the parts that override a hook, in their order. hook: a method of `Part`."""
    name = hook.__name__
    own = (getattr(part, name) for part in parts if getattr(type(part), name) is not hook)
    return tuple(cast(Callable[P, T], method) for method in own)


class Parts:
    """The parts of a scheduler, by hook.

    `watched`: by the id of each request that parts watch, these parts. `tells_following`: whether a part needs it.
    Public tuples are the hooks of their names.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.watched: dict[str, tuple[Part, ...]] = {}
        self.tells_following = any(part.tells_following for part in parts)
        self._entering = [part for part in parts if type(part).enter is not Part.enter]
        self._declined = overriding(parts, Part.declined)
        self._ready = overriding(parts, Part.ready)
        self._sought_first = overriding(parts, Part.sought_first)
        self._is_worth_reading = overriding(parts, Part.is_worth_reading)
        self._drafts = overriding(parts, Part.drafts)
        self._left = overriding(parts, Part.left)
        self._num_held_blocks = overriding(parts, Part.num_held_blocks)
        self.set_time = overriding(parts, Part.set_time)
        self.check = overriding(parts, Part.check)
        self.begin_step = overriding(parts, Part.begin_step)
        self.started = overriding(parts, Part.started)
        self.hit = overriding(parts, Part.hit)
        self.begin_commit = overriding(parts, Part.begin_commit)
        self.followed = overriding(parts, Part.followed)
        self.committed = overriding(parts, Part.committed)
        self.counted = overriding(parts, Part.counted)
        self.preempted = overriding(parts, Part.preempted)

    def enter(self, request: Request) -> None:
        if watching := tuple([part for part in self._entering if part.enter(request)]):
            self.watched[request.request_id] = watching

    def watching(self, request: Request) -> Sequence[Part]:
        """Return the parts that watch a request; none for most."""
        return self.watched.get(request.request_id, ()) if self.watched else ()

    def keep_out(self, request: Request) -> bool:
        return any(part.keeps_out(request) for part in self.watching(request))

    def hold(self, request: Request) -> bool:
        return any(part.holds(request) for part in self.watching(request))

    def need_token(self, request: Request) -> bool:
        return any(part.needs_token(request) for part in self.watching(request))

    def most_drafts(self, request: Request, most: int) -> int:
        for part in self.watching(request):
            most = part.most_drafts(request, most)
        return most

    def begin(self, request: Request, memory: RequestMemory, draft: PlanDraft) -> None:
        for part in self.watching(request):
            part.begins(request, memory, draft)

    def record_planned(self, request: Request, chunk: Chunk) -> None:
        for part in self.watching(request):
            part.planned(request, chunk)

    def record_computed(self, request: Request, num_tokens: int) -> None:
        for part in self.watching(request):
            part.computed(request, num_tokens)

    def drafts(self, draft: PlanDraft, room: DraftRoom) -> Mapping[str, array[int]]:
        """Return the drafts of the first part that has any."""
        return next((found for drafts in self._drafts if (found := drafts(draft, room))), {})

    def declined(self, prefixes: Prefixes) -> list[RequestOutput]:
        return [output for declined in self._declined for output in declined(prefixes)]

    def ready(self) -> list[Request]:
        return [request for ready in self._ready for request in ready()]

    def sought_first(self) -> Iterable[Request]:
        return chain.from_iterable(sought() for sought in self._sought_first)

    def is_worth_reading(self, request: Request, prefixes: Prefixes) -> bool:
        return all(is_worth_reading(request, prefixes) for is_worth_reading in self._is_worth_reading)

    def leave(self, output: RequestOutput) -> None:
        self.watched.pop(output.request.request_id, None)
        for left in self._left:
            left(output)

    def num_held_blocks(self) -> int:
        return sum(num_held() for num_held in self._num_held_blocks)
