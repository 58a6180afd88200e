"""KV that is kept for a tool's return: for how long, learnt durations of tools, and reads from disk."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from moeserve.plan import Request, SamplingParams
from moeserve.scheduling import tool_waits
from moeserve.scheduling.tool_waits import ToolWaits, best_keep_s, return_rate
from radix_cache import PrefixCache
from tests.support.cache_invariants import check_invariants
from tests.support.kv_life import Disk, Life, ask

SIZE = 4


def test_kv_is_kept_while_that_costs_less_than_to_have_it_again() -> None:
    assert best_keep_s([1.0, 2.0, 3.0], lost_s=10.0, rent=0.1) == pytest.approx(3.3)
    assert best_keep_s([1.0, 2.0, 3.0], lost_s=0.1, rent=0.1) == 0.0
    # The last one of four takes too long to wait for.
    assert best_keep_s([1.0, 1.0, 1.0, 500.0], lost_s=4.0, rent=0.5) == pytest.approx(1.1)


def test_a_return_is_expected_at_the_best_rate_that_any_time_from_now_on_promises() -> None:
    assert return_rate([10.0], 0.0) == pytest.approx(0.1)
    # One of two comes soon: to wait for the other one would not pay.
    assert return_rate([1.0, 1000.0], 0.0) == pytest.approx(0.5)
    assert return_rate([1.0, 1000.0], 10.0) == pytest.approx(1 / 990)
    # It has taken longer than ever: about half as long again.
    assert return_rate([1.0], 100.0) == pytest.approx(1 / 50)
    # A single duration just ahead is no certainty.
    assert return_rate([60.1], 60.0) == pytest.approx(1 / 15)


class Costs:
    """KV that takes `seconds` to have again; it notes the asked reads."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.read: list[int] = []

    def recovery_s(self, tokens: array[int], namespace: str) -> float:
        return self.seconds

    def read_back(self, tokens: array[int], namespace: str, rank: int) -> bool:
        self.read.append(len(tokens))
        return True


