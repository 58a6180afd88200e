"""The experts of a rank through too few slots: the same bits as with all of them in memory."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import pytest
import torch
from torch import Tensor

from experts.memory.eviction import lru
from experts.memory.memory import ExpertMemory
from experts.memory.residency import ResidencyControl
from experts.memory.resident_experts import ResidentExperts
from experts.memory.slots import SlotArena
from experts.observer import AnyObserver
from kernels.activation import Activation
from kernels.moe import expert_layout, moe_experts_partial
from kernels.packed_experts import ExpertShape, SplitExperts

NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 8, 32, 24, 3


class Memory:
    """A tier of packed experts of one layer."""

    def __init__(self, packed: list[Tensor]) -> None:
        self._packed = packed

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        content = self._packed[expert].numpy().tobytes()[offset : offset + len(out)]
        out[: len(content)] = content

    def close(self) -> None:
        """Nothing is open."""


class HeldMemory(Memory):
    """A tier whose reads end only once `opened` is set."""

    def __init__(self, packed: list[Tensor], opened: threading.Event) -> None:
        super().__init__(packed)
        self._opened = opened

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        self._opened.wait()
        super().read(layer, expert, offset, out)


class MetMemory(Memory):
    """A tier whose reads end in pairs: the first waits for a second one at the same time."""

    def __init__(self, packed: list[Tensor]) -> None:
        super().__init__(packed)
        self._met = threading.Barrier(2, timeout=60)

    def read(self, layer: int, expert: int, offset: int, out: memoryview) -> None:
        self._met.wait()
        super().read(layer, expert, offset, out)


class Observer(AnyObserver):
    def __init__(self) -> None:
        self.heard: list[tuple[Tensor, Tensor]] = []

    def arrived(self, layer: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self.heard.append((x, expert_ids))


@contextmanager
def experts_here(
    dtype: torch.dtype,
    num_slots: int,
    observers: Sequence[AnyObserver] = (),
    opened: threading.Event | None = None,
    num_copiers: int = 1,
) -> Iterator[tuple[ResidentExperts, SplitExperts]]:
    """Through slots, and all in memory."""
    torch.manual_seed(0)
    layout = expert_layout(ExpertShape(HIDDEN, INTERMEDIATE, dtype, dtype))
    packed = [
        layout.pack(
            (
                torch.randn(2 * INTERMEDIATE, HIDDEN).div(8).to(dtype),
                torch.randn(HIDDEN, INTERMEDIATE).div(8).to(dtype),
                None,
                None,
            )
        )
        for _ in range(NUM_EXPERTS)
    ]
    everything, through_slots = layout.experts(NUM_EXPERTS), layout.experts(NUM_EXPERTS)
    assert isinstance(everything, SplitExperts)
    assert isinstance(through_slots, SplitExperts)
    for expert, content in enumerate(packed):
        everything.put(expert, content)
    arena = SlotArena([num_slots], layout.num_bytes)
    control = ResidencyControl([num_slots], NUM_EXPERTS, arena.slot_bytes, lambda _: lru(NUM_EXPERTS))
    tier = Memory(packed) if opened is None else HeldMemory(packed, opened)
    tier = MetMemory(packed) if num_copiers > 1 else tier
    memory = ExpertMemory(control, arena, tier, num_copiers)
    try:
        yield ResidentExperts(memory, arena, 0, through_slots, observers), everything
    finally:
        memory.close()


def rows(num_rows: int, dtype: torch.dtype, here: set[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Where there are several ranks: -1 for experts that are not among `here`."""
    weights, ids = torch.rand(num_rows, NUM_EXPERTS).topk(TOP_K)
    is_here = torch.isin(ids, torch.tensor(sorted(here)))
    return torch.randn(num_rows, HIDDEN).to(dtype), ids.where(is_here, -1), weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_ranks_part_has_the_bits_of_experts_in_memory(dtype: torch.dtype, num_slots: int) -> None:
    rng = random.Random(1)
    with experts_here(dtype, num_slots) as (bounded, everything):
        for num_rows in (1, 40, 0, 5, 200, 2):
            here = set(rng.sample(range(NUM_EXPERTS), 4))
            x, ids, weights = rows(num_rows, dtype, here)
            expected = moe_experts_partial(x, ids, weights, everything, Activation())
            found = bounded.partial(x, ids, weights, None, Activation())
            assert found.dtype == torch.float32
            assert torch.equal(found, expected)


