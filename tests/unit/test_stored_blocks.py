"""The blocks on disk: their names, their order of removal, and the cache above them against shadow content."""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeserve.scheduling.lower_tier import num_kept_free
from moeserve.scheduling.overflow import Overflow
from moeserve.scheduling.request_states import StatePolicy
from moeserve.scheduling.waiting_room import FORESEEN
from radix_cache import Kind, PrefixCache, StoredBlock, StoredBlocks, Tier, stored_tree
from radix_cache.block_copies import border_name
from tests.support.cache_invariants import check_invariants, evict_all
from tests.support.examples import examples
from tests.support.kv_life import Disk, Life, ask, stored
from tests.support.scheduler_simulation import VOCAB_SIZE, Simulation

SIZE = 4


def names_of(blocks: StoredBlocks, namespace: str, tokens: list[int]) -> list[bytes]:
    names: list[bytes] = []
    blocks.name(names, namespace, array("i", tokens), len(tokens) // SIZE, SIZE)
    return names


def put(blocks: StoredBlocks, namespace: str, tokens: list[int], now: float, num_bytes: int = 100) -> list[bytes]:
    names = names_of(blocks, namespace, tokens)
    for name in names:
        blocks.put(StoredBlock(name, blocks.folder_of(namespace), num_bytes, now))
    return names


def test_names_depend_on_the_whole_prefix_secret_model_and_namespace_and_on_nothing_else() -> None:
    tokens = list(range(12))
    first = names_of(stored(), "key/salt", tokens)
    assert names_of(stored(), "key/salt", tokens) == first
    assert names_of(stored(), "key/salt", [*tokens[:8], 9, 9, 9, 9])[:2] == first[:2]
    others = [
        names_of(stored(), "key", tokens),
        names_of(stored(secret=b"t" * 32), "key/salt", tokens),
        names_of(stored(model="b"), "key/salt", tokens),
        names_of(stored(), "key/salt", [7, *tokens[1:]]),
    ]
    assert not set(first) & {name for names in others for name in names}
    assert len({stored().folder_of(namespace) for namespace in ("", "key", "key/salt", "kex")}) == 4


def test_of_too_many_bytes_the_ends_of_prefixes_go_first_and_of_these_the_one_that_was_not_used_for_longest() -> None:
    blocks = stored(max_bytes=600)
    old, new = put(blocks, "", list(range(12)), 1.0), put(blocks, "", list(range(50, 62)), 2.0)
    blocks.touch(old)
    blocks.touch(new)
    put(blocks, "", list(range(90, 98)), 3.0)
    blocks.check()
    assert [name in blocks for name in (*old, *new)] == [True, False, False, True, True, True]
    chores = blocks.take_chores()
    assert chores is not None
    assert {path.rsplit("/", 1)[1] for path in chores.removals} == {name.hex() for name in old[1:]}
    assert blocks.take_chores() is None


def test_nothing_is_kept_of_namespaces_without_blocks() -> None:
    blocks = stored(max_bytes=100 * 10)
    for number in range(3000):
        put(blocks, f"key/salt {number}", list(range(4)), float(number))
        assert not blocks.has_any(f"key/other {number}")
    blocks.check()
    assert len(blocks) == 10
    entries = [kept for name, kept in vars(blocks).items() if isinstance(kept, dict) and name != "_entries"]
    assert max(map(len, entries)) <= 10
    blocks.drop(None)
    blocks.check()
    assert not any(entries)
    assert blocks.num_of(None) == (0, 0)


def test_a_search_makes_no_more_of_a_long_prompt_than_it_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[bytes] = []

    def record(name: bytes, *rest: Any) -> StoredBlock:
        made.append(name)
        return StoredBlock(name, *rest)

    monkeypatch.setattr(stored_tree, "StoredBlock", record)
    life = Life(Disk(), random.Random(1), **OPTIONS)
    (tree,) = [cache.lower for cache in life.caches if cache.lower is not None]
    names: list[bytes] = []
    rows = tree.unknown(array("i", range(4000)), "", names, 0)
    assert made == []
    assert rows is not None
    assert [block.name for block in next(rows)] == names[:1]
    assert made == names[:1]
    rest = [row[0].name for row in rows]
    assert rest == names[1:]
    assert tree.unknown(array("i", range(4)), "", [], 0) is None


def test_the_account_that_has_most_gives_way() -> None:
    blocks = stored(max_bytes=10 * 2048)
    small = put(blocks, "small", list(range(8)), 1.0, num_bytes=2048)
    for start in range(100, 500, 20):
        put(blocks, "big", list(range(start, start + 20)), 2.0, num_bytes=2048)
    blocks.check()
    assert all(name in blocks for name in small)
    assert len(blocks) == 10


def test_blocks_that_were_not_used_for_long_go_and_used_ones_get_a_new_time() -> None:
    blocks = stored(max_age=10_000.0)
    used, unused = put(blocks, "", list(range(8)), 0.0), put(blocks, "", list(range(50, 58)), 0.0)
    blocks.set_time(8_000.0, 8_000.0)
    blocks.touch(used)
    chores = blocks.take_chores()
    assert chores is not None
    assert [seconds for _, seconds in chores.stamps] == [7_999.0, 8_000.0]
    blocks.set_time(12_000.0, 12_000.0)
    blocks.check()
    assert [name in blocks for name in (*used, *unused)] == [True, True, False, False]


@pytest.mark.parametrize("jump", [-950_000.0, 30_000.0])
def test_a_clock_that_is_set_makes_no_block_older_and_files_get_times_by_it(jump: float) -> None:
    blocks = stored(max_age=10_000.0)
    blocks.set_time(1_000_000.0, 500.0)
    names = put(blocks, "", [0, 0, 0, 0], 999_000.0) + put(blocks, "", [1, 1, 1, 1], 1_000_000.0)
    blocks.set_time(1_005_000.0 + jump, 5_500.0)
    assert (len(blocks), blocks.oldest_age) == (2, 6_000.0)
    chores = blocks.take_chores()
    assert chores is not None
    assert [seconds for _, seconds in chores.stamps] == [999_000.0 + jump, 1_000_000.0 + jump]
    blocks.set_time(1_009_500.0 + jump, 10_000.0)
    blocks.check()
    assert [name in blocks for name in names] == [False, True]


def test_dropping_a_namespace_leaves_the_others() -> None:
    blocks = stored()
    mine, other = put(blocks, "me", list(range(8)), 0.0), put(blocks, "you", list(range(8)), 0.0)
    blocks.drop(("me", "me/apart"))
    blocks.check()
    assert [name in blocks for name in (*mine, *other)] == [False, False, True, True]
    assert blocks.num_of(("you",)) == (2, 200)


OPTIONS: dict[str, Any] = {"num_blocks": 40, "block_size": SIZE}
PROMPT = list(range(24))


def disk_with_prompt(**memory: Any) -> Disk:
    """Return a disk to which a life has written the blocks of PROMPT."""
    disk = Disk()
    life = Life(disk, random.Random(1), **OPTIONS, **memory)
    ask(life, "a", PROMPT)
    life.settle()
    return disk


def test_the_next_life_finds_prompt_and_output_on_disk() -> None:
    disk = Disk()
    first = Life(disk, random.Random(1), **OPTIONS)
    record = ask(first, "a", list(range(21)), max_tokens=12)
    first.settle()
    first.check_all_done()
    second = Life(disk, random.Random(2), **OPTIONS)
    follow = ask(second, "b", [*record.history, 7, 7])
    stranger = ask(second, "c", [*record.history, 7, 7], namespace="other")
    second.settle()
    assert (follow.request.num_cached_tokens, sum(follow.request.found_below)) == (32, 32)
    assert (stranger.request.num_cached_tokens, sum(stranger.request.found_below)) == (0, 0)
    assert second.counters.lower_hit_tokens == 32
    second.check_all_done()


def test_tokens_that_come_from_the_host_above_a_disk_are_told_apart() -> None:
    disk = Disk()
    first = Life(disk, random.Random(1), **OPTIONS)
    record = ask(first, "a", list(range(21)), max_tokens=12)
    first.settle()
    names: list[bytes] = []
    first.blocks.name(names, "", array("i", record.history), 8, SIZE)
    second = Life(disk, random.Random(2), hosted=names[2:5], **OPTIONS)
    follow = ask(second, "b", [*record.history, 7, 7])
    second.settle()
    assert (sum(follow.request.found_below), follow.request.found_below[0]) == (32, 3 * SIZE)
    counters = second.counters
    assert (counters.lower_hit_tokens, counters.hosted_hit_tokens, counters.hosted_hits) == (32, 3 * SIZE, 1)
    # In memory it is found on the device.
    again = ask(second, "c", [*record.history, 7, 7])
    second.settle()
    assert (sum(again.request.found_below), again.request.found_below[0]) == (0, 0)
    second.check_all_done()


def test_requests_with_one_prefix_wait_for_one_reading() -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS)
    records = [ask(second, name, PROMPT) for name in "xyz"]
    jobs = second.take_copies(0.0)
    assert [len(job.copies) for job in jobs if not job.is_write] == [5]
    second.jobs += jobs
    second.settle()
    assert [sum(record.request.found_below) for record in records] == [20, 20, 20]
    second.check_all_done()


