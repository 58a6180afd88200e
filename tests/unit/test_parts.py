"""Parts of scheduler and engine: called in the order of their list, and only for the hooks that they override."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence

from moeserve.engine.planner import build_parts, build_text_parts
from moeserve.engine.prompt_watch import PromptWatch
from moeserve.grammars.made_masks import MadeMask, no_drafts
from moeserve.plan import Asked, Chunk, ChunkExtras, ChunkResult, FinishReason, Request, SamplingParams
from moeserve.scheduling.cold_requests import ColdRequests
from moeserve.scheduling.drafting import Drafting
from moeserve.scheduling.grammars import Drafts, Grammars
from moeserve.scheduling.led_requests import LedRequests
from moeserve.scheduling.outcomes import RequestOutput
from moeserve.scheduling.pacing import UNBOUNDED, Pace
from moeserve.scheduling.parts import Part, Parts, Prefixes, overriding
from moeserve.scheduling.sampled_tokens import append_sampled
from moeserve.scheduling.scheduler import Scheduler
from moeserve.scheduling.thought_budgets import ThoughtBudgets
from moeserve.scheduling.tool_waits import ToolWaits
from moeserve.scheduling.trials import Trial
from moeserve.settings.drafts import SpeculativeConfig
from radix_cache import PrefixCache


def request(name: str, *, least_cached: float = 0.0, max_tokens: int = 2, grammar: str | None = None) -> Request:
    sampling = SamplingParams(max_tokens, grammar=grammar)
    return Request(name, array("i", range(1, 6)), sampling, asked=Asked(least_cached))


CHUNK = Chunk("r", array("i", [1]), 0, array("i", [0]), None)


class Named(Part):
    """Writes down each call."""

    def __init__(self, name: str, calls: list[str], *, watches: bool = False) -> None:
        self._name, self._calls, self._watches = name, calls, watches

    def enter(self, request: Request) -> bool:
        self._calls.append(f"{self._name} enter")
        return self._watches

    def declined(self, prefixes: Prefixes) -> Iterator[RequestOutput]:
        self._calls.append(f"{self._name} declined")
        return iter(())

    def planned(self, request: Request, chunk: Chunk) -> None:
        self._calls.append(f"{self._name} planned")

    def left(self, output: RequestOutput) -> None:
        self._calls.append(f"{self._name} left")


class Finder:
    """Finds `num_found` tokens of any request."""

    def __init__(self, num_found: int, *, is_looked_for: bool = False) -> None:
        self._num_found, self._is_looked_for = num_found, is_looked_for

    def num_found(self, request: Request) -> int:
        return self._num_found

    def is_looked_for(self, request: Request) -> bool:
        return self._is_looked_for

    def count_found(self, request: Request) -> None:
        request.num_cached_tokens = self._num_found


def test_parts_are_called_in_the_order_of_their_list() -> None:
    calls: list[str] = []
    parts = Parts([Named("first", calls, watches=True), Named("second", calls, watches=True)])
    parts.enter(one := request("r"))
    parts.declined(Finder(0))
    parts.record_planned(one, CHUNK)
    parts.leave(RequestOutput(one, finish_reason=FinishReason.STOP))
    assert calls == [
        f"{name} {hook}" for hook in ("enter", "declined", "planned", "left") for name in ("first", "second")
    ]


def test_a_service_asks_first_who_ends_requests_then_sources_then_who_holds_requests_and_who_follows_them() -> None:
    text_parts = build_text_parts(Made(), Drafting(SpeculativeConfig("suffix")))
    parts = build_parts([PrefixCache(8, 4)], lambda _: 0, Pace(UNBOUNDED, 8, 2), [Part()], text_parts)
    of_text = [ThoughtBudgets, Drafting, Grammars]
    assert list(map(type, parts)) == [ColdRequests, Part, Trial, LedRequests, *of_text, ToolWaits, PromptWatch]


def test_only_parts_that_override_a_hook_are_called_for_it() -> None:
    part = ColdRequests()
    assert overriding([Part(), part], Part.sought_first) == (part.sought_first,)
    assert overriding([Part(), part], Part.end_turn) == ()


def test_a_request_that_nobody_watches_is_no_business_of_parts_at_its_chunks() -> None:
    calls: list[str] = []
    parts = Parts([Named("part", calls)])
    parts.enter(one := request("r"))
    parts.record_planned(one, CHUNK)
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
    assert list(cold.declined(Finder(2))) == [RequestOutput(one, finish_reason=FinishReason.CACHE_THRESHOLD)]


def test_a_request_with_enough_cached_goes_on_like_any_other() -> None:
    cold, one = ColdRequests(), request("r", least_cached=0.5)
    cold.enter(one)
    assert list(cold.declined(Finder(3))) == []
    assert list(cold.declined(Finder(0))) == []
    assert cold.is_worth_reading(one, Finder(0))


def test_what_a_part_forces_comes_in_place_of_sampled_tokens_and_no_sampled_token_follows_it() -> None:
    class Forcing(Part):
        def forced(self, request: Request) -> Sequence[int]:
            return (8, 9) if request.token_ids[-1] == 7 else ()

    one, sampled = request("r", max_tokens=9), ChunkResult(6, further=((7, None), (5, None)))
    chunk = Chunk("r", array("i", [5]), 4, array("i", [0]), one.sampling)
    outputs = append_sampled(one, chunk, sampled, [Forcing()])
    assert [output.token_id for output in outputs] == [6, 7, 8, 9]
    assert one.num_forced_tokens == 2


class Made:
    """Makes the mask `b"m"` of each request that asks, once its id is in `due`."""

    is_awaited = False

    def __init__(self) -> None:
        self.due: set[str] = set()
        self.asked: list[tuple[str, list[int], bool]] = []
        self._open: dict[str, Request] = {}

    def update(self, changes: Iterable[Request], drafts_of: Callable[[Request], array[int]] = no_drafts) -> None:
        for one in changes:
            self.asked.append((one.request_id, drafts_of(one).tolist(), one.finished))
            self._open[one.request_id] = one

    def take(self, seconds: float = 0.0) -> list[MadeMask]:
        return [MadeMask(self._open.pop(name), b"m") for name in sorted(self.due & self._open.keys())]

    def wait(self, seconds: float) -> None:
        """Nothing is made meanwhile."""


def test_a_request_is_kept_out_of_the_queue_until_its_first_mask_and_held_until_each_further_one() -> None:
    masks, one = Made(), request("r", grammar="start: /a/")
    grammars = Grammars(masks, Drafts())
    assert grammars.enter(one)
    assert not grammars.enter(request("free"))
    assert (list(grammars.declined(Finder(0))), grammars.keeps_out(one), grammars.ready()) == ([], True, [])
    masks.due.add("r")
    assert (list(grammars.declined(Finder(0))), grammars.ready(), grammars.holds(one)) == ([], [one], False)
    chunk = Chunk("r", array("i", [1]), 0, array("i", [0]), one.sampling, ChunkExtras())
    grammars.planned(one, chunk)
    assert chunk.extras == ChunkExtras(mask=b"m")
    grammars.appended(one, 7)
    assert grammars.holds(one)
    grammars.committed()
    assert masks.asked == [("r", [], False)] * 2


def test_masks_are_told_of_a_request_that_has_ended_and_of_its_late_mask_nothing_comes() -> None:
    masks, one = Made(), request("r", grammar="start: /a/")
    grammars = Grammars(masks, Drafts())
    grammars.enter(one)
    list(grammars.declined(Finder(0)))
    one.finished = True
    grammars.left(RequestOutput(one, finish_reason=FinishReason.ABORT))
    masks.due.add("r")
    assert (list(grammars.declined(Finder(0))), grammars.ready()) == ([], [])
    assert masks.asked == [("r", [], False), ("r", [], True)]