def test_a_shared_expert_is_computed_while_experts_load_and_changes_no_bit() -> None:
    opened = threading.Event()

    def other() -> Tensor:
        opened.set()  # No expert arrives before.
        return torch.full((1,), 7.0)

    with experts_here(torch.float32, 3, opened=opened) as (bounded, everything):
        x, ids, weights = rows(5, torch.float32, set(range(NUM_EXPERTS)))
        found, of_other = bounded.while_loading(x, ids, weights, Activation(), other)
        assert torch.equal(found, moe_experts_partial(x, ids, weights, everything, Activation()))
        assert of_other.tolist() == [7.0]
        nothing, of_other = bounded.while_loading(x[:0], ids[:0], weights[:0], Activation(), other)
        assert (nothing.shape, of_other.tolist()) == ((0, HIDDEN), [7.0])


@pytest.mark.parametrize("num_slots", [6, 8])
def test_experts_that_lack_are_loaded_by_several_threads_at_once(num_slots: int) -> None:
    with experts_here(torch.float32, num_slots, num_copiers=2) as (bounded, everything):
        for _ in range(3):
            x, ids, weights = rows(40, torch.float32, set(range(NUM_EXPERTS)))
            found = bounded.partial(x, ids, weights, None, Activation())
            assert torch.equal(found, moe_experts_partial(x, ids, weights, everything, Activation()))


def test_rows_without_an_expert_here_are_zeros_and_have_not_arrived() -> None:
    observer = Observer()
    with experts_here(torch.float32, 2, [observer]) as (bounded, _):
        x, ids, weights = rows(3, torch.float32, set())
        assert torch.equal(bounded.partial(x, ids, weights, None, Activation()), torch.zeros(3, HIDDEN))
        ((heard, of_rows),) = observer.heard
        assert (heard.shape, of_rows.shape) == ((0, HIDDEN), (0, TOP_K))


def test_observers_hear_only_of_rows_that_are_computed_here() -> None:
    observer = Observer()
    with experts_here(torch.float32, 2, [observer]) as (bounded, _):
        x, _, weights = rows(3, torch.float32, set())
        ids = torch.tensor([[1, -1, -1], [-1, -1, -1], [-1, 2, 1]])
        bounded.partial(x, ids, weights, None, Activation())
        ((heard, of_rows),) = observer.heard
        assert torch.equal(heard, x[[0, 2]])
        assert torch.equal(of_rows, ids[[0, 2]])


@pytest.mark.parametrize("num_slots", [1, 3])
def test_a_computation_that_fails_ends_its_event_and_the_next_one_has_its_usual_bits(
    num_slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with experts_here(torch.float32, num_slots) as (bounded, everything):
        x, ids, weights = rows(20, torch.float32, set(range(NUM_EXPERTS)))
        for name in ("multiply", "combine", "__call__"):
            with monkeypatch.context() as patch:

                def fail(*_: object) -> None:
                    raise MemoryError("no memory for scratch")

                patch.setattr(SplitExperts, name, fail)
                patch.setattr(type(bounded._experts), name, fail)
                with suppress(MemoryError):
                    bounded.partial(x, ids, weights, None, Activation())
            expected = moe_experts_partial(x, ids, weights, everything, Activation())
            assert torch.equal(bounded.partial(x, ids, weights, None, Activation()), expected)


def test_what_a_forked_copy_writes_to_slots_stays_with_it() -> None:
    arena = SlotArena([1], 64)
    arena.tensor_of(0, 0).fill_(7)
    pid = os.fork()
    if pid == 0:
        arena.tensor_of(0, 0).zero_()
        os._exit(0)
    os.waitpid(pid, 0)
    assert bool((arena.tensor_of(0, 0) == 7).all())
