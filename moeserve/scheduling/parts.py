"""Parts: optional features beside the spine of scheduler and engine, which call them and know none by name.

A part keeps its own state by request id. Parts are called in the order of the list that scheduler and engine are given:
first those that end requests, then sources of KV (other services before the tier below memory), then those that hold
requests back, then those that follow what became of them, last the engine's. Of several parts with waiting requests the
first one gets the engine's wait. A part that does not override a hook is not called for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from moeserve.plan import FinishReason, PromptProgress, Request

P = ParamSpec("P")
T = TypeVar("T")


class Prefixes(Protocol):
    """Where the prefixes of waiting requests are."""

    def num_found(self, request: Request) -> int:
        """Count the request's tokens that are in memory, stored as far as is known, or held by another service."""

    def is_looked_for(self, request: Request) -> bool:
        """Return whether more of the request's tokens may be found: files are sought, or blocks are being fetched."""


class Part:
    """A feature of scheduler and engine. Every method does nothing; a part overrides the ones that it needs."""

    def set_time(self, now: float) -> None:
        """Receive the time on the scheduler's clock."""

    def check(self, request: Request) -> None:
        """Look at a new request that may yet be refused."""

    def enter(self, request: Request) -> bool:
        """Take in a new request. Return whether the part watches it: is asked and told about each of its chunks."""
        return False

    def begin_step(self) -> None:
        """Begin to plan a step."""

    def holds(self, request: Request) -> bool:
        """Return whether the step that is planned may not name a watched request."""
        return False

    def planned(self, request: Request) -> None:
        """Receive a watched request that the step names."""

    def computed(self, request: Request, num_tokens: int) -> None:
        """Receive a watched request that has computed `num_tokens` in all."""

    def declined(self, prefixes: Prefixes) -> Iterable[tuple[Request, FinishReason]]:
        """Return the waiting requests that are to end before they are computed. Called before each step is planned."""
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

    def left(self, request: Request, reason: FinishReason) -> None:
        """Forget a request that has ended. One that ran has its lease still."""

    def num_held_blocks(self) -> int:
        """Return the number of blocks that the part holds for no request."""
        return 0

    def turn(self) -> None:
        """Do the part's work of a turn of the engine's loop, before its step is planned."""

    def wait(self, seconds: float) -> bool:
        """Wait for what requests wait for here, and do the work of a turn. Return False, at once, if none waits.

        Called while every open request waits for something.
        """
        return False

    def is_working(self) -> bool:
        """Return whether an idle engine has to come back to the part soon."""
        return False

    def found_below(self, request: Request) -> tuple[int, int] | None:
        """Return how many of the request's cached tokens were in the host's memory, and on disk; None if not known."""
        return None

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

    def end_turn(self) -> None:
        """End a turn of the engine's loop, idle or not, without waiting."""


def overriding(parts: Iterable[Part], hook: Callable[Concatenate[Part, P], T]) -> tuple[Callable[P, T], ...]:
    """Return a hook of those parts that override it, in their order. hook: a method of `Part`."""
    name = hook.__name__
    own = (getattr(part, name) for part in parts if getattr(type(part), name) is not hook)
    return tuple(cast(Callable[P, T], method) for method in own)


class Parts:
    """The parts of a scheduler, by hook.

    `watched`: by the id of each request that parts watch, these parts. `set_time` to `preempted` are the hooks of these
    names.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.watched: dict[str, tuple[Part, ...]] = {}
        self._entering = [part for part in parts if type(part).enter is not Part.enter]
        self._begin_step = overriding(parts, Part.begin_step)
        self._declined = overriding(parts, Part.declined)
        self._sought_first = overriding(parts, Part.sought_first)
        self._is_worth_reading = overriding(parts, Part.is_worth_reading)
        self.set_time = overriding(parts, Part.set_time)
        self.check = overriding(parts, Part.check)
        self.started = overriding(parts, Part.started)
        self.hit = overriding(parts, Part.hit)
        self.preempted = overriding(parts, Part.preempted)
        self._left = overriding(parts, Part.left)
        self._num_held_blocks = overriding(parts, Part.num_held_blocks)

    def enter(self, request: Request) -> None:
        if watching := tuple([part for part in self._entering if part.enter(request)]):
            self.watched[request.request_id] = watching

    def begin_step(self) -> None:
        for begin_step in self._begin_step:
            begin_step()

    def holds(self, request: Request) -> bool:
        return any(part.holds(request) for part in self.watched.get(request.request_id, ()))

    def record_planned(self, request: Request) -> None:
        for part in self.watched.get(request.request_id, ()):
            part.planned(request)

    def record_computed(self, request: Request, num_tokens: int) -> None:
        for part in self.watched.get(request.request_id, ()):
            part.computed(request, num_tokens)

    def declined(self, prefixes: Prefixes) -> list[tuple[Request, FinishReason]]:
        return [each for declined in self._declined for each in declined(prefixes)]

    def sought_first(self) -> Iterable[Request]:
        return chain.from_iterable(sought() for sought in self._sought_first)

    def is_worth_reading(self, request: Request, prefixes: Prefixes) -> bool:
        return all(is_worth_reading(request, prefixes) for is_worth_reading in self._is_worth_reading)

    def leave(self, request: Request, reason: FinishReason) -> None:
        self.watched.pop(request.request_id, None)
        for left in self._left:
            left(request, reason)

    def num_held_blocks(self) -> int:
        return sum(num_held() for num_held in self._num_held_blocks)
