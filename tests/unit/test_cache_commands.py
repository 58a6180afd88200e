"""Commands about the caches of several ranks, and retention and reports through the scheduler."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from moeserve.engine.cache_commands import CacheCommandError, CacheCommands
from moeserve.plan import Asked, CacheWish, SamplingParams, Terms
from moeserve.wire import pack_token_ids, unpack_token_ids
from radix_cache import PUBLIC, MissReason, PrefixCache
from tests.support.jobs import finish
from tests.support.scheduler_simulation import Simulation

SIZE = 4
PROMPT = list(range(24))


def fill(cache: PrefixCache, prompt: list[int], namespace: str = "a") -> None:
    tokens = array("i", prompt)
    lease = cache.match(tokens, namespace)
    cache.retentions.record_hit(lease, lease.num_cached_tokens)
    cache.extend(lease, -(-len(tokens) // SIZE) - len(lease.block_ids))
    cache.free(cache.publish(lease, tokens, len(tokens)))
    cache.release(lease)


def pin(commands: CacheCommands, prompt: list[int], share: float | None = None) -> dict[str, Any]:
    arguments = {"namespace": "a", "token_ids": pack_token_ids(prompt), "share": share}
    return finish(commands.start("pin_prefix", arguments))


def test_a_pin_goes_to_the_rank_that_has_the_prefix_and_ids_name_the_rank() -> None:
    caches = [PrefixCache(32, SIZE), PrefixCache(32, SIZE)]
    commands = CacheCommands(caches)
    assert pin(commands, PROMPT) == {"over_budget": False, "tokens": 24, "missing_tokens": 24}
    fill(caches[1], PROMPT)
    assert pin(commands, PROMPT)["missing_tokens"] == 0
    assert [cache.retentions.num_pins for cache in caches] == [0, 1]
    listed = finish(commands.start("list_prefixes", {"namespace": "a", "limit": 10}))
    (entry,) = listed["prefixes"]
    assert entry["id"].startswith("1.")
    assert entry["is_pinned"]
    assert listed["budget"] == {"blocks": 32, "retained": 6, "pinned": 6, "free": 26}
    assert commands.samples()["moeserve_kv_pinned_prefixes"] == [[1]]
    for wrong in ("0.1", "7.1", "x", "", "1.", "1.99999999999999999999"):
        assert finish(commands.start("unpin_prefix", {"namespace": "a", "prefix_id": wrong})) == {"unpinned": 0}
    for other in ("b", "a/x"):
        arguments = {"namespace": other, "prefix_id": entry["id"]}
        assert finish(commands.start("unpin_prefix", arguments)) == {"unpinned": 0}
    assert finish(commands.start("unpin_prefix", {"namespace": "a", "prefix_id": entry["id"]})) == {"unpinned": 1}
    assert commands.samples()["moeserve_kv_retained_blocks"] == [[0]]


def test_a_prefix_is_pinned_by_the_id_of_the_listing_by_its_own_account_alone() -> None:
    commands = CacheCommands(caches := [PrefixCache(32, SIZE), PrefixCache(32, SIZE)])
    fill(caches[1], PROMPT)
    fill(caches[1], [*PROMPT[:8], *range(500, 516)])  # the run of the prompt is split
    listed = finish(commands.start("list_prefixes", {"namespace": "a", "limit": 10}))["prefixes"]
    entry = next(entry for entry in listed if entry["num_prefix_tokens"] == 24)
    for namespace, prefix_id in (("b", entry["id"]), ("a", "1.999"), ("a", "9.1"), ("a", "x")):
        arguments = {"namespace": namespace, "prefix_id": prefix_id}
        assert finish(commands.start("pin_prefix", arguments))["is_gone"]
    pinned = finish(commands.start("pin_prefix", {"namespace": "a", "prefix_id": entry["id"]}))
    assert pinned == {"over_budget": False, "tokens": 24, "missing_tokens": 0}
    assert caches[1].retentions.num_pins == 1


def test_a_public_prefix_is_pinned_on_every_rank() -> None:
    caches = [PrefixCache(32, SIZE), PrefixCache(32, SIZE)]
    commands = CacheCommands(caches)
    arguments = {"namespace": PUBLIC, "token_ids": pack_token_ids(PROMPT), "share": 1.0}
    fill(caches[0], PROMPT, PUBLIC)
    assert finish(commands.start("pin_prefix", arguments))["missing_tokens"] == 24
    fill(caches[1], PROMPT, PUBLIC)
    assert finish(commands.start("pin_prefix", arguments))["missing_tokens"] == 0
    assert [cache.retentions.num_pins for cache in caches] == [1, 1]


def test_window_blocks_are_counted_where_a_model_has_some() -> None:
    assert not any("window" in name for name in CacheCommands([PrefixCache(32, SIZE)]).samples())
    caches = [PrefixCache(32, SIZE, num_window_blocks=5, window=SIZE + 1) for _ in range(2)]
    for tokens in ([1] * 12, [2] * 12):
        lease = caches[0].match(array("i", tokens))
        caches[0].extend(lease, 3)
        caches[0].publish(lease, array("i", tokens), 12)
        if tokens[0] == 1:
            caches[0].release(lease)
    samples = CacheCommands(caches).samples()
    assert samples["moeserve_kv_window_blocks"] == [["free", 5], ["cached", 4], ["leased", 1]]
    assert samples["moeserve_kv_window_evictions"] == [[1]]


def test_snapshots_are_counted_where_a_model_has_states() -> None:
    assert not any("state" in name for name in CacheCommands([PrefixCache(32, SIZE)]).samples())
    caches = [PrefixCache(32, SIZE, snapshot_rows=range(4, 6)) for _ in range(2)]
    for tokens in ([1] * 12, [2] * 12, [3] * 12):
        lease = caches[0].match(array("i", tokens))
        caches[0].extend(lease, 2)
        row = caches[0].states.take(lease, 8)
        caches[0].publish(lease, array("i", tokens), 8)
        caches[0].states.keep(lease, row, 8)
        caches[0].release(lease)
    lease = caches[0].match(array("i", [3] * 12))
    assert caches[0].states.begin_load(lease) == row
    names = ("", "_max", "_saved", "_used", "_evicted")
    samples = CacheCommands(caches).samples()
    assert [samples[f"moeserve_state_snapshots{name}"] for name in names] == [[[2]], [[4]], [[3]], [[1]], [[1]]]


def test_a_pin_beyond_the_budget_says_how_much_is_free() -> None:
    cache = PrefixCache(32, SIZE)
    commands = CacheCommands([cache])
    fill(cache, PROMPT)
    assert pin(commands, PROMPT, 0.1) == {"over_budget": True, "wanted_blocks": 6, "free_blocks": 3}
    assert pin(commands, PROMPT, 0.2)["missing_tokens"] == 0


def test_a_listing_has_the_prefixes_that_saved_most_first_and_no_more_than_asked_for() -> None:
    cache = PrefixCache(64, SIZE)
    commands = CacheCommands([cache])
    for times, start in ((1, 100), (3, 200), (2, 300)):
        for _ in range(times):
            fill(cache, list(range(start, start + 9)))
    fill(cache, PROMPT, "b")
    listed = finish(commands.start("list_prefixes", {"namespace": "a", "limit": 2}))
    assert [entry["tokens_saved"] for entry in listed["prefixes"]] == [16, 8]
    assert [unpack_token_ids(entry["preview"])[0] for entry in listed["prefixes"]] == [200, 300]
    assert listed["num_prefixes"] == 3
    assert listed["complete"]
    assert len(finish(commands.start("list_prefixes", {"namespace": None, "limit": 1000}))["prefixes"]) == 4


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("list_prefixes", {"namespace": "a"}),
        ("list_prefixes", {"namespace": 1, "limit": 1}),
        ("pin_prefix", {"namespace": "a", "token_ids": b"abc"}),
        ("drop_prefixes", {"namespace": "a", "more": 1}),
    ],
)
def test_wrong_arguments_are_an_error_of_the_command(command: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(CacheCommandError):
        finish(CacheCommands([PrefixCache(8, SIZE)]).start(command, arguments))


def test_a_wish_retains_the_prompt_once_the_request_has_ended_and_time_ends_it() -> None:
    simulation = Simulation(num_blocks=32, block_size=SIZE)
    simulation.scheduler.set_time(100.0)
    record = simulation.add("one", PROMPT, SamplingParams(max_tokens=9))
    record.request.asked = Asked(cache=CacheWish(((24, 60.0), (9, 600.0))))
    simulation.run()
    assert simulation.cache.retentions.num_blocks == 6
    simulation.scheduler.set_time(161.0)
    assert simulation.cache.retentions.num_blocks == 2
    simulation.scheduler.set_time(701.0)
    assert simulation.cache.retentions.num_blocks == 0
    simulation.check_all_done()


def test_a_hit_begins_a_retention_anew() -> None:
    simulation = Simulation(num_blocks=32, block_size=SIZE)
    record = simulation.add("one", PROMPT, SamplingParams(max_tokens=1))
    record.request.asked = Asked(cache=CacheWish(((24, 60.0),)))
    simulation.run()
    simulation.scheduler.set_time(50.0)
    simulation.add("two", [*PROMPT, 40, 41], SamplingParams(max_tokens=1))
    simulation.run()
    simulation.scheduler.set_time(100.0)
    assert simulation.cache.retentions.num_blocks == 6
    simulation.scheduler.set_time(111.0)
    assert simulation.cache.retentions.num_blocks == 0


def test_retained_blocks_never_keep_a_request_from_its_memory() -> None:
    simulation = Simulation(num_blocks=8, block_size=SIZE, max_model_len=32)
    record = simulation.add("one", PROMPT, SamplingParams(max_tokens=1))
    record.request.asked = Asked(cache=CacheWish(((24, 60.0),)))
    record.request.terms = Terms(retained=1.0)
    simulation.run()
    assert simulation.cache.retentions.num_blocks == 6
    simulation.add("two", list(range(20, 46)), SamplingParams(max_tokens=1))
    simulation.run()
    assert simulation.cache.retentions.num_blocks == 1
    assert simulation.cache.retentions.num_lost == 5
    simulation.check_all_done()


def test_a_request_that_failed_retains_nothing() -> None:
    simulation = Simulation(num_blocks=32, block_size=SIZE, budget=8)
    record = simulation.add("one", PROMPT, SamplingParams(max_tokens=9))
    record.request.asked = Asked(cache=CacheWish(((24, 60.0),)))
    simulation.step()
    simulation.abort("one")
    assert simulation.cache.retentions.num_blocks == 2


def test_reports_come_with_the_first_output_and_count_what_was_shared_while_waiting() -> None:
    simulation = Simulation(num_blocks=64, block_size=SIZE, budget=8)
    first = simulation.add("one", PROMPT, SamplingParams(max_tokens=4))
    simulation.step()
    second = simulation.add("two", PROMPT, SamplingParams(max_tokens=4))
    for record in (first, second):
        record.request.asked = Asked(cache=CacheWish(report=True))
    misses: dict[str, list[Any]] = {"one": [], "two": []}
    while not simulation.scheduler.is_idle:
        for output in simulation.step():
            misses[output.request.request_id].append(output.miss)
    assert [miss is not None for miss in misses["two"]] == [True, False, False, False]
    assert misses["two"][0].reason is MissReason.LAST_TOKEN
    assert misses["two"][0].num_matched_tokens == second.request.num_cached_tokens == 20
