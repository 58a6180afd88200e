"""KV of several ranks on disk: rank 0 says what another rank copies, which copies its own memory and says when."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from moeserve.engine.kv.disk.copier import BlockCopier, BlockMemory, make_buffers
from moeserve.engine.kv.disk.files import BlockFiles
from moeserve.engine.ranks.copies import MemberCopies, RankCopies
from moeserve.engine.ranks.messages import FromRank, ToRank
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import GONE, CopyJob
from moeserve.wire import decode, encode
from radix_cache import BlockCopy, Chores, Kind, StoredBlock

NUM_BLOCKS = 12
FINGERPRINT = "a" * 32
FOLDER = f"{FINGERPRINT}/{'b' * 32}.{'c' * 32}"


def memory_of(seed: int) -> BlockMemory:
    random = np.random.default_rng(seed)
    return [random.integers(0, 256, (2, NUM_BLOCKS, size), np.uint8) for size in (64, 32)]


def copy_of(block: int, number: int) -> BlockCopy:
    return BlockCopy(block, number.to_bytes(16, "big"), FOLDER, number, bytes(16))


def content(memory: BlockMemory, block: int) -> bytes:
    return b"".join(array[:, block].tobytes() for array in memory)


class Ranks:
    """Rank 0 and rank 1, whose messages go through the wire's bytes. num_parts: of a block."""

    def __init__(self, root: Path, num_parts: int = 1) -> None:
        self.memories = [memory_of(0), memory_of(1)]
        self.copies = RankCopies(self._to_member, [range(2)] if num_parts == 2 else [range(1), range(1, 2)])
        self.files = [BlockFiles(root, FINGERPRINT, part=part, num_parts=num_parts) for part in (0, num_parts - 1)]
        self.member = MemberCopies(1, lambda *_: self._copier(1, self.files[1]), self._to_first)
        self.files[0].describe(b"{}")
        self.copies.open(self._copier(0, self.files[0]), self.files[0], self._turn)

    def _copier(self, rank: int, files: BlockFiles) -> BlockCopier:
        return BlockCopier(files, lambda: make_buffers({Kind.KV: self.memories[rank]}))

    def _to_member(self, rank: int, message: ToRank) -> None:
        assert rank == 1
        received: Any = decode(encode(message, 1), ToRank, 2**20)[1]
        self.member.follow(received)

    def _to_first(self, message: FromRank) -> None:
        self.copies.on_message(decode(encode(message, 1), FromRank, 2**20)[1])

    def _turn(self) -> None:
        self.member.tell_ends(0.001)

    def run(self, *jobs: CopyJob) -> list[Result[CopyJob]]:
        """Carry jobs out and return their results in the order of the jobs."""
        for job in jobs:
            self.copies.start(job)
        results: list[Result[CopyJob]] = []
        while self.copies.is_busy:
            results += self.copies.take(0.001)
        assert not self.member.is_busy
        return sorted(results, key=lambda result: jobs.index(result.job)) if jobs else results

    def close(self) -> None:
        self.member.close()
        self.copies.close()


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_a_rank_reads_the_blocks_that_another_rank_has_written(ranks: Ranks) -> None:
    here, there = ranks.memories
    of_first = CopyJob([copy_of(3, 1)], is_write=True)
    of_other = CopyJob([copy_of(3, 2), copy_of(4, 3)], is_write=True, rank=1)
    written = ranks.run(of_first, of_other)
    assert [(len(result.num_bytes), result.error) for result in written] == [(1, None), (2, None)]
    expected = content(here, 3), content(there, 3), content(there, 4)
    assert len(set(expected)) == 3
    ranks.run(CopyJob([copy_of(7, 1)], rank=1), CopyJob([copy_of(5, 2), copy_of(6, 3)]))
    assert (content(there, 7), content(here, 5), content(here, 6)) == expected


