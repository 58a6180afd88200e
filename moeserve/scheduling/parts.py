"""Parts: optional features beside the spine of scheduler and engine, which call them and know none by name.

A part keeps its own state by request id. Parts are called in the order of the list that scheduler and engine are given:
first those that refuse or end requests, then those that hold requests back, then those that follow what became of them.
So no part acts for a request that a part before it has refused. Whoever overrides no hook is not called for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from moeserve.plan import FinishReason, Request

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

    def left(self, request: Request, reason: FinishReason) -> None:
        """Forget a request that has ended. Its memory is still there."""

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

    `watched`: by the id of each request that parts watch, these parts.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.watched: dict[str, tuple[Part, ...]] = {}
        self._entering = [part for part in parts if type(part).enter is not Part.enter]
        self._begin_step = overriding(parts, Part.begin_step)
        self._declined = overriding(parts, Part.declined)
        self._sought_first = overriding(parts, Part.sought_first)
        self._is_worth_reading = overriding(parts, Part.is_worth_reading)
        self._left = overriding(parts, Part.left)

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
