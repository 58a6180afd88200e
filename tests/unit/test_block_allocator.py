import random
from typing import Any

import pytest

from radix_cache.block_allocator import BlockAllocator
from radix_cache.errors import InvariantError


def test_fresh_pool_is_filled_from_its_start() -> None:
    assert BlockAllocator(16).allocate(3) == [0, 1, 2]


def test_growing_run_takes_the_ids_behind_its_last_block() -> None:
    allocator = BlockAllocator(16)
    allocator.allocate(3)
    assert allocator.allocate(2, after=2) == [3, 4]


def test_new_run_starts_in_the_middle_so_that_its_neighbour_can_grow() -> None:
    allocator = BlockAllocator(20)
    allocator.allocate(4)
    assert allocator.allocate(2) == [11, 12]
    assert allocator.allocate(7, after=3) == [4, 5, 6, 7, 8, 9, 10]
    assert allocator.allocate(7, after=12) == [13, 14, 15, 16, 17, 18, 19]


def test_requests_that_grow_in_turn_stay_contiguous() -> None:
    allocator = BlockAllocator(64)
    runs = [allocator.allocate(1) or [] for _ in range(4)]
    for _ in range(7):
        for run in runs:
            run += allocator.allocate(1, after=run[-1]) or []
    for run in runs:
        assert run == list(range(run[0], run[0] + 8))


def test_blocked_run_continues_in_the_largest_extent() -> None:
    allocator = BlockAllocator(20)
    allocator.allocate(20)
    allocator.free([3, 4])
    allocator.free(list(range(10, 16)))
    assert allocator.allocate(4, after=2) == [3, 4, 12, 13]


def test_new_run_goes_into_the_lowest_of_equally_large_extents() -> None:
    allocator = BlockAllocator(20)
    allocator.allocate(20)
    allocator.free([15, 16, 17, 5, 6, 7])
    assert allocator.allocate(1) == [6]


def test_too_large_a_run_uses_up_the_largest_extents_in_turn() -> None:
    allocator = BlockAllocator(12)
    allocator.allocate(12)
    allocator.free([1, 2, 5, 6, 7, 10])
    assert allocator.allocate(5) == [5, 6, 7, 1, 2]


def test_allocate_returns_none_and_changes_nothing_when_too_few_are_free() -> None:
    allocator = BlockAllocator(4)
    allocator.allocate(3)
    assert allocator.allocate(2, after=2) is None
    assert allocator.num_free == 1
    assert allocator.allocate(1, after=2) == [3]
    assert allocator.allocate(0) == []
    assert allocator.allocate(1) is None


def test_freed_neighbours_join_to_one_run() -> None:
    allocator = BlockAllocator(9)
    allocator.allocate(9)
    for ids in ([4], [2, 6], [5, 3], [8, 7]):
        allocator.free(ids)
        allocator.check_invariants()
    assert allocator.allocate(7) == [2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize("ids", [[3], [0, 0], [1, 99], [0, -1]])
def test_free_of_a_free_double_or_unknown_id_raises_and_changes_nothing(ids: list[int]) -> None:
    allocator = BlockAllocator(8)
    allocator.allocate(3)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.free(ids)
    assert allocator.num_free == 5
    allocator.check_invariants()
    allocator.free([0, 1, 2])
    assert allocator.num_free == 8


@pytest.mark.parametrize("after", [3, -1, 8])
def test_allocate_after_a_block_that_is_not_allocated_raises(after: int) -> None:
    allocator = BlockAllocator(8)
    allocator.allocate(3)
    with pytest.raises(ValueError, match="not allocated"):
        allocator.allocate(1, after=after)


def test_senseless_counts_raise() -> None:
    with pytest.raises(ValueError, match="positive"):
        BlockAllocator(0)
    with pytest.raises(ValueError, match="negative"):
        BlockAllocator(4).allocate(-1)


def changed(value: Any) -> list[Any]:
    """Return other values of a field."""
    if isinstance(value, int):
        return [value - 1, value + 1]
    if isinstance(value, bytearray):
        return [value[:place] + bytes([1 - value[place]]) + value[place + 1 :] for place in range(len(value))]
    if isinstance(value, dict):
        return [{}, {key: other - 1 for key, other in value.items()}, value | {1: 2}]
    return [[], value * 100]


@pytest.mark.parametrize("field", vars(BlockAllocator(8)))
def test_check_invariants_notices_a_change_of_any_field(field: str) -> None:
    allocator = BlockAllocator(8)
    allocator.allocate(3)
    allocator.check_invariants()
    for value in changed(getattr(allocator, field)):
        setattr(allocator, field, value)
        with pytest.raises(InvariantError):
            allocator.check_invariants()


def largest_extent(free: set[int]) -> tuple[int, int]:
    """Start and length of the largest run in `free`, the lowest one among equals."""
    starts = [block for block in free if block - 1 not in free]
    lengths = {start: next(n for n in range(1, len(free) + 1) if start + n not in free) for start in starts}
    return min(lengths.items(), key=lambda item: (-item[1], item[0]))


@pytest.mark.parametrize("seed", range(3))
def test_random_runs_agree_with_a_plain_set_of_free_ids(seed: int) -> None:
    draw = random.Random(seed)
    num_blocks = (7, 64, 400)[seed]
    allocator = BlockAllocator(num_blocks)
    free = set(range(num_blocks))
    held: list[int] = []
    for _ in range(2000):
        if draw.random() < 0.55:
            count = draw.randint(0, draw.choice([1, 3, 40]))
            after = draw.choice(held) if held and draw.random() < 0.7 else None
            ids = allocator.allocate(count, after)
            assert (ids is None) == (count > len(free))
            if ids is None:
                continue
            assert len(set(ids)) == count
            assert set(ids) <= free
            if count and after is not None and after + 1 in free:
                assert ids[0] == after + 1
            elif count:
                start, length = largest_extent(free)
                assert ids[0] == (start + (length - min(count, length)) // 2 if start else 0)
            free -= set(ids)
            held += ids
        else:
            draw.shuffle(held)
            count = draw.randint(0, min(len(held), 12))
            allocator.free(held[:count])
            free |= set(held[:count])
            del held[:count]
        assert allocator.num_free == len(free)
        allocator.check_invariants()
