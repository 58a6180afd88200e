"""Sorting pairs by expert: against a stable sort, for every spread of tokens over experts, and nothing beside it."""

import pytest
import torch

import kernels.gpu.moe_align as align
from kernels.gpu.moe_align import SortedPairs, max_row_tiles, num_chunks, padded_bins, sort_pairs, sort_pairs_reference

CANARY = -77


def ids_of(name, num_tokens=37, top_k=3, num_experts=11):
    random = torch.Generator().manual_seed(5)
    spread = torch.rand(num_tokens, num_experts, generator=random).topk(top_k).indices
    return {
        "spread": spread,
        "some elsewhere": torch.where(torch.rand(spread.shape, generator=random) < 0.4, -1, spread),
        "all elsewhere": torch.full_like(spread, -1),
        "all on one": torch.full_like(spread, 7),
        "one token": spread[:1],
        "out of range": torch.where(spread == 4, num_experts + 90, spread),
    }[name]


def check(expert_ids, num_slots, block_m, device, expert_slot=None):
    num_pairs = expert_ids.numel()
    max_tiles = max_row_tiles(num_pairs, num_slots, block_m)
    whole = [
        torch.full((size + 4,), CANARY, dtype=torch.int32, device=device) for size in (num_pairs, *[max_tiles] * 3)
    ]
    pairs, slot, first, rows = (tensor[2:-2] for tensor in whole)
    into = SortedPairs(pairs, slot, first, rows, torch.tensor(CANARY, dtype=torch.int32, device=device))
    counts = torch.empty(num_chunks(num_pairs) * padded_bins(num_slots), dtype=torch.int32, device=device)
    slots = None if expert_slot is None else expert_slot.to(device)
    sort_pairs(expert_ids.to(device), num_slots, block_m, into, counts, slots)
    assert all((tensor[:2] == CANARY).all() and (tensor[-2:] == CANARY).all() for tensor in whole)
    expected = sort_pairs_reference(expert_ids, num_slots, block_m, expert_slot)
    found = int(expected.num_tiles)
    assert int(into.num_tiles) == found <= max_tiles
    assert torch.equal(pairs[: len(expected.pairs)].cpu(), expected.pairs)
    assert torch.equal(slot.cpu(), expected.slot)
    assert torch.equal(first[:found].cpu(), expected.first[:found])
    assert torch.equal(rows[:found].cpu(), expected.rows[:found])


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("name", ["spread", "some elsewhere", "all elsewhere", "all on one", "one token"])
def test_pairs_are_sorted_stably_and_cut_into_tiles(device, name, block_m):
    check(ids_of(name), 11, block_m, device)


def test_counting_in_a_launch_of_its_own_gives_the_same(device, monkeypatch):
    monkeypatch.setattr(align, "MAX_PAIRS_AT_ONCE", 256)
    check(ids_of("some elsewhere", num_tokens=300), 11, 16, device)


def test_many_chunks_counted_by_every_program_give_the_same(device):
    check(ids_of("spread", num_tokens=300), 11, 32, device)


def test_experts_are_found_in_their_slots_and_absent_ones_have_no_rows(device):
    expert_slot = torch.tensor([3, -1, 0, -1, 2, 1, -1, 4, -1, -1, -1], dtype=torch.int32)
    check(ids_of("some elsewhere"), 5, 16, device, expert_slot)


def test_ids_beyond_the_experts_count_as_absent(device):
    expert_ids = ids_of("out of range")
    num_pairs = expert_ids.numel()
    tiles = max_row_tiles(num_pairs, 11, 16)
    into = SortedPairs(*(torch.zeros(n, dtype=torch.int32, device=device) for n in (num_pairs, tiles, tiles, tiles, 1)))
    sort_pairs(expert_ids.to(device), 11, 16, into, torch.empty(32, dtype=torch.int32, device=device))
    expected = sort_pairs_reference(torch.where(expert_ids > 10, -1, expert_ids), 11, 16)
    assert torch.equal(into.pairs[: len(expected.pairs)].cpu(), expected.pairs)
    assert torch.equal(into.slot.cpu(), expected.slot)


@pytest.mark.parametrize(("num_pairs", "num_slots", "block_m"), [(8, 128, 16), (50, 3, 16), (1, 1, 64), (130, 4, 32)])
def test_no_spread_makes_more_tiles_than_the_bound_and_one_makes_as_many(num_pairs, num_slots, block_m):
    def tiles(counts):
        return sum(-(-count // block_m) for count in counts)

    bound = max_row_tiles(num_pairs, num_slots, block_m)
    ones = min(num_pairs, num_slots) - 1
    worst = tiles([1] * ones + [num_pairs - ones])
    random = torch.Generator().manual_seed(6)
    for _ in range(200):
        counts = torch.bincount(torch.randint(num_slots, (num_pairs,), generator=random))
        assert tiles(counts.tolist()) <= bound
    assert bound - 1 <= worst <= bound