def test_of_many_requests_that_come_at_once_none_begins_before_its_prefix_was_looked_for() -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS)
    records = [ask(second, str(number), PROMPT, max_tokens=1) for number in range(2 * FORESEEN + 3)]
    second.settle()
    assert {sum(record.request.found_below) for record in records} == {20}
    second.check_all_done()


def test_what_is_gone_from_disk_is_computed_and_what_is_before_it_is_used() -> None:
    disk = disk_with_prompt()
    second = Life(disk, random.Random(2), **OPTIONS)
    gone = names_of(second.blocks, "", PROMPT)[3]
    del disk.files[gone]
    record = ask(second, "b", PROMPT)
    second.settle()
    assert (record.request.num_cached_tokens, gone in disk.files) == (12, True)
    assert (second.counters.num_gone, second.counters.num_damaged) == (1, 0)
    second.check_all_done()


def test_a_block_that_is_cleared_while_it_is_read_is_no_failure() -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS)
    record = ask(second, "b", PROMPT)
    (reading,) = second.take_copies(0.0)
    evict_all(second.cache)
    (removal,) = second.take_copies(0.0)
    second.end(removal)
    second.end(reading)
    second.settle()
    assert record.request.num_cached_tokens == 0
    assert (second.counters.num_gone, second.counters.num_damaged) == (0, 0)
    second.check_all_done()


