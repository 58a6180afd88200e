"""What all ranks conclude from the same plans: which steps are replayed, in which size; and what a replay counts as."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import deepspeed.comm as comm
import pytest
import torch

from experts.parallel.collectives import Collectives, Traffic
from moeserve.engine.ranks.together import StepRows, captures_decodes
from moeserve.plan import Chunk, ChunkExtras, SamplingParams, StepPlan

SIZES = (1, 2, 4, 8)
SAMPLING = SamplingParams(max_tokens=2)


def decode(name: str = "a", drawn_by: int | None = None) -> Chunk:
    return Chunk(name, array("i", [5]), 3, array("i", [0]), SAMPLING, drawn_by=drawn_by)


def plans(*chunks_of_ranks: list[Chunk]) -> list[StepPlan]:
    return [StepPlan(1, chunks) for chunks in chunks_of_ranks]


@pytest.mark.parametrize(
    ("batches", "size"), [((1, 1), 1), ((3, 1), 4), ((0, 2), 2), ((5, 0), 8), ((8, 8), 8), ((9, 1), None)]
)
def test_decodes_are_padded_to_what_holds_the_largest_batch(batches: tuple[int, int], size: int | None) -> None:
    rows = StepRows.of(plans(*([decode(drawn_by=place) for place in range(count)] for count in batches)))
    assert rows == StepRows(list(batches), list(batches), only_decodes=True)
    assert rows.captured_size(SIZES) == size


PROMPT = Chunk("b", array("i", [5, 6, 7]), 0, array("i", [1]), SAMPLING)
PIECE = Chunk("b", array("i", [5]), 0, array("i", [1]), None)
SCORED = Chunk("b", array("i", [5, 6]), 0, array("i", [1]), None, ChunkExtras(prompt_targets=array("i", [6, 7])))


@pytest.mark.parametrize("other", [PROMPT, PIECE, SCORED], ids=["prompt", "piece of one token", "all rows wanted"])
def test_one_rank_with_a_prompt_makes_the_step_everyones_own(other: Chunk) -> None:
    for together in (plans([decode()], [other]), plans([], [other]), plans([decode(), other], [])):
        assert StepRows.of(together).captured_size(SIZES) is None


def test_nothing_is_replayed_where_nothing_is_captured() -> None:
    assert StepRows.of(plans([decode()], [])).captured_size(()) is None


def test_only_sizes_known_beforehand_can_be_captured() -> None:
    assert captures_decodes("auto", eager=False, all_resident=True)
    assert captures_decodes("allgather", eager=False, all_resident=True)
    assert not captures_decodes("alltoall", eager=False, all_resident=True)
    assert not captures_decodes("auto", eager=True, all_resident=True)
    assert not captures_decodes("auto", eager=False, all_resident=False)


class Coming:
    """Rows on their way, which know how they were waited for."""

    def __init__(self) -> None:
        self.limits: list[timedelta | None] = []

    def wait(self, limit: timedelta | None = None) -> None:
        self.limits.append(limit)


@pytest.mark.parametrize("device", [torch.device("cpu"), torch.device("cuda", 0)], ids=str)
def test_a_gpu_waits_for_rows_on_its_queue_and_not_on_the_host(
    monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    # With a limit torch would keep the host until NCCL is done.
    collectives, coming = Collectives(1, 2, device=device), Coming()
    monkeypatch.setattr(comm, "irecv", lambda *_: coming)
    with collectives.waits.without_marks():
        collectives.receive(torch.zeros(1, 2), 0)
    assert [limit is None for limit in coming.limits] == [device.type == "cuda"]


class Waits:
    """Keeps a log of marks."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._marks = True

    def mark(self) -> None:
        if self._marks:
            self.log.append("mark")

    @contextmanager
    def without_marks(self) -> Iterator[None]:
        self._marks = False
        yield
        self._marks = True


class Sender(Collectives):
    """Collectives of two ranks that has sent 7 rows in 5 collectives, and keeps a log of marks."""

    def __init__(self) -> None:
        super().__init__(0, 2)
        self.waits = Waits()
        self.traffic = Traffic(5, [0, 70], [0, 7])

    def send(self, num_rows: int) -> None:
        with self._entered():
            self.count_rows([3, num_rows])
            self._count_bytes([30, 10 * num_rows])


def test_a_replay_counts_as_all_its_collectives_and_is_marked_once() -> None:
    sender = Sender()
    with sender.recorded() as traffic:
        sender.send(2)
        sender.send(3)
    assert (sender.traffic, sender.waits.log) == (Traffic(5, [0, 70], [0, 7]), [])
    for _ in range(2):
        with sender.replayed(traffic):
            sender.waits.log.append("launch")
    assert sender.traffic == Traffic(9, [0, 170], [0, 17])
    assert sender.waits.log == ["launch", "mark"] * 2
    sender.send(1)
    assert sender.waits.log[-1] == "mark"


def test_a_replay_has_entered_its_collectives_before_it_is_launched() -> None:
    sender = Sender()
    with sender.recorded() as traffic:
        sender.send(1)
    with sender.replayed(traffic):
        assert sender.traffic.num_entered == 6


def test_what_fails_while_it_is_captured_leaves_no_counts() -> None:
    sender = Sender()
    with pytest.raises(IndexError), sender.recorded():
        [].pop(sender.send(2) or 0)
    assert sender.traffic == Traffic(5, [0, 70], [0, 7])
