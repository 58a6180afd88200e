"""Commands beside steps: one slice a turn, fair by key, and slices whose work does not grow with the cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from moeserve.engine.cache_commands import CacheCommands
from moeserve.engine.commands import MAX_WAITING, MAX_WAITING_OF_KEY, CommandQueue, Commands
from moeserve.wire import Control, ControlResult
from radix_cache import PUBLIC, PrefixCache, list_prefixes
from radix_cache.listing import MAX_VISITED_NODES
from tests.support.cache_invariants import check_invariants
from tests.support.jobs import finish
from tests.support.line_counts import num_lines

SIZE = 4


def fill(cache: PrefixCache, prompt: list[int], namespace: str = "", times: int = 1) -> None:
    tokens = array("i", prompt)
    for _ in range(times):
        lease = cache.match(tokens, namespace)
        cache.retentions.record_hit(lease, lease.num_cached_tokens)
        cache.extend(lease, -(-len(tokens) // SIZE) - len(lease.block_ids))
        cache.free(cache.publish(lease, tokens, len(tokens)))
        cache.release(lease)


def cache_of(num_runs: int, namespace: str = "", first: int = 1000) -> PrefixCache:
    cache = PrefixCache(num_runs + 64, SIZE)
    for number in range(num_runs):
        fill(cache, [first + number] * SIZE, namespace)
    return cache


def lines_of_slices(job: Iterator[object]) -> list[int]:
    """Return the number of lines of Python that each slice of a job executes."""
    end = object()
    last: list[object] = [None]
    counts = []
    while last[-1] is not end:
        counts.append(num_lines(lambda: last.append(next(job, end))))
    return counts


class Asked:
    """Commands, and their answers by turn."""

    def __init__(self, *caches: PrefixCache) -> None:
        self.answers: list[tuple[int, ControlResult]] = []
        self.commands = Commands(CacheCommands(caches))
        self.turn = 0
        self._next_id = 0

    def ask(self, tenant: str, command: str, **arguments: Any) -> int:
        self._next_id += 1
        self.commands.add(b"f", Control(self._next_id, command, arguments, tenant))
        self._take_answers()
        return self._next_id

    def run(self) -> None:
        while self.commands.is_waiting:
            self.turn += 1
            self.commands.advance()
            self._take_answers()

    def _take_answers(self) -> None:
        self.answers += [(self.turn, result) for _, result in self.commands.take_answers()]


def test_keys_take_turns_and_a_key_waits_for_its_own_commands_alone() -> None:
    queue: CommandQueue[str] = CommandQueue()
    for name in ("a1", "a2", "a3", "b1", "c1"):
        assert queue.put(name[0], name)
    order = []
    while queue:
        order.append(queue.first())
        queue.end_turn(done=True)
    assert order == ["a1", "b1", "c1", "a2", "a3"]


def test_a_command_in_slices_stays_the_first_of_its_key() -> None:
    queue: CommandQueue[str] = CommandQueue()
    for name in ("a1", "a2", "b1"):
        queue.put(name[0], name)
    seen = []
    for done in (False, True, False, True, True):
        seen.append(queue.first())
        queue.end_turn(done=done)
    assert seen == ["a1", "b1", "a1", "a1", "a2"]
    assert not queue


def test_a_key_that_floods_is_refused_and_leaves_room_for_others() -> None:
    queue: CommandQueue[int] = CommandQueue()
    assert [queue.put("a", number) for number in range(MAX_WAITING_OF_KEY + 1)][-2:] == [True, False]
    for number in range(MAX_WAITING):
        queue.put(f"b{number % 20}", number)
    assert len(queue) == MAX_WAITING
    assert not queue.put("b1", 0)
    assert queue.put("one that has none", 0)


def test_one_slice_of_one_command_is_done_in_a_turn() -> None:
    asked = Asked(cache_of(3))
    long = asked.ask("a", "list_prefixes", namespace="", limit=9)
    short = asked.ask("b", "unpin_prefix", namespace="", prefix_id="0.1")
    refused = [asked.ask("a", "unpin_prefix", namespace="", prefix_id="0.1") for _ in range(40)]
    at_once = [result.control_id for _, result in asked.answers if result.is_refused]
    assert at_once == refused[MAX_WAITING_OF_KEY - 1 :]
    asked.run()
    turns = {result.control_id: turn for turn, result in asked.answers}
    assert len(asked.answers) == 42
    assert turns[short] == 2
    assert turns[long] == 3
    assert sorted(turns[one] for one in refused[: MAX_WAITING_OF_KEY - 1]) == list(range(4, 3 + MAX_WAITING_OF_KEY))


def test_commands_that_cannot_be_are_answered_with_an_error() -> None:
    asked = Asked(cache_of(3))
    for command, arguments in (
        ("no such", {}),
        ("list_prefixes", {"limit": "x"}),
        ("pin_prefix", {"namespace": "", "token_ids": b"abc"}),
    ):
        asked.ask("a", command, **arguments)
    asked.run()
    assert [bool(result.error) for _, result in asked.answers] == [True] * 3


@pytest.mark.parametrize("command", ["list_prefixes", "drop_prefixes"])
def test_the_work_of_a_slice_does_not_grow_with_the_cache(command: str) -> None:
    most = []
    for num_runs in (2500, 10_000):
        commands = CacheCommands([cache_of(num_runs)])
        arguments = {"namespace": ""} | ({"limit": 1000} if command == "list_prefixes" else {})
        most.append(max(lines_of_slices(commands.start(command, arguments))))
    assert most[1] <= 1.5 * most[0]
    assert most[1] < 20_000


def test_a_listing_visits_no_run_of_others() -> None:
    cache = PrefixCache(4096, SIZE)
    system = list(range(SIZE))
    fill(cache, system, PUBLIC)
    for number in range(700):
        fill(cache, [*system, *[1000 + number] * SIZE], f"b/{number}")
        fill(cache, [5000 + number] * SIZE, "b")
    for number in range(3):
        fill(cache, [*system, *[2000 + number] * SIZE], "a")
        fill(cache, [3000 + number] * SIZE, "a")
    listing = finish(list_prefixes(cache.tree, ("a",), 10))
    assert (listing.num_visited, len(listing.prefixes), listing.complete) == (6, 6, True)
    assert sum(lines_of_slices(list_prefixes(cache.tree, ("a",), 10))) < 600
    everything = finish(list_prefixes(cache.tree, None, 1000))
    assert everything.num_visited == 1407
    assert sum(cache.drop(("a",))) == 6
    assert finish(list_prefixes(cache.tree, ("a",), 10)).num_visited == 0
    check_invariants(cache)


def test_a_listing_that_is_cut_short_says_so_and_has_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_VISITED_NODES >= 10_000
    monkeypatch.setattr("radix_cache.listing.MAX_VISITED_NODES", 50)
    for namespace in ("", None):
        listing = finish(list_prefixes(cache_of(60).tree, namespace if namespace is None else (namespace,), 1000))
        assert (listing.num_visited, listing.complete) == (50, False)
        assert {prefix.preview[0] for prefix in listing.prefixes} == set(range(1010, 1060))
    assert finish(list_prefixes(cache_of(50).tree, None, 1000)).complete


def test_a_listing_is_in_the_order_of_tokens_saved_then_of_use() -> None:
    cache = PrefixCache(256, SIZE)
    for number in range(40):
        cache.set_time(float(40 * number + number * 7 % 40))
        fill(cache, [*[number % 9] * SIZE, *[100 + number] * SIZE, 1], times=1 + number % 3)
    everything = finish(list_prefixes(cache.tree, None, 1000)).prefixes
    keys = [(one.tokens_saved, -one.unused_for) for one in everything]
    assert keys == sorted(keys, reverse=True)
    best = finish(list_prefixes(cache.tree, None, 7)).prefixes
    assert [one.serial for one in best] == [one.serial for one in everything[:7]]


def test_a_listing_over_a_cache_that_changes_shows_what_stays_and_nothing_that_is_gone() -> None:
    cache = cache_of(2000)
    for number in range(20):
        fill(cache, [7, 7, 7, 7, *[1 + number] * SIZE, 1], times=5)
    job = list_prefixes(cache.tree, None, 1000)
    next(job)
    # Everything but the twenty is evicted by a new prompt, and a run is split, between two slices.
    fill(cache, [9] * (2000 * SIZE))
    fill(cache, [7, 7, 7, 7, 1, 1, 1, 1, 5])
    serials = {one.serial for one in finish(list_prefixes(cache.tree, None, 1000)).prefixes}
    listing = finish(job)
    assert {one.serial for one in listing.prefixes} <= serials
    assert len({one.serial for one in listing.prefixes if one.tokens_saved}) >= 20
    check_invariants(cache)


def test_prefixes_that_are_used_again_while_others_are_dropped_stay() -> None:
    cache = cache_of(1000)
    job = cache.drop(("",))
    freed = next(job)
    kept = array("i", [1999] * (SIZE + 1))
    lease = cache.match(kept)
    assert lease.num_cached_tokens == SIZE
    freed += sum(job)
    assert freed == 999
    check_invariants(cache)
    cache.release(lease)
    assert cache.counts.num_cached == 1