def test_an_abort_while_the_prefix_is_read_frees_its_blocks_only_after_the_reading() -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS)
    ask(second, "b", PROMPT)
    (job,) = second.take_copies(0.0)
    assert second.scheduler.num_waiting == 1
    second.abort("b")
    second.scheduler.check_idle()
    assert (second.scheduler.is_idle, second.cache.copies.num_in_copy, job.is_cancelled) == (True, 5, True)
    second.end(job)
    assert second.cache.copies.num_in_copy == 0
    second.check_all_done()


def test_a_disk_that_hangs_holds_a_request_up_only_for_a_while() -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS)
    record = ask(second, "b", PROMPT)
    (job,) = second.take_copies(0.0)
    assert second.scheduler.schedule() is None
    second.scheduler.set_time(31.0)
    assert second.take_copies(0.0) == []
    Simulation.run(second)
    assert sum(record.request.found_below) == 0
    second.end(job)
    second.settle()
    second.check_all_done()


def test_a_prefix_that_is_read_more_slowly_than_computed_is_computed() -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS)
    ask(second, "b", PROMPT)
    second.settle()
    evict_all(second.cache)
    second.settle()
    ask(second, "c", PROMPT)
    second.settle()
    second.scheduler.count_step(1e-9)
    second.cache.evict(second.cache.counts.num_cached)
    record = ask(second, "d", PROMPT)
    second.settle()
    assert record.request.num_cached_tokens == 0
    assert second.counters.num_slower == 1


@pytest.mark.parametrize(("read_s", "from_disk"), [(10.0, 0), (1e-4, 20), (None, 20)])
def test_before_anything_was_read_a_first_guess_decides(read_s: float | None, from_disk: int) -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS, kv_read_s=read_s and {False: read_s})
    ask(second, "other", [30, 31, 32], max_tokens=1)
    second.settle()
    second.scheduler.count_step(0.1)
    assert ask(second, "b", PROMPT).request.found_below == (0, 0)
    second.settle()
    assert second.counters.lower_hit_tokens == from_disk


