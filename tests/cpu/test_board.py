"""The board of ranks of one machine: every rank reads what each has laid, however late some are."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor

from experts.errors import CollectiveError
from experts.parallel.board import BOARD_BYTES, Board
from kernels.cpu.library import NativeKernels, native_kernels

COME_AND_END = """
import sys
from pathlib import Path
import torch
from experts.parallel.board import Board
from kernels.cpu.library import native_kernels
rows = torch.zeros(4)
Board(Path(sys.argv[1]), 1, 2, native_kernels()).exchange(rows, 0, torch.empty(8), 60.0)
"""


@pytest.fixture
def kernels() -> NativeKernels:
    found = native_kernels()
    if found is None:
        pytest.skip("needs the compiled kernels")
    return found


def on_all_ranks(num_ranks: int, act: Callable[[int], object]) -> list[object]:
    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(act, range(num_ranks)))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_every_rank_reads_what_each_has_laid_in_each_of_many_rounds(
    num_ranks: int, tmp_path: Path, kernels: NativeKernels
) -> None:
    sizes = [Random(5).choice((0, 1, 7, 900, BOARD_BYTES // 4)) for _ in range(60)]

    def laid(rank: int, number: int, size: int) -> Tensor:
        return torch.arange(size, dtype=torch.float32) + 1000 * rank + number

    def act(rank: int) -> None:
        board = Board(tmp_path / "board", rank, num_ranks, kernels)
        for number, size in enumerate(sizes):
            gathered = torch.empty(num_ranks, size)
            board.exchange(laid(rank, number, size), 0, gathered, 60.0)
            assert torch.equal(gathered, torch.stack([laid(other, number, size) for other in range(num_ranks)]))

    on_all_ranks(num_ranks, act)


def test_a_rank_takes_its_part_of_what_each_has_laid(tmp_path: Path, kernels: NativeKernels) -> None:
    def act(rank: int) -> None:
        board = Board(tmp_path / "board", rank, 3, kernels)
        received = torch.empty(3, 2, dtype=torch.int64)
        board.exchange(torch.arange(6) + 10 * rank, 16 * rank, received, 60.0)
        assert received.tolist() == [[10 * other + 2 * rank, 10 * other + 2 * rank + 1] for other in range(3)]

    on_all_ranks(3, act)


def test_a_rank_that_does_not_come_is_named(tmp_path: Path, kernels: NativeKernels) -> None:
    board = Board(tmp_path / "board", 0, 2, kernels)
    with pytest.raises(CollectiveError, match=r"rank 1 has ended, or did not come within 0\.02 s"):
        board.exchange(torch.zeros(4), 0, torch.empty(8), 0.02)


def test_a_rank_that_has_ended_is_not_waited_for(tmp_path: Path, kernels: NativeKernels) -> None:
    path = tmp_path / "board"
    other = subprocess.Popen([sys.executable, "-c", COME_AND_END, str(path)])
    board = Board(path, 0, 2, kernels)
    board.exchange(torch.ones(4), 0, torch.empty(8), 60.0)
    assert other.wait() == 0
    # Far longer than a test may take.
    with pytest.raises(CollectiveError, match="rank 1 has ended"):
        board.exchange(torch.ones(4), 0, torch.empty(8), 10_000.0)


def test_no_room_for_a_board_is_an_error_and_no_signal(
    tmp_path: Path, kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        Board(tmp_path / "board", 0, 2, kernels)
