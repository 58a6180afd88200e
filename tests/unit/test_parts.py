"""Parts of scheduler and engine: called in the order of their list, and only for the hooks that they override."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from moeserve.engine.planner import build_parts
from moeserve.engine.prompt_watch import PromptWatch
from moeserve.plan import Asked, FinishReason, Request, SamplingParams
from moeserve.scheduling.cold_requests import ColdRequests
from moeserve.scheduling.pacing import Pace
from moeserve.scheduling.parts import Part, Parts, Prefixes, overriding
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.tool_waits import ToolWaits
from moeserve.scheduling.trials import Trial
from radix_cache import PrefixCache


def request(name: str, *, least_cached: float = 0.0) -> Request:
    return Request(name, array("i", range(1, 6)), SamplingParams(2), asked=Asked(least_cached))


class Named(Part):
    """Writes down each call."""

    def __init__(self, name: str, calls: list[str], *, watches: bool = False) -> None:
        self._name, self._calls, self._watches = name, calls, watches

    def enter(self, request: Request) -> bool:
        self._calls.append(f"{self._name} enter")
        return self._watches

    def declined(self, prefixes: Prefixes) -> Iterator[tuple[Request, FinishReason]]:
        self._calls.append(f"{self._name} declined")
        return iter(())

    def planned(self, request: Request) -> None:
        self._calls.append(f"{self._name} planned")

    def left(self, request: Request, reason: FinishReason) -> None:
        self._calls.append(f"{self._name} left")


class Finder:
    """Finds `num_found` tokens of any request."""

    def __init__(self, num_found: int, *, is_looked_for: bool = False) -> None:
        self._num_found, self._is_looked_for = num_found, is_looked_for

    def num_found(self, request: Request) -> int:
        return self._num_found

    def is_looked_for(self, request: Request) -> bool:
        return self._is_looked_for


def test_parts_are_called_in_the_order_of_their_list() -> None:
    calls: list[str] = []
    parts = Parts([Named("first", calls, watches=True), Named("second", calls, watches=True)])
    parts.enter(one := request("r"))
    parts.declined(Finder(0))
    parts.record_planned(one)
    parts.leave(one, FinishReason.STOP)
    assert calls == [
        f"{name} {hook}" for hook in ("enter", "declined", "planned", "left") for name in ("first", "second")
    ]


def test_a_service_asks_first_who_ends_requests_then_sources_then_who_holds_requests_and_who_follows_them() -> None:
    caches, source = [PrefixCache(8, 4)], Part()
    parts = build_parts(caches, lambda _: 0, Pace(None, 8, 2), [source])
    assert list(map(type, parts)) == [ColdRequests, Part, Trial, ToolWaits, PromptWatch]


def test_only_parts_that_override_a_hook_are_called_for_it() -> None:
    part = ColdRequests()
    assert overriding([Part(), part], Part.sought_first) == (part.sought_first,)
    assert overriding([Part(), part], Part.end_turn) == ()


def test_a_request_that_nobody_watches_is_no_business_of_parts_at_its_chunks() -> None:
    calls: list[str] = []
    parts = Parts([Named("part", calls)])
    parts.enter(one := request("r"))
    parts.record_planned(one)
    assert (calls, parts.watched) == (["part enter"], {})


def test_a_scheduler_tells_parts_of_a_request_until_it_has_left() -> None:
    calls: list[str] = []
    limits = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_num_queued_reqs": 2, "max_model_len": 32}
    scheduler = Scheduler([PrefixCache(8, 4)], **limits, parts=[Named("part", calls, watches=True)])
    scheduler.add(request("r"))
    assert scheduler.schedule() is not None
    scheduler.abort("r")
    assert calls == ["part enter", "part planned", "part left"]


def test_a_request_with_too_little_cached_is_declined_once_nothing_is_looked_for() -> None:
    cold, one = ColdRequests(), request("r", least_cached=0.5)
    cold.enter(one)
    assert list(cold.declined(Finder(0, is_looked_for=True))) == []
    assert cold.sought_first() == [one]
    assert not cold.is_worth_reading(one, Finder(2))
    assert list(cold.declined(Finder(2))) == [(one, FinishReason.CACHE_THRESHOLD)]


def test_a_request_with_enough_cached_goes_on_like_any_other() -> None:
    cold, one = ColdRequests(), request("r", least_cached=0.5)
    cold.enter(one)
    assert list(cold.declined(Finder(3))) == []
    assert list(cold.declined(Finder(0))) == []
    assert cold.is_worth_reading(one, Finder(0))