# A prefix that is read misses a step of the stream, 1 s. Its 20 tokens add next to nothing to a step of equal seconds.
@pytest.mark.parametrize(("long_step_s", "from_disk"), [(1.0, 0), (9.0, 20)])
def test_beside_streams_a_prefix_is_read_only_if_it_is_worth_a_step(long_step_s: float, from_disk: int) -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS, budget=40, kv_read_s={True: 1e-4})
    ask(second, "stream", list(range(40, 72)), max_tokens=30)
    for seconds in (long_step_s, 1.0):
        Simulation.step(second)
        second.scheduler.count_step(seconds)
    record = ask(second, "b", PROMPT)
    second.settle()
    assert sum(record.request.found_below) == from_disk
    second.check_all_done()


def test_a_full_disk_harms_nobody_and_is_tried_again() -> None:
    disk = Disk()
    life = Life(disk, random.Random(1), **OPTIONS)
    life.is_full = True
    record = ask(life, "a", PROMPT)
    life.run()
    assert record.finish_reason is not None
    for job in [*life.jobs, *life.take_copies(9000.0)]:
        life.end(job)
    life.jobs.clear()
    assert (disk.files, life.take_copies(9001.0)) == ({}, [])
    life.is_full = False
    ask(life, "b", PROMPT)
    life.run()
    # The clock of the files was set back meanwhile.
    life.scheduler.set_time(100.0)
    for job in life.take_copies(0.0):
        life.end(job)
    assert len(disk.files) > 0


def test_dropped_prefixes_leave_no_file_not_even_one_that_is_being_written() -> None:
    disk = Disk()
    life = Life(disk, random.Random(1), **OPTIONS)
    ask(life, "a", PROMPT)
    while not life.scheduler.is_idle:
        Simulation.step(life)
    jobs = life.take_copies(0.0)
    assert sum(len(job.copies) for job in jobs) > 0
    evict_all(life.cache)
    for job in jobs:
        life.end(job)
    for job in life.take_copies(0.0):
        life.end(job)
    assert disk.files == {}
    life.check_all_done()


@pytest.mark.parametrize("keep", [0, 22])
def test_blocks_that_are_not_kept_in_memory_are_not_kept_on_disk(keep: int) -> None:
    cache = PrefixCache(16, SIZE, stored=stored())
    tokens = array("i", range(30))
    lease = cache.match(tokens)
    cache.extend(lease, 7)
    cache.publish(lease, tokens, 28)
    assert cache.lower is not None
    written = cache.lower.take(3)
    cache.release(lease, keep)
    for copy in written:
        cache.lower.end_write(copy, 100, 0.0)
    for copy in cache.lower.take(16):
        cache.lower.end_write(copy, 100, 0.0)
    assert len(cache.lower.stored) == keep // SIZE
    check_invariants(cache)


def test_a_load_that_does_not_end_stalls_nobody() -> None:
    second = Life(disk_with_prompt(), random.Random(2), **OPTIONS)
    stream = ask(second, "stream", [7, 8, 9], max_tokens=30)
    Simulation.step(second)
    waits = ask(second, "waits", PROMPT)
    (job,) = [job for job in second.take_copies(0.0) if not job.is_write]
    other = ask(second, "other", [30, 31, 32], max_tokens=3)
    for _ in range(10):
        before = stream.request.num_output_tokens
        Simulation.step(second)
        assert stream.request.num_output_tokens == before + 1
    assert (other.finish_reason is not None, waits.request.num_output_tokens) == (True, 0)
    second.end(job)
    second.settle()
    assert sum(waits.request.found_below) == 20
    second.check_all_done()


