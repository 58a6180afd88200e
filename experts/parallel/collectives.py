"""Collectives between the ranks of a step, through `deepspeed.comm` over gloo or NCCL, and bounded waits for a GPU.

Importing this loads torch.distributed and deepspeed; a service of one rank does not.
"""

from __future__ import annotations

import os
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm as comm
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import init_process_group
from torch.distributed.distributed_c10d import _set_pg_timeout

from experts.errors import CollectiveError
from experts.parallel.board import BOARD_BYTES, Board
from kernels.cpu.library import native_kernels

# Time to meet: ranks end loading at different times.
_SECONDS_TO_MEET = 60
# NCCL ends the whole process of a rank that has waited this long; `DeviceWaits` raises an error long before.
_NCCL_SECONDS = 3600
# A missing rank must be noticed before the device's queue of about a thousand launches is full, which would block the
# host for good; a mark stands for up to twenty launches.
_MARKS_AHEAD = 32
_POLL_SECONDS = 20e-6
# Any time, for ranks that wait for ranks of another stage: whoever gave them their work finds out which of them hangs.
UNBOUNDED_SECONDS = 30 * 86400


@dataclass(slots=True)
class Traffic:
    """Totals of a rank. num_entered: collectives; among ranks that wait for one another, the rank at fault has entered
    the fewest. bytes_to[r], rows_to[r]: the bytes handed over for rank r and the rows sent to it; 0 for this rank.
    """

    num_entered: int
    bytes_to: list[int]
    rows_to: list[int]

    @classmethod
    def none(cls, num_ranks: int) -> Traffic:
        return cls(0, [0] * num_ranks, [0] * num_ranks)

    def add(self, other: Traffic) -> None:
        self.num_entered += other.num_entered
        self.bytes_to = [sum(pair) for pair in zip(self.bytes_to, other.bytes_to, strict=True)]
        self.rows_to = [sum(pair) for pair in zip(self.rows_to, other.rows_to, strict=True)]