class Conversations:
    """Turns over a tree without a scheduler."""

    def __init__(self, seconds: float = 5.0, num_blocks: int = 40) -> None:
        self.cache = PrefixCache(num_blocks, SIZE, retention_share=0.9)
        self.costs = Costs(seconds)
        self.waits = ToolWaits([self.cache], self.costs)
        self.now = 0.0
        self.num = 0

    def turn(self, tokens: list[int], tool: str, after_s: float, *, session: str = "", namespace: str = "key") -> None:
        """Ask `tokens`, whose answer calls a tool, and let time go on."""
        self.num += 1
        request = Request(f"{self.num}", array("i", tokens), SamplingParams(1), namespace, session=session)
        self.cache.set_time(self.now)
        self.waits.record_return(request, self.now)
        self.compute(tokens, namespace)
        self.waits.record_end(request, self.now, is_whole=True)
        self.waits.begin(request.request_id, [tool], self.now)
        self.wait(after_s)
        check_invariants(self.cache)

    def compute(self, tokens: list[int], namespace: str = "key") -> None:
        """Cache a prefix."""
        ids = array("i", tokens)
        lease = self.cache.match(ids, namespace)
        missing = len(tokens) // SIZE - len(lease.block_ids)
        if missing > 0 and self.cache.extend(lease, missing) is not None:
            self.cache.free(self.cache.publish(lease, ids, len(tokens) // SIZE * SIZE))
        self.cache.release(lease)

    def wait(self, seconds: float) -> None:
        """Let time go on."""
        self.now += seconds
        self.cache.set_time(self.now)
        self.waits.advance(self.now)

    def fill(self, count: int) -> None:
        """Use blocks for something else that is not kept."""
        lease = self.cache.match(array("i", [9]), "other")
        assert self.cache.extend(lease, count) is not None
        self.cache.release(lease)

    def cached(self, tokens: list[int], namespace: str = "key") -> int:
        return self.cache.peek(array("i", [*tokens, 1]), namespace)


def test_a_look_rates_few_of_many_waits_and_all_of_them_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    talks = Conversations(num_blocks=800)
    for number in range(100):
        talks.turn([number, *range(200, 207)], "ls", 0.01)
    looks: list[list[float]] = []

    def rate(samples: Sequence[float], waited_s: float) -> float:
        looks[-1].append(talks.now - waited_s)
        return 1.0

    monkeypatch.setattr(tool_waits, "return_rate", rate)
    for _ in range(20):
        looks.append([])
        talks.wait(0.25)
    assert max(map(len, looks)) <= 8
    assert {round(since, 2) for look in looks for since in look} == {round(number / 100, 2) for number in range(100)}


def test_a_conversation_whose_tool_is_quick_outlives_one_whose_tool_is_slow() -> None:
    talks = Conversations()
    for tool, seconds in (("quick", 0.5), ("slow", 900.0)):
        for number in range(6):
            talks.turn([number, *range(100, 107)], tool, seconds, session=tool)
    quick, slow = [50, *range(300, 339)], [51, *range(400, 439)]
    talks.turn(quick, "quick", 0.0)
    talks.turn(slow, "slow", 0.0)
    talks.fill(28)
    assert talks.cached(quick) >= 36
    assert talks.cached(slow) <= 12


def test_a_return_is_found_by_its_session_or_by_its_prefix_and_ends_what_was_kept() -> None:
    talks = Conversations()
    head = list(range(20))
    talks.turn(head, "t", 2.0, session="a")
    assert talks.cache.retentions.num_blocks > 0
    talks.turn([77, *range(20)], "t", 2.0, session="a")
    talks.turn([*head, *range(60, 72)], "t", 2.0)
    talks.turn([*head, *range(60, 72), *range(80, 92)], "t", 2.0)
    assert talks.waits.counters.num_returned == 2
    stranger = [*head, *range(60, 72), *range(80, 92), *range(1000, 1012)]
    talks.turn(stranger, "t", 0.0, namespace="stranger")
    assert talks.waits.counters.num_returned == 2


def test_kv_is_kept_until_the_request_that_continues_it_has_ended() -> None:
    talks = Conversations()
    talks.turn(list(range(20)), "t", 0.2)
    request = Request("next", array("i", range(24)), SamplingParams(1), "key", session="")
    talks.waits.record_return(request, talks.now)
    assert talks.cache.retentions.num_blocks > 0
    talks.waits.record_end(request, talks.now, is_whole=False)
    assert talks.cache.retentions.num_blocks == 0
    talks.waits.begin("next", ["t"], talks.now)
    assert talks.waits.num_open == 0


def test_kv_is_forgotten_in_the_end_and_unknown_requests_are_left_alone() -> None:
    talks = Conversations()
    talks.waits.begin("never seen", ["t"], 0.0)
    for number in range(600):
        talks.turn([number, *range(8)], f"tool {number}", 0.0, session=f"{number}")
    assert talks.waits.num_open <= 256
    talks.now += 7200.0
    talks.cache.set_time(talks.now)
    talks.waits.advance(talks.now)
    assert (talks.waits.num_open, talks.cache.retentions.num_blocks) == (0, 0)


def test_kv_on_disk_comes_back_once_it_is_expected_sooner_than_what_is_in_memory() -> None:
    talks = Conversations(seconds=0.1)
    for number in range(6):
        talks.turn([number, *range(100, 119)], "build", 60.0, session="s")
    talks.turn([7, *range(100, 119)], "build", 0.0, session="s")
    talks.fill(40)
    talks.compute(list(range(300, 460)))
    talks.costs.read.clear()
    talks.wait(20.0)
    assert talks.costs.read == []
    talks.wait(35.0)
    assert talks.costs.read == [20]


def test_a_conversation_whose_answer_calls_no_tool_waits_for_its_user() -> None:
    talks = Conversations()
    request = Request("a", array("i", range(20)), SamplingParams(1), "key", session="")
    talks.compute(list(range(20)))
    talks.waits.record_end(request, talks.now, is_whole=True)
    talks.wait(1.0)
    assert talks.waits.num_open == 0
    talks.wait(5.0)
    assert talks.waits.num_open == 1
    talks.waits.begin("a", ["t"], talks.now)
    assert talks.waits.num_open == 1
    talks.turn(list(range(28)), "t", 0.0)
    assert (talks.waits.num_open, talks.waits.counters.num_returned) == (1, 1)


@pytest.mark.parametrize(("waited_s", "stays"), [(0.6, True), (10.0, False)])
def test_kv_goes_before_older_prefixes_once_its_tool_has_not_ended_when_most_do(waited_s: float, stays: bool) -> None:
    talks = Conversations(seconds=0.0)
    for seconds in (300.0, 300.0, 1.0, 1.0, 1.0, 1.0):
        talks.turn([1, *range(100, 107)], "t", seconds, session="s")
    older, waiting = list(range(500, 580)), list(range(80))
    talks.compute(older)
    talks.wait(5.0)
    talks.turn(waiting, "t", waited_s, session="s")
    talks.fill(20)
    assert (talks.cached(waiting), talks.cached(older)) == ((80, 0) if stays else (0, 80))


def test_what_clients_retain_does_not_give_way() -> None:
    talks = Conversations(num_blocks=20)
    wanted = list(range(40))
    talks.turn(wanted, "t", 1.0)
    lease = talks.cache.match(array("i", [*wanted, 1]), "key")
    talks.cache.retain(lease, 40, 1000.0)
    talks.cache.release(lease)
    for number in range(4):
        talks.turn([number, *range(500, 531)], "t", 0.5)
    assert talks.cached(wanted) == 40
    assert talks.cache.retentions.budget("key")[1] <= 18


OPTIONS: dict[str, Any] = {"num_blocks": 40, "block_size": SIZE}


def test_what_is_read_back_for_nobody_yet_is_a_hit_in_memory() -> None:
    disk = Disk()
    first = Life(disk, random.Random(1), **OPTIONS)
    ask(first, "a", list(range(24)))
    first.settle()
    second = Life(disk, random.Random(2), **OPTIONS)
    assert second.scheduler.waiting.read_back(array("i", range(25)), "", 0)
    assert not second.scheduler.waiting.read_back(array("i", range(25)), "", 0)
    second.scheduler.check_idle()
    (job,) = second.scheduler.waiting.take_copies(0.0)
    second.end(job)
    second.scheduler.check_idle()
    assert not second.scheduler.waiting.read_back(array("i", range(25)), "", 0)
    record = ask(second, "b", [*range(24), 7, 7])
    second.settle()
    assert (record.request.num_cached_tokens, record.request.num_lower_tokens) == (24, 0)
    second.check_all_done()