def test_any_rank_reads_what_another_rank_has_written() -> None:
    disk = Disk()
    first = Life(disk, random.Random(1), num_ranks=2, **OPTIONS)
    assert ask(first, "a", PROMPT).request.rank == 0
    first.settle()
    second = Life(disk, random.Random(2), num_ranks=2, **OPTIONS)
    ask(second, "busy", [7, 8, 9], max_tokens=30)
    second.step()
    record = ask(second, "b", PROMPT)
    second.settle()
    assert (record.request.rank, record.request.num_cached_tokens, sum(record.request.found_below)) == (1, 20, 20)
    second.check_all_done()


def test_ranks_write_at_the_same_time() -> None:
    life = Life(Disk(), random.Random(1), num_ranks=2, **OPTIONS)
    for number in range(2):
        ask(life, str(number), [number, *range(24)])
    while not life.scheduler.is_idle:
        Simulation.step(life)
    jobs = life.take_copies(0.0)
    assert {job.rank for job in jobs if job.copies} == {0, 1}
    assert life.take_copies(0.0) == []


WINDOWS: dict[str, Any] = {"num_window_blocks": 12, "window": 9}
STATES: dict[str, Any] = {"states": StatePolicy(4, 4, 16), "num_snapshots": 6}


@pytest.mark.parametrize("memory", [WINDOWS, STATES, WINDOWS | STATES], ids=["windows", "states", "both"])
def test_a_prefix_on_disk_serves_up_to_its_last_border(memory: dict[str, Any]) -> None:
    disk = Disk()
    first = Life(disk, random.Random(1), **OPTIONS, **memory)
    record = ask(first, "a", PROMPT, max_tokens=12)
    first.settle()
    first.check_all_done()
    kinds = {len(name) for name in disk.files}
    assert kinds == {16, 17}
    # A window of nine tokens reaches over two blocks, at the ends of the prompt and of the request.
    num_beside = (4 if memory is not STATES else 0) + (2 if memory is not WINDOWS else 0)
    assert sum(len(name) == 17 for name in disk.files) == num_beside
    second = Life(disk, random.Random(2), **OPTIONS, **memory)
    other = ask(second, "other", [*range(20), 30, 30])
    shorter = ask(second, "shorter", [*range(17), 30, 30])
    second.settle()
    assert (other.request.num_cached_tokens, sum(other.request.found_below)) == (20, 20)
    assert shorter.request.num_cached_tokens == 0
    second.check_all_done()
    third = Life(disk, random.Random(3), **OPTIONS, **memory)
    follow = ask(third, "b", [*record.history, 7, 7])
    third.settle()
    assert (follow.request.num_cached_tokens, sum(follow.request.found_below)) == (32, 32)
    third.check_all_done()


@pytest.mark.parametrize("memory", [WINDOWS, STATES], ids=["windows", "states"])
def test_without_its_last_border_a_prefix_serves_up_to_the_one_before(memory: dict[str, Any]) -> None:
    disk = Disk()
    first = Life(disk, random.Random(1), **OPTIONS, **memory)
    record = ask(first, "a", PROMPT, max_tokens=12)
    first.settle()
    names = names_of(first.blocks, "", list(record.history))
    second = Life(disk, random.Random(2), **OPTIONS, **memory)
    # The file goes after the second life has found it.
    del disk.files[border_name(names[7], Kind.WINDOW if memory is WINDOWS else Kind.STATE)]
    follow = ask(second, "b", [*record.history, 7, 7])
    second.settle()
    assert (follow.request.num_cached_tokens, sum(follow.request.found_below)) == (20, 20)
    second.check_all_done()


@pytest.mark.parametrize("memory", [WINDOWS, STATES], ids=["windows", "states"])
def test_window_blocks_and_states_in_copy_outlive_the_blocks_that_they_belong_to(memory: dict[str, Any]) -> None:
    disk = Disk()
    life = Life(disk, random.Random(1), **OPTIONS, **memory)
    ask(life, "a", PROMPT)
    while not life.scheduler.is_idle:
        Simulation.step(life)
    jobs = life.take_copies(0.0)
    assert any(copy.kind is not Kind.KV for job in jobs for copy in job.copies)
    evict_all(life.cache)
    check_invariants(life.cache)
    ask(life, "b", list(range(40, 15, -1)))
    for _ in range(4):
        Simulation.step(life)
    for job in jobs:
        life.end(job)
    life.settle()
    life.check_all_done()


