"""Blocks of a device that go to the host's pages and back, with torch's CPU in the place of the device."""

from __future__ import annotations

import threading
from array import array
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.kv import host as kv_host
from moeserve.engine.kv.disk.copier import BlockCopier
from moeserve.engine.kv.disk.files import BlockFiles
from moeserve.engine.kv.host import (
    HostCopier,
    HostedBlocks,
    HostPages,
    KvHost,
    device_buffers,
    open_hosted,
    open_kv_host,
)
from moeserve.engine.memory_plan import check_kv_tiers
from moeserve.engine.rank import Rank
from moeserve.scheduling.arrivals import Result
from moeserve.scheduling.lower_tier import CopyJob
from radix_cache import BlockCopy, Chores, Kind, StoredBlock

CPU = torch.device("cpu")
FOLDER = "f/a.n"


def memories() -> dict[Kind, list[torch.Tensor]]:
    """KV of two pools, 24 bytes a block, window blocks of 36 and states of 50, all with random bytes."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    return {
        Kind.KV: [random(2, 40, 8), random(1, 40, 8)],
        Kind.WINDOW: [random(3, 8, 12)],
        Kind.STATE: [random(1, 6, 50)],
    }


def copy_of(name: int, block: int, kind: Kind = Kind.KV) -> BlockCopy:
    return BlockCopy(block, bytes((name,)) * 16 + (bytes((kind,)) if kind else b""), FOLDER, 0, b"", kind)


def finish(copier: HostCopier | BlockCopier, job: CopyJob) -> Result[CopyJob]:
    copier.start(job)
    (result,) = copier.take(30.0)
    assert not copier.is_busy
    return result


def test_blocks_of_every_kind_come_back_from_their_pages_with_the_same_bytes() -> None:
    memory = memories()
    before = {kind: [tensor.clone() for tensor in tensors] for kind, tensors in memory.items()}
    pages = HostPages(100, 24, CPU)
    copier = HostCopier(pages, memory)
    kv = [copy_of(number, number) for number in range(33)]
    beside = [copy_of(1, 3, Kind.WINDOW), copy_of(2, 4, Kind.STATE)]
    written = finish(copier, CopyJob([*beside, *kv], is_write=True))
    assert (list(written.num_bytes), written.error) == ([48, 72, *[24] * 33], None)
    assert pages.num_free == 100 - 2 - 3 - 33
    for tensors in memory.values():
        for tensor in tensors:
            tensor.zero_()
    # They go to other places than they came from.
    to = [
        copy_of(1, 5, Kind.WINDOW),
        copy_of(2, 0, Kind.STATE),
        *(copy_of(number, 39 - number) for number in range(33)),
    ]
    assert finish(copier, CopyJob(to)).error is None
    for tensor, was in zip(memory[Kind.KV], before[Kind.KV], strict=True):
        assert tensor[:, 7:].equal(was[:, :33].flip(1))
        assert not tensor[:, :7].any()
    assert memory[Kind.WINDOW][0][:, 5].equal(before[Kind.WINDOW][0][:, 3])
    assert memory[Kind.STATE][0][:, 0].equal(before[Kind.STATE][0][:, 4])
    copier.close()


def test_a_block_that_finds_no_pages_is_not_kept_and_one_that_is_gone_ends_a_reading() -> None:
    pages = HostPages(3, 24, CPU)
    copier = HostCopier(pages, memories())
    four = [copy_of(number, number) for number in range(4)]
    assert list(finish(copier, CopyJob(four, is_write=True)).num_bytes) == [24, 24, 24, 0]
    chores = Chores([four[1].path], [])
    assert list(finish(copier, CopyJob([copy_of(9, 9)], is_write=True, chores=chores)).num_bytes) == [24]
    read = finish(copier, CopyJob(four))
    assert (list(read.num_bytes), read.error) == ([24], "it is gone")
    copier.close()


def test_pages_of_random_writes_and_removals_hold_what_was_written_last() -> None:
    memory = memories()
    pages = HostPages(60, 24, CPU)
    copier = HostCopier(pages, memory)
    generator, held = torch.Generator().manual_seed(1), dict[int, torch.Tensor]()
    for _ in range(200):
        name, block, removed = (int(torch.randint(0, 40, (), generator=generator)) for _ in range(3))
        memory[Kind.KV][0][:, block] = torch.randint(0, 256, (2, 8), dtype=torch.uint8, generator=generator)
        chores = Chores([copy_of(removed, 0).path], [])
        held.pop(removed, None)
        finish(copier, CopyJob([copy_of(name, block)], is_write=True, chores=chores))
        held[name] = memory[Kind.KV][0][:, block].clone()
        assert pages.num_free == 60 - len(held)
        wanted = int(torch.randint(0, 40, (), generator=generator))
        read = finish(copier, CopyJob([copy_of(wanted, 39)]))
        assert (read.error is None) == (wanted in held)
        if wanted in held:
            assert memory[Kind.KV][0][:, 39].equal(held[wanted])
    copier.close()


def test_the_thread_goes_on_after_a_job_that_fails_and_no_page_is_lost() -> None:
    pages = HostPages(9, 24, CPU)
    copier = HostCopier(pages, memories())
    failed = finish(copier, CopyJob([copy_of(2, 4, Kind.WINDOW), copy_of(1, 400)], is_write=True))
    assert (failed.error, list(failed.num_bytes)) == ("RuntimeError", [])
    assert pages.num_free == 9
    assert finish(copier, CopyJob([copy_of(1, 4)], is_write=True)).error is None
    copier.close()
    assert all(thread.name != "kv-host" or thread.daemon for thread in threading.enumerate())


def config_of(size: int) -> ServeConfig:
    """Steps take two blocks."""
    return ServeConfig(kv_host_memory=size, block_size=4, max_num_batched_tokens=8)


def rank_of(num_blocks: int, *, kinds: tuple[Kind, ...] = (), num_snapshots: int = 2) -> Any:
    """What `open_kv_host` wants of a rank whose KV blocks have 24 bytes."""
    memory = memories()
    kv_pool = SimpleNamespace(
        block_bytes=lambda: memory[Kind.KV], window_bytes=lambda: memory[Kind.WINDOW] if Kind.WINDOW in kinds else []
    )
    state_pool = SimpleNamespace(row_bytes=lambda: memory[Kind.STATE][0]) if Kind.STATE in kinds else None
    kv = SimpleNamespace(num_blocks=num_blocks, num_snapshots=num_snapshots)
    model = SimpleNamespace(kv=kv, kv_bytes=24 * num_blocks)
    return SimpleNamespace(
        kv_pool=kv_pool,
        state_pool=state_pool,
        model=model,
        block_tensors=lambda: Rank.block_tensors(SimpleNamespace(kv_pool=kv_pool, state_pool=state_pool)),  # type: ignore[arg-type]
    )


def most_bytes(opened: KvHost) -> int:
    """What the blocks on the host have grown to when further ones push others out."""
    stored = opened.stored
    names: list[bytes] = []
    stored.name(names, "", array("i", range(400)), 100, 4)
    for name in names:
        stored.put(StoredBlock(name, stored.folder_of(""), 24, 0.0))
    return stored.num_bytes


def test_the_memory_of_the_host_is_the_asked_size_with_room_for_the_blocks_of_one_job() -> None:
    opened = open_kv_host(config_of(1200), rank_of(160))
    assert (opened.pages.num_pages, opened.pages.page_bytes) == (50, 24)
    # A job writes a sixteenth of the blocks, before it is told what gives way to them.
    assert most_bytes(opened) + 10 * 24 <= 1200


@pytest.mark.parametrize(
    ("size", "rank", "sentence"),
    [
        (1000, rank_of(1600), "--kv-host-memory 1000 bytes is too little beside 37.5 KiB"),
        (1000, rank_of(40, kinds=(Kind.WINDOW, Kind.STATE)), "is too little beside"),
        (1 << 50, rank_of(40), "--kv-host-memory asks for"),
        (1 << 20, rank_of(40, kinds=(Kind.STATE,), num_snapshots=0), "snapshots"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(
    monkeypatch: pytest.MonkeyPatch, size: int, rank: Any, sentence: str
) -> None:
    monkeypatch.setattr(kv_host, "available_bytes", lambda: 1 << 40)
    with pytest.raises(ConfigError) as refusal:
        open_kv_host(config_of(size), rank)
    assert sentence in str(refusal.value)


@pytest.mark.parametrize(
    ("device", "settings", "sentence"),
    [
        ("cpu", {}, "--kv-cache-memory"),
        (
            "cuda",
            {"expert_parallel_size": 2},
            "single rank",
        ),
        ("cuda", {"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
    ],
)
def test_settings_without_a_meaning_are_refused(device: str, settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_kv_tiers(ServeConfig(kv_host_memory=1 << 30, **settings), device)
    assert sentence in str(refusal.value)


def test_random_blocks_of_the_memory_above_a_disk_hold_what_was_kept_last() -> None:
    draw = Random(1)
    pages, held = HostPages(40, 24, CPU), dict[str, bytes]()
    hosted = HostedBlocks(pages)
    for _ in range(500):
        path, content = f"f/{draw.randrange(4)}/{draw.randrange(8):032x}", draw.randbytes(draw.choice((24, 36, 50)))
        hosted.keep(path, memoryview(content))
        held[path] = content
        if draw.random() < 0.2:
            hosted.free(gone := draw.choice(list(held)))
            del held[gone]
        found = dict[str, bytes]()
        for path, content in held.items():
            target = bytearray(len(content))
            if hosted.find(path, memoryview(target)):
                assert target == content
                found[path] = content
        assert hosted.resident() == (len(found), sum(map(len, found.values())))
        assert pages.num_free == 40 - sum(-(-len(content) // 24) for content in found.values())
    for path in held:
        hosted.free(path)
    assert (pages.num_free, hosted.resident()) == (40, (0, 0))


def test_the_age_of_the_memory_above_a_disk_is_that_of_its_oldest_use() -> None:
    times = iter((1.0, 2.0, 5.0, 9.0, 10.0))
    hosted = HostedBlocks(HostPages(4, 24, CPU), lambda: next(times))
    assert hosted.oldest_age == 0
    hosted.keep("f/a", memoryview(bytes(24)))
    hosted.keep("f/b", memoryview(bytes(24)))
    assert hosted.find("f/a", memoryview(bytearray(24)))
    assert hosted.oldest_age == 9 - 2
    hosted.free("f/b")
    assert hosted.oldest_age == 10 - 5


def test_the_memory_above_a_disk_is_refused_by_the_same_rule() -> None:
    with pytest.raises(ConfigError, match="--kv-host-memory 50 bytes is too little beside"):
        open_hosted(config_of(50), rank_of(40))
    assert open_hosted(config_of(1200), rank_of(160)).resident() == (0, 0)


def test_a_gpu_may_swap_to_the_host_or_to_a_disk() -> None:
    check_kv_tiers(ServeConfig(kv_host_memory=1 << 30, kv_overflow="swap"), "cuda")
    check_kv_tiers(ServeConfig(kv_disk_path="/x", kv_overflow="swap"), "cuda")


def test_blocks_of_every_kind_go_to_files_and_come_back_to_other_places_of_the_device(tmp_path: Path) -> None:
    memory = memories()
    before = {kind: [tensor.clone() for tensor in tensors] for kind, tensors in memory.items()}
    copier = BlockCopier(BlockFiles(tmp_path, "ab" * 16), lambda: device_buffers(memory))
    kinds = (Kind.KV, Kind.WINDOW, Kind.STATE)
    written = finish(copier, CopyJob([copy_of(kind, 3, kind) for kind in kinds], is_write=True))
    assert written.error is None
    for tensors in memory.values():
        for tensor in tensors:
            tensor.zero_()
    assert finish(copier, CopyJob([copy_of(kind, 5, kind) for kind in kinds])).error is None
    for kind, tensors in memory.items():
        for tensor, was in zip(tensors, before[kind], strict=True):
            assert tensor[:, 5].equal(was[:, 3])
            assert not tensor[:, :5].any()
    copier.close()


def test_the_blocks_used_last_are_read_from_the_hosts_memory_above_the_disk(tmp_path: Path) -> None:
    memory = memories()
    before = memory[Kind.KV][0].clone()
    # There is room for three KV blocks, or for one and a window block, of two pages.
    hosted = HostedBlocks(HostPages(3, 24, CPU))
    copier = BlockCopier(BlockFiles(tmp_path, "ab" * 16), lambda: device_buffers(memory), hosted)
    four = [copy_of(number, number) for number in range(4)]
    finish(copier, CopyJob(four, is_write=True))
    assert hosted.resident() == (3, 72)
    assert hosted.resident([FOLDER]) == (3, 72)
    assert hosted.resident(["f/other"]) == (0, 0)
    memory[Kind.KV][0].zero_()
    found = finish(copier, CopyJob(four[:1]))
    assert (found.error, list(found.hosted)) == (None, [False])
    # What was read is there now, in place of the one that was used longest ago.
    found = finish(copier, CopyJob([four[0], four[2], four[3]]))
    assert (found.error, list(found.hosted)) == (None, [True, True, True])
    assert memory[Kind.KV][0][:, [0, 2, 3]].equal(before[:, [0, 2, 3]])
    finish(copier, CopyJob((), is_write=True, chores=Chores([four[3].path], [])))
    assert hosted.resident() == (2, 48)
    assert finish(copier, CopyJob([four[3]])).error == "it is gone"
    wide = copy_of(7, 1, Kind.WINDOW)
    finish(copier, CopyJob([wide], is_write=True))
    assert hosted.resident() == (1, 24 + 36)
    assert list(finish(copier, CopyJob([wide])).hosted) == [True]
    copier.close()


def test_a_device_without_kv_blocks_of_its_own_writes_files_of_no_bytes(tmp_path: Path) -> None:
    copier = BlockCopier(BlockFiles(tmp_path, "ab" * 16), lambda: device_buffers({Kind.KV: []}))
    assert finish(copier, CopyJob([copy_of(1, 1)], is_write=True)).error is None
    assert finish(copier, CopyJob([copy_of(1, 2)])).error is None
    copier.close()
