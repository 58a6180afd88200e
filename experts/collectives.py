"""What ranks send each other during a step: three collectives through `deepspeed.comm`, over gloo.

Importing this loads torch.distributed and deepspeed; a service of one rank does not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import deepspeed
import deepspeed.comm as comm
import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from experts.errors import CollectiveError

# Ranks come from loading, at different times.
_SECONDS_TO_MEET = 60


class Collectives:
    """All ranks call the same methods in the same order, with sizes that agree. Tensors are contiguous, on the CPU.

    `num_entered` counts the calls: of ranks that wait for one another the one at fault has entered the fewest.
    `bytes_to[r]` counts what was handed over for rank r; nothing for this one.
    """

    def __init__(
        self, rank: int, num_ranks: int, rendezvous: Path | None, timeout: float, *, interface: str = "lo"
    ) -> None:
        """Meets the other ranks in a file on this machine, or in torchrun's store if that is None.

        Raises CollectiveError. timeout: seconds a rank waits in a collective for the others. interface: the network
        that is listened on, and no other; what travels there is neither encrypted nor authenticated.
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self.num_entered = 0
        self.bytes_to = [0] * num_ranks
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        # The shared-memory operations are compiled at the first use, which takes a minute, and none is called here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
        before = _threads()
        try:
            comm.init_distributed(
                "gloo",
                auto_mpi_discovery=False,
                verbose=False,
                timeout=timedelta(seconds=_SECONDS_TO_MEET),
                init_method="env://" if rendezvous is None else f"file://{rendezvous}",
                rank=rank,
                world_size=num_ranks,
            )
        except RuntimeError as error:
            raise CollectiveError(_first_line(error)) from error
        _set_pg_timeout(timedelta(seconds=timeout))
        # By name they could not be told yet: a thread names itself once it runs.
        _let_senders_finish(_threads() - before)

    def all_to_all(self, rows: Tensor, to_ranks: Sequence[int], from_ranks: Sequence[int]) -> Tensor:
        """Sends the next `to_ranks[r]` of `rows` [N, ...] to rank r; returns `from_ranks[r]` rows of each rank r."""
        received = rows.new_empty((sum(from_ranks), *rows.shape[1:]))
        self.num_entered += 1
        try:
            comm.all_to_all_single(received, rows, list(from_ranks), list(to_ranks))
        except RuntimeError as error:
            raise CollectiveError(_first_line(error)) from error
        row_bytes = rows[:1].nbytes
        for rank, count in enumerate(to_ranks):
            if rank != self.rank:
                self.bytes_to[rank] += count * row_bytes
        return received

    def all_gather(self, rows: Tensor) -> Tensor:
        """`rows` [N, ...] of every rank, N being the same for all: [num_ranks * N, ...] in rank order.

        At the sizes of a step gloo's own all-gather takes longer than this all-to-all of copies.
        """
        sizes = [rows.shape[0]] * self.num_ranks
        return self.all_to_all(torch.cat([rows] * self.num_ranks), sizes, sizes)

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        """Sums over ranks what each one has for this one: `parts` [num_ranks * N, ...] -> [N, ...].

        The sum runs in rank order, so that a row has the same bits wherever it stands. gloo's own reduce-scatter
        promises no order and, at the sizes of a step, takes longer than this all-to-all.
        """
        num_rows = parts.shape[0] // self.num_ranks
        sizes = [num_rows] * self.num_ranks
        of_ranks = self.all_to_all(parts, sizes, sizes).view(self.num_ranks, num_rows, *parts.shape[1:])
        total = of_ranks[0]
        for part in of_ranks[1:]:
            total = total.add_(part)
        return total

    def close(self) -> None:
        """Leaves the group, without waiting for the others."""
        comm.destroy_process_group()


def _threads() -> set[int]:
    return {int(thread) for thread in os.listdir("/proc/self/task")}


def _let_senders_finish(threads: set[int]) -> None:
    """Keeps gloo's threads, its event loop above all, from taking the core of a thread that is just sending.

    Woken while another thread has the connection locked, the loop asks again and again until it is free. On the same
    core that thread cannot go on meanwhile, and both lose a time slice of 3 to 4 ms, in about every third exchange on
    two cores. Threads of the batch class wait until the core is free instead.
    """
    for thread in threads:
        # A thread may have ended, and a sandbox may forbid it: then exchanges take longer, and that is all.
        with suppress(OSError):
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