def test_an_abort_while_a_border_is_read_frees_it_only_after_the_reading() -> None:
    second = Life(disk_with_prompt(**WINDOWS, **STATES), random.Random(2), **OPTIONS, **WINDOWS, **STATES)
    ask(second, "b", PROMPT)
    (job,) = second.take_copies(0.0)
    assert [copy.kind for copy in job.copies] == [Kind.WINDOW] * 2 + [Kind.STATE] + [Kind.KV] * 5
    second.abort("b")
    assert (second.cache.windows.num_lent_alone, second.cache.states.table.num_written) == (2, 1)
    check_invariants(second.cache)
    second.end(job)
    assert (second.cache.windows.num_lent, second.cache.states.table.num_written) == (0, 0)
    second.check_all_done()


HOST: dict[str, Any] = {"num_blocks": 16, "block_size": SIZE, "tier": Tier.HOST}


def fill(life: Life, *starts: int) -> None:
    """Let prompts of five blocks, one after another, push out what is cached."""
    for start in starts:
        ask(life, f"fill {start}", list(range(start, start + 22)), max_tokens=1)
        life.settle()


def test_blocks_move_to_the_host_as_they_leave_the_device_and_come_back() -> None:
    host = Disk()
    life = Life(host, random.Random(1), **HOST)
    prompt = list(range(22))
    ask(life, "a", prompt, max_tokens=1)
    life.settle()
    assert host.files == {}
    fill(life, 10, 20, 28)
    names = names_of(life.blocks, "", prompt)
    assert all(name in host.files for name in names)
    assert life.cache.peek(array("i", prompt)) < 20
    again = ask(life, "b", prompt)
    life.settle()
    assert again.request.num_cached_tokens == 20
    assert again.request.found_below is not None
    assert sum(again.request.found_below) > 0
    stranger = ask(life, "c", prompt, namespace="other")
    life.settle()
    assert stranger.request.num_cached_tokens == 0
    life.check_all_done()


def test_a_device_keeps_a_few_blocks_free_and_what_clients_retain() -> None:
    host = Disk()
    life = Life(host, random.Random(1), **HOST)
    prompt = array("i", range(22))
    ask(life, "a", prompt.tolist(), max_tokens=1)
    life.settle()
    lease = life.cache.match(prompt)
    life.cache.retentions.retain(lease, 20, 50.0)
    life.cache.release(lease)
    fill(life, 10, 20, 28)
    for _ in range(3):
        life.step()
    assert life.cache.peek(prompt) == 20
    assert life.cache.counts.num_free >= num_kept_free(16, 16, SIZE)
    assert len(host.files) > 0
    life.check_all_done()


def test_a_block_on_its_way_to_the_host_is_given_to_nobody_before_it_is_there() -> None:
    life = Life(Disk(), random.Random(1), **HOST | {"num_blocks": 64})
    for number in range(13):
        ask(life, str(number), [number, *range(20)], max_tokens=1)
        while not life.scheduler.is_idle:
            Simulation.step(life)
    (job,) = life.take_copies(0.0)
    assert (job.is_write, len(job.copies)) == (True, life.cache.copies.num_in_copy)
    assert 0 < len(job.copies) <= num_kept_free(64, 16, SIZE)
    assert life.take_copies(0.0) == []
    ask(life, "next", list(range(40, 15, -1)))
    for _ in range(6):
        Simulation.step(life)
    life.end(job)
    assert life.cache.copies.num_in_copy == 0
    life.settle()
    life.check_all_done()


@pytest.mark.parametrize("memory", [WINDOWS, STATES, WINDOWS | STATES], ids=["windows", "states", "both"])
def test_borders_are_on_the_host_before_their_blocks_leave(memory: dict[str, Any]) -> None:
    host = Disk()
    life = Life(host, random.Random(1), **HOST | {"num_blocks": 24}, **memory)
    prompt = list(range(22))
    ask(life, "a", prompt, max_tokens=1)
    life.settle()
    assert {len(name) for name in host.files} == {16, 17}
    fill(life, 6, 12, 18, 24, 28)
    again = ask(life, "b", prompt)
    life.settle()
    assert again.request.num_cached_tokens == 20
    life.check_all_done()