class Collectives:
    """All ranks call `open`, then the same methods in the same order, with sizes that agree. Tensors are contiguous, on
    `device`.

    On a GPU a call returns once it is queued on the current stream; the host waits only in `waits`. `traffic` counts.
    """

    def __init__(
        self, rank: int, num_ranks: int, *, device: torch.device | None = None, computes_meanwhile: bool = False
    ) -> None:
        """device: this rank's GPU, which must be current, for NCCL; by default the CPU, for gloo. computes_meanwhile:
        the rank computes while its rows travel."""
        self.device = device or torch.device("cpu")
        self._on_gpu = self.device.type == "cuda"
        self._computes_meanwhile = computes_meanwhile
        self.rank = rank
        self.num_ranks = num_ranks
        self.traffic = Traffic.none(num_ranks)
        self.waits = DeviceWaits(self.device, 0.0)
        # Kept until they have been taken: their memory must not be used for anything else before.
        self._sent: deque[tuple[Any, Tensor]] = deque()
        # For ranks of one machine, which all have it or none.
        self._board: Board | None = None
        # Of torch.distributed; None stands for all ranks.
        self._process_group: Any = None
        self._parts: dict[int, Collectives] = {}

    def part_of(self, size: int) -> Collectives:
        """Return the collectives of this rank's part of the ranks, `size` of them that follow each other.

        Its ranks are numbered from 0. It is opened with all ranks, and has traffic and patience of its own.
        """
        if size == self.num_ranks:
            return self
        if size not in self._parts:
            self._parts[size] = Collectives(self.rank % size, size, device=self.device)
        return self._parts[size]

    @property
    def num_entered(self) -> int:
        """The number of collectives that this rank has entered, those of its parts of the ranks too."""
        return self.traffic.num_entered + sum(part.num_entered for part in self._parts.values())

    def open(self, rendezvous: Path | Store | None, timeout: float, *, interface: str = "lo") -> None:
        """Meet the other ranks in a file on this machine, in a store, or in torchrun's store for None.

        Raise CollectiveError. timeout: seconds that a rank waits in a collective for the others. interface: the only
        network interface that is listened on; its traffic is neither encrypted nor authenticated.
        """
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
        # Registering the buffers of a captured collective is an exchange among the hosts without a time limit.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        # The shared-memory operations are compiled at their first use, which takes a minute, and none is called here.
        # Reading the table of compatible operations normally would fill it by trying compilers for half a second.
        vars(deepspeed.ops).setdefault("__compatible_ops__", {})["deepspeed_shm_comm"] = False
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        before = _threads()
        backend, patience = "nccl" if self._on_gpu else "gloo", timedelta(seconds=_SECONDS_TO_MEET)
        try:
            if isinstance(rendezvous, Store):
                # deepspeed takes a group that exists.
                init_process_group(
                    backend, store=rendezvous, rank=self.rank, world_size=self.num_ranks, timeout=patience
                )
            comm.init_distributed(
                backend,
                auto_mpi_discovery=False,
                verbose=False,
                timeout=patience,
                init_method=f"file://{rendezvous}" if isinstance(rendezvous, Path) else "env://",
                rank=self.rank,
                world_size=self.num_ranks,
            )
        except RuntimeError as error:
            raise CollectiveError(_first_line(error)) from error
        self.be_patient(timeout)
        path = rendezvous if isinstance(rendezvous, Path) else None
        self._board = self._open_board(path)
        for size, part in self._parts.items():
            of_part = None if path is None else path.with_name(f"{size}.{self.rank // size}.{path.name}")
            part._join(self._split(size), timeout, of_part)
        # A thread of the batch class would wait for the end of a time slice of a rank that computes.
        if not (self._on_gpu or self._computes_meanwhile):
            # New threads are found by comparing: a thread has its name only once it runs.
            _let_senders_finish(_threads() - before)

    def _split(self, size: int) -> Any:
        """Make a group of every `size` ranks, which all ranks do together, and return this rank's own."""
        parts = [list(range(first, first + size)) for first in range(0, self.num_ranks, size)]
        try:
            groups = [comm.new_group(ranks) for ranks in parts]
        except RuntimeError as error:
            raise CollectiveError(_first_line(error)) from error
        return groups[self.rank // size]

    def _join(self, process_group: Any, timeout: float, path: Path | None) -> None:
        self._process_group = process_group
        self.be_patient(timeout)
        self._board = self._open_board(path)

    def _open_board(self, path: Path | None) -> Board | None:
        """Open a board beside the file in which ranks of one machine meet; None where not all of them can have it."""
        if path is None or self._on_gpu:
            return None
        board, kernels = None, native_kernels()
        if kernels is not None:
            with suppress(OSError):
                board = Board(path.with_name(f"board.{path.name}"), self.rank, self.num_ranks, kernels)
        return board if self.agree_on_least(board is not None) else None

    def be_patient(self, seconds: float) -> None:
        """Set the seconds that a rank waits for the others."""
        self.waits.seconds = seconds
        _set_pg_timeout(timedelta(seconds=_NCCL_SECONDS if self._on_gpu else seconds), self._process_group)

    def wait_for_any_time(self) -> None:
        """Wait for the others without a bound from now on."""
        self.be_patient(UNBOUNDED_SECONDS)

    def all_to_all(self, rows: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
        """Send the next `to_ranks[r]` of `rows` [N, ...] to rank r; return `from_ranks[r]` rows of each rank r."""
        received = rows.new_empty((sum(from_ranks), *rows.shape[1:]))
        with self._entered():
            comm.all_to_all_single(received, rows, list(from_ranks), list(to_ranks), group=self._process_group)
        self._count_bytes([count * rows[:1].nbytes for count in to_ranks])
        return received

    def all_gather(self, rows: Tensor) -> Tensor:
        """Return the `rows` [N, ...] of all ranks, [num_ranks * N, ...] in rank order. N is the same on all ranks.

        Through gloo an all-to-all of copies takes less time than an all-gather, at the sizes of a step.
        """
        has_board = self._board is not None and rows.nbytes <= BOARD_BYTES
        if self._on_gpu or has_board:
            gathered = rows.new_empty((self.num_ranks * rows.shape[0], *rows.shape[1:]))
            with self._entered():
                if self._board is not None and has_board:
                    self._board.exchange(rows, 0, gathered, self.waits.seconds)
                else:
                    comm.all_gather_into_tensor(gathered, rows, group=self._process_group)
            self._count_bytes([rows.nbytes] * self.num_ranks)
            return gathered
        sizes = [rows.shape[0]] * self.num_ranks
        return self.all_to_all(torch.cat([rows] * self.num_ranks), sizes, sizes)

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Sum the parts that all ranks have for this rank: `parts` [num_ranks * N, ...] -> [N, ...] fp32.

        Parts travel in their own dtype and are added in fp32. The sum runs in rank order, so that a row has the same
        bits at any position. The reduce-scatters of gloo and NCCL guarantee no order; at the sizes of a step gloo's is
        also slower than this all-to-all.
        """
        num_rows = parts.shape[0] // self.num_ranks
        of_ranks = self._exchange_parts(parts, num_rows).view(self.num_ranks, num_rows, *parts.shape[1:])
        total = of_ranks[0].float()
        for part in of_ranks[1:]:
            total = total.add_(part)
        return total

    def _exchange_parts(self, parts: Tensor, num_rows: int) -> Tensor:
        """Return the `num_rows` rows that each rank has for this one, the same number from every rank."""
        sizes = [num_rows] * self.num_ranks
        if self._board is None or parts.nbytes > BOARD_BYTES:
            return self.all_to_all(parts, sizes, sizes)
        received, num_bytes = torch.empty_like(parts), parts.nbytes // self.num_ranks
        with self._entered():
            self._board.exchange(parts, self.rank * num_bytes, received, self.waits.seconds)
        self._count_bytes([num_bytes] * self.num_ranks)
        return received

    def send(self, rows: Tensor, to_rank: int) -> None:
        """Send `rows` to one rank, which calls `receive`. Return at once; nobody may write to the rows any more."""
        with self._entered():
            self._sent.append((comm.isend(rows, to_rank), rows))
            while self._sent and self._sent[0][0].is_completed():
                self._sent.popleft()[0].wait()

    def receive(self, rows: Tensor, from_rank: int) -> None:
        """Wait, for any time, for the rows that one rank sends next to this one, and write them into `rows`."""
        with self._entered():
            coming = comm.irecv(rows, from_rank)
            if self._on_gpu:
                coming.wait()  # With a time limit NCCL would keep the host until the rows are there.
            else:
                coming.wait(timedelta(seconds=UNBOUNDED_SECONDS))

    def agree_on_least(self, number: int) -> int:
        """Return the least of the ranks' numbers to all of them. Waits for the others."""
        return int(self.all_gather(torch.tensor([number], device=self.device)).min())

    def add_up(self, number: int) -> int:
        """Return the sum of the ranks' numbers to all of them. Waits for the others."""
        return int(self.all_gather(torch.tensor([number], device=self.device)).sum())

    def forget_traffic(self) -> None:
        """Start counting at zero again, but for the collectives entered, which other ranks compare with theirs."""
        self.traffic = Traffic(self.traffic.num_entered, [0] * self.num_ranks, [0] * self.num_ranks)

    def count_rows(self, num_to: Sequence[int]) -> None:
        """Count `num_to[r]` rows that are sent to rank r; rows that stay do not count."""
        for rank, count in enumerate(num_to):
            self.traffic.rows_to[rank] += count * (rank != self.rank)

    def _count_bytes(self, num_to: Sequence[int]) -> None:
        for rank, count in enumerate(num_to):
            self.traffic.bytes_to[rank] += count * (rank != self.rank)

    @contextmanager
    def recorded(self) -> Iterator[Traffic]:
        """Return the traffic of the collectives captured inside, whole at the end.

        Nothing is sent yet, and the host must not wait for the device.
        """
        before, inside = self.traffic, Traffic.none(self.num_ranks)
        self.traffic = inside
        try:
            with self.waits.without_marks():
                yield inside
        finally:
            self.traffic = before

    @contextmanager
    def replayed(self, recorded: Traffic) -> Iterator[None]:
        """Count a replay, launched inside. Raise CollectiveError if an earlier replay does not end in time.

        A replay, in which the host calls no collective, counts as all of the graph's collectives, and sets one mark in
        the device's queue.
        """
        self.traffic.add(recorded)
        yield
        self.waits.mark()

    @contextmanager
    def _entered(self) -> Iterator[None]:
        """Count a collective, and keep the host from running far ahead of the device in it."""
        self.traffic.num_entered += 1
        try:
            yield
        except RuntimeError as error:
            raise CollectiveError(_first_line(error)) from error
        self.waits.mark()

    def close(self) -> None:
        """Leave the group, if it was opened, without waiting for the others."""
        if comm.is_initialized():
            comm.destroy_process_group()


def _threads() -> set[int]:
    return {int(thread) for thread in os.listdir("/proc/self/task")}


def _let_senders_finish(threads: set[int]) -> None:
    """Keep gloo's threads, its event loop above all, from taking the core of a thread that is sending.

    If the loop wakes while another thread has the connection locked, it polls until the connection is free. On the same
    core the other thread cannot go on meanwhile, and both lose a time slice of 3 to 4 ms, in about every third exchange
    on two cores. Threads of the batch class wait until the core is free instead.
    """
    for thread in threads:
        # A thread may have ended, or a sandbox may forbid the call: then exchanges only take longer.
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


class DeviceWaits:
    """Waits for a GPU, bounded in time: the device itself may wait for a rank that never comes.

    Does nothing on a CPU, whose collectives are over when they return. seconds: the bound of a wait; may change.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.seconds = seconds
        self._on_gpu = self._marking = device.type == "cuda"
        self._marks: deque[torch.cuda.Event] = deque()

    def mark(self) -> None:
        """Mark a place in the device's queue, and wait for the mark `_MARKS_AHEAD` before. Raise CollectiveError."""
        if not self._marking:
            return
        event = torch.cuda.Event()
        event.record()
        self._marks.append(event)
        if len(self._marks) > _MARKS_AHEAD:
            self.wait_for(self._marks.popleft())

    @contextmanager
    def without_marks(self) -> Iterator[None]:
        """Set no marks inside, to capture a graph: captured work does not run, so a mark behind it is never reached."""
        before, self._marking = self._marking, False
        try:
            yield
        finally:
            self._marking = before

    def wait_for(self, event: torch.cuda.Event) -> None:
        """Wait for an event. Raise CollectiveError if the device does not reach it in time."""
        deadline = time.monotonic() + self.seconds
        while not event.query():
            if time.monotonic() > deadline:
                raise CollectiveError(f"the GPU waited for other ranks for {self.seconds:g} s")
            time.sleep(_POLL_SECONDS)

    def wait_for_device(self) -> None:
        """Wait until everything queued is done. Raise CollectiveError."""
        if self._on_gpu:
            event = torch.cuda.Event()
            event.record()
            self.wait_for(event)