def test_a_damaged_file_ends_a_job_of_another_rank_where_it_ends_one_here(ranks: Ranks, tmp_path: Path) -> None:
    copies = [copy_of(block, block) for block in range(4)]
    ranks.run(CopyJob(copies, is_write=True, rank=1))
    path = tmp_path / copies[2].path
    path.write_bytes(path.read_bytes()[:-1])
    (result,) = ranks.run(CopyJob(copies, rank=1))
    assert (len(result.num_bytes), result.error) == (2, "its size is wrong")


def test_a_job_that_is_cancelled_ends_all_the_same(ranks: Ranks) -> None:
    job = CopyJob([copy_of(block % NUM_BLOCKS, block) for block in range(200)], rank=1)
    ranks.copies.start(job)
    job.is_cancelled = True
    (result,) = ranks.run()
    assert (result.job, result.num_bytes) == (job, [])


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path, num_parts=2)
    yield made
    made.close()


def test_of_shared_layers_every_rank_copies_its_part_of_a_block(stages: Ranks) -> None:
    copies = [copy_of(3, 1), copy_of(4, 2)]
    (written,) = stages.run(CopyJob(copies, is_write=True))
    size = stages.files[0].status(StoredBlock(copies[0].name, FOLDER, 0, 0.0)).num_bytes
    assert (written.num_bytes, written.error) == ([size, size], None)
    assert size > sum(len(content(memory, 3)) for memory in stages.memories)
    expected = [content(memory, block) for memory in stages.memories for block in (3, 4)]
    (read,) = stages.run(CopyJob([copy_of(7, 1), copy_of(8, 2)]))
    assert read.num_bytes == written.num_bytes
    assert [content(memory, block) for memory in stages.memories for block in (7, 8)] == expected


@pytest.mark.parametrize("suffix", ["", ".1"])
def test_a_block_is_served_up_to_the_first_one_of_which_a_rank_lacks_its_part(
    stages: Ranks, tmp_path: Path, suffix: str
) -> None:
    copies = [copy_of(block, block) for block in range(4)]
    stages.run(CopyJob(copies, is_write=True))
    (tmp_path / f"{copies[2].path}{suffix}").unlink()
    (result,) = stages.run(CopyJob(copies))
    assert (len(result.num_bytes), result.error) == (2, GONE)
    sought = [[StoredBlock(copy.name, FOLDER, 0, 0.0)] for copy in copies]
    (found,) = stages.run(CopyJob((), sought=sought))
    assert [block.name for block in found.found] == [copy.name for copy in copies[:2]]


def test_parts_of_a_block_are_removed_with_it(stages: Ranks, tmp_path: Path) -> None:
    copies = [copy_of(block, block) for block in range(2)]
    stages.run(CopyJob(copies, is_write=True))
    stages.run(CopyJob((), is_write=True, chores=Chores([copies[0].path], [])))
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [
        copies[1].name.hex() + end for end in ("", ".1")
    ]


def test_a_job_is_of_the_ranks_that_hold_parts_of_its_blocks() -> None:
    asked: list[int] = []
    copies = RankCopies(lambda rank, _: asked.append(rank), [range(0, 6, 2), range(1, 6, 2)])
    copies.open(cast("BlockCopier", object()), BlockFiles(Path(), FINGERPRINT), lambda: None)
    asked.clear()
    copies.start(CopyJob([copy_of(1, 1)], rank=1))
    assert asked == [1, 3, 5]


def test_a_job_of_all_ranks_that_is_cancelled_ends_once(stages: Ranks) -> None:
    job = CopyJob([copy_of(block % NUM_BLOCKS, block) for block in range(200)])
    stages.copies.start(job)
    job.is_cancelled = True
    (result,) = stages.run()
    assert (result.job, result.num_bytes, result.error) == (job, [], None)


def test_ends_of_jobs_are_told_once(ranks: Ranks) -> None:
    jobs = [CopyJob([copy_of(number, number)], is_write=True, rank=number % 2) for number in range(10)]
    assert [result.job for result in ranks.run(*jobs)] == jobs
    assert ranks.copies.take() == []