def test_what_the_host_has_is_within_its_size_and_dropped_with_the_rest() -> None:
    host = Disk()
    life = Life(host, random.Random(1), **HOST, max_bytes=800)
    for start in range(0, 28, 2):
        fill(life, start)
        assert life.blocks.num_bytes <= 800
    assert life.blocks.num_evicted > 0
    assert 0 < len(host.files) <= 8 + num_kept_free(16, 16, SIZE)
    evict_all(life.cache)
    for _ in range(3):
        life.step()
    assert host.files == {}


TALK = st.tuples(st.integers(0, 3), st.integers(0, 24), st.integers(0, 3), st.sampled_from(["", "tenant"]))
SHARED = [(5 * i + 1) % VOCAB_SIZE for i in range(24)]


@dataclass
class History:
    """Lives of an engine over one disk, or each over a host's memory of its own. Some of them are killed."""

    talks: list[tuple[int, int, int, str]]
    choices: random.Random
    num_lives: int
    options: dict[str, Any]
    memory: dict[str, Any] = field(default_factory=dict)
    disk: Disk = field(default_factory=Disk)

    def play(self) -> None:
        """Let all lives pass. Every token is compared with an undisturbed run, and every copy with its block."""
        for _ in range(self.num_lives):
            if self.options["tier"] is Tier.HOST:
                self.disk = Disk()  # the host's memory ends with the engine
            life = Life(self.disk, self.choices, block_size=SIZE, budget=12, **self.options, **self.memory)
            self.talk(life)
            if self.choices.random() < 0.5:
                continue  # the engine is killed: what it was doing is lost
            life.is_full = False
            life.run()
            while jobs := [*life.jobs, *life.take_copies(0.0)]:
                life.jobs.clear()
                for job in jobs:
                    life.end(job)
            life.check_all_done()

    def talk(self, life: Life) -> None:
        choices, now = self.choices, 0.0
        for number, (kind, length, own, namespace) in enumerate(self.talks):
            prompt = [*SHARED[:length], *(kind for _ in range(own)), 1]
            ask(life, str(number), prompt, max_tokens=1 + choices.randrange(12), namespace=namespace)
            for _ in range(choices.randrange(6)):
                life.step()
                check_invariants(life.cache)
            match choices.randrange(12):
                case 0:
                    life.abort(str(choices.randrange(number + 1)))
                case 1:
                    life.is_full = not life.is_full
                case 2:
                    evict_all(life.cache)
                case 3 if self.disk.files:
                    del self.disk.files[choices.choice(sorted(self.disk.files))]
                case 4 | 5 | 6:
                    lease = life.cache.match(array("i", prompt), namespace)
                    life.cache.retentions.retain(
                        lease, len(prompt), choices.choice([1.0, 50.0]), yields=choices.random() < 0.5
                    )
                    life.cache.release(lease)
                case 7:
                    now += choices.choice([0.5, 3.0, 90.0])
                    life.scheduler.set_time(now)
            check_invariants(life.cache)


HISTORIES = st.builds(
    History,
    talks=st.lists(TALK, min_size=1, max_size=10),
    choices=st.integers(0, 2**16).map(random.Random),
    num_lives=st.integers(1, 3),
    options=st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([16, 24, 60]),
            "num_ranks": st.sampled_from([1, 2, 3]),
            "tier": st.sampled_from(Tier),
            "max_bytes": st.sampled_from([300, 1200, 100_000]),
            "depth": st.sampled_from([0, 1]),
            "overflow": st.sampled_from(Overflow),
        }
    ),
    memory=st.sampled_from([{}, {}, WINDOWS, STATES, WINDOWS | STATES]),
)


# More than 100,000 steps: two minutes of a core of its own.
@pytest.mark.slow
@pytest.mark.timeout(900)
@examples(75)
@given(HISTORIES)
def test_tokens_are_those_of_an_undisturbed_run_whatever_leaves_memory_and_comes_back(history: History) -> None:
    history.play()


# More than a million steps.
@pytest.mark.long
@pytest.mark.timeout(7200)
@examples(750)
@given(HISTORIES)
def test_long_histories_too(history: History) -> None:
    history.play()
