"""Memory that ranks lend each other: who keeps which experts, and what is read from there."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from experts.errors import ExpertStoreError
from experts.expert_file import PAGE_BYTES, write_expert_file
from experts.peer_memory import LentMemory, PeerTier, lend, lend_experts
from experts.placement import Placement, contiguous
from experts.tiers import DiskTier

SOURCE = bytes(32)
EXPERT_BYTES = PAGE_BYTES + 100


def content(layer: int, expert: int) -> bytes:
    return bytes([10 * layer + expert]) * EXPERT_BYTES


@pytest.fixture
def disk(tmp_path: Path) -> DiskTier:
    path = tmp_path / "experts"
    experts = [memoryview(content(layer, expert)) for layer in range(2) for expert in range(4)]
    write_expert_file(path, source=SOURCE, num_layers=2, num_experts=4, expert_bytes=EXPERT_BYTES, experts=experts)
    return DiskTier(path, SOURCE)


def read(tier: PeerTier, layer: int, expert: int) -> bytes:
    # From the start of a page, as slots are.
    out = mmap.mmap(-1, 2 * PAGE_BYTES)
    for start in range(0, len(out), PAGE_BYTES):
        tier.read(layer, expert, start, memoryview(out)[start : start + PAGE_BYTES])
    return bytes(out[:EXPERT_BYTES])


def test_what_no_fast_tier_holds_is_dealt_evenly_to_ranks_that_do_not_serve_it() -> None:
    lent = lend_experts(contiguous(2, 8, 2), [2, 2], np.ones((2, 8)), 100)
    assert lent == (((0, 6), (1, 6), (0, 7), (1, 7)), ((0, 2), (1, 2), (0, 3), (1, 3)))


def test_the_busiest_of_those_come_first_and_there_is_an_end_to_room() -> None:
    load = np.array([[1, 9, 2, 8, 3, 7, 4, 6]])
    lent = lend_experts(contiguous(1, 8, 2), [1], load, 1)
    # Experts 1 and 5 are in memory; of the others 3 and 7 are chosen most.
    assert lent == (((0, 7),), ((0, 3),))


def test_a_rank_without_room_leaves_it_to_one_that_serves_the_expert() -> None:
    placement = Placement(2, (((0,), (0,), (0,), (1,), (1,), (1,)),))
    lent = lend_experts(placement, [2], np.array([[9, 8, 7, 3, 2, 1]]), 1)
    assert lent == (((0, 5),), ((0, 2),))
    replicated = Placement(2, (((0, 1), (0, 1), (0, 1)),))
    assert lend_experts(replicated, [2], np.ones((1, 3)), 5) == (((0, 2),), ())


def test_lent_experts_are_read_from_peers_and_the_others_from_the_tier_behind(disk: DiskTier) -> None:
    lent = [[(1, 3), (0, 0)], []]
    memories = [lend(of_rank, disk, disk.header.record_bytes) for of_rank in lent]
    tier = PeerTier(lent, disk.header, disk)
    tier.attach(memories)
    for memory in memories:
        os.close(memory.descriptor)
    assert [read(tier, layer, expert) for layer in range(2) for expert in range(4)] == [
        content(layer, expert) for layer in range(2) for expert in range(4)
    ]
    assert {key: tier.tier_of(*key) for key in [(1, 3), (0, 0), (0, 1)]} == {
        (1, 3): "peer",
        (0, 0): "peer",
        (0, 1): "disk",
    }
    tier.close()


def test_what_is_lent_cannot_be_written_any_more(disk: DiskTier) -> None:
    memory = lend([(0, 1)], disk, disk.header.record_bytes)
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"x", 0)
    os.close(memory.descriptor)


def test_a_peer_that_lends_something_else_is_found_out_by_the_checksum(disk: DiskTier) -> None:
    memory = lend([(0, 1)], disk, disk.header.record_bytes)
    tier = PeerTier([[(0, 2)]], disk.header, disk)
    tier.attach([memory])
    with pytest.raises(ExpertStoreError, match="lent by a rank is damaged, expert 2 of layer 0"):
        read(tier, 0, 2)
    os.close(memory.descriptor)


def test_a_peer_that_is_gone_is_named(disk: DiskTier) -> None:
    memory = lend([(0, 1)], disk, disk.header.record_bytes)
    os.close(memory.descriptor)
    with pytest.raises(ExpertStoreError, match="rank 0 lends cannot be read"):
        PeerTier([[(0, 1)]], disk.header, disk).attach([LentMemory(memory.pid, memory.descriptor)])
