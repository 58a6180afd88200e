"""Slots of a device that is as late as it may be: every byte is there when it is used, and copies come after uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from experts.errors import ExpertStoreError
from experts.memory.eviction import lru
from experts.memory.file import write_expert_file
from experts.memory.memory import ExpertMemory
from experts.memory.residency import ResidencyControl
from experts.memory.slots import DeviceSlots
from experts.memory.tiers import DiskTier, ExpertTier, HostTier, page_locked
from tests.support.late_copies import LateCopies

CPU = torch.device("cpu")
SOURCE = bytes(32)
NUM_LAYERS, NUM_EXPERTS, NUM_SLOTS, EXPERT_BYTES = 2, 6, 3, 10_000


def expert_bytes(number: int) -> bytes:
    """No two pieces alike."""
    return bytes((number * 37 + place // 4096 * 5 + place) % 251 for place in range(EXPERT_BYTES))


def host_tier() -> HostTier:
    tier = HostTier([range(NUM_EXPERTS)] * NUM_LAYERS, EXPERT_BYTES, CPU)
    for number in range(NUM_LAYERS * NUM_EXPERTS):
        packed = torch.frombuffer(bytearray(expert_bytes(number)), dtype=torch.uint8)
        tier.put(*divmod(number, NUM_EXPERTS), packed)
    return tier


def disk_tier(folder: Path) -> DiskTier:
    write_expert_file(
        folder / "experts.bin",
        source=SOURCE,
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        expert_bytes=EXPERT_BYTES,
        experts=(memoryview(expert_bytes(number)) for number in range(NUM_LAYERS * NUM_EXPERTS)),
    )
    return DiskTier(folder / "experts.bin", SOURCE)


def slots_with(copies: Any) -> DeviceSlots:
    slots = DeviceSlots([NUM_SLOTS] * NUM_LAYERS, EXPERT_BYTES, CPU, copies)
    slots.piece_bytes = 4096  # type: ignore[misc]
    return slots


def memory_over(slots: DeviceSlots, tier: ExpertTier) -> ExpertMemory:
    control = ResidencyControl([NUM_SLOTS] * NUM_LAYERS, NUM_EXPERTS, slots.slot_bytes, lambda _: lru(NUM_EXPERTS))
    return ExpertMemory(control, slots, tier)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_experts_are_whole_when_their_turn_comes_however_late_the_copies_are(kind: str, tmp_path: Path) -> None:
    copies = LateCopies()
    slots = slots_with(copies)
    memory = memory_over(slots, host_tier() if kind == "host" else disk_tier(tmp_path))
    try:
        for step in range(8):
            for layer in range(NUM_LAYERS):
                wanted = {(step * 5 + number * (layer + 1)) % NUM_EXPERTS for number in range(2 + step % 4)}
                memory.access(layer, wanted)
                for ready in memory.turns(layer, wanted):
                    contents = memory.contents(layer)
                    for expert in ready:
                        content = slots.of_layer(layer)[contents.index(expert), :EXPERT_BYTES]
                        assert bytes(content.tolist()) == expert_bytes(layer * NUM_EXPERTS + expert)
        assert memory.stats().counters.num_evictions > 10
        assert copies.num_followed > 0
    finally:
        memory.close()


def test_a_copy_comes_after_the_last_use_of_its_layer() -> None:
    copies = LateCopies()
    slots, tier = slots_with(copies), host_tier()
    queued = []
    really_copy = copies.copy
    copies.copy = lambda *args: queued.append(args[2]) or really_copy(*args)  # type: ignore[method-assign]
    slots.fill(tier, 0, 1, 0, 0, 4096)
    slots.after_use(0)
    last = copies.mark() - 1
    slots.after_use(1)
    slots.fill(tier, 0, 1, 0, 4096, 8192)
    assert queued[1] == last
    assert queued[0] < last


def test_few_copies_are_queued_and_those_that_are_over_are_told() -> None:
    copies = LateCopies()
    slots, tier = slots_with(copies), host_tier()
    over = [slots.fill(tier, 0, 1, 0, 0, 4096), slots.fill(tier, 0, 1, 0, 4096, 8192)]
    assert over == [(0, 0.0), (0, 0.0)]
    num_bytes, seconds = slots.fill(tier, 0, 1, 0, 8192, 12288)
    assert num_bytes == 4096
    assert seconds >= 0.001


def test_a_damaged_expert_on_disk_is_found_out_on_its_way_to_the_device(tmp_path: Path) -> None:
    tier = disk_tier(tmp_path)
    with (tmp_path / "experts.bin").open("r+b") as file:
        file.seek(tier.header.offset(0, 4) + 9000)
        file.write(b"?!")
    memory = memory_over(slots_with(None), tier)
    try:
        memory.access(0, [4])
        with pytest.raises(ExpertStoreError, match="expert 4 of layer 0"):
            memory.wait_ready(0, [4])
    finally:
        memory.close()


def test_memory_is_locked_through_the_gpu_that_copies_from_it_whichever_thread_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A thread's current GPU is the first one, and CUDA takes some 500 MB of a GPU for each process that touches it.
    current, locked = [0], list[tuple[int, int]]()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        assert device.index is not None
        current.append(device.index)
        yield
        current.pop()

    def register(_: int, num_bytes: int, flags: int) -> int:
        locked.append((current[-1], num_bytes))
        return flags

    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    assert len(page_locked(4096, torch.device("cuda", 3))) == 4096
    assert locked == [(3, 4096)]
    assert len(page_locked(4096, CPU)) == 4096
    assert len(locked) == 1
