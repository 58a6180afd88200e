"""The ranks of one service on this machine, under torchrun: `python -m launcher.rank_group CONTEXT --status-fd N`.

With `--orders-fd M` the ranks serve in copies of themselves where they can, one life of the engine after another
(`RankLives`). A rank alone cannot go on: the others wait for it in collectives. So when the copy of one rank has ended
the copies of the others end too, and when all have, the supervisor gets one message. Its order for another life goes to
every rank.

This process becomes torchrun's agent. On one node its store is a file and the ranks meet in a file, so that nothing but
loopback is listened on. With several nodes the store is on node 0 and listens on every interface. The agent ends with
its ranks and reports which one failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress
from functools import partial

from launcher.processes import decode_status, describe_end, reporter
from moeserve.forever import repeat
from moeserve.run_context import RunContext, load_run_context
from moeserve.statuses import Ended, Failed, Forked, Report

# The time that rank 0 has to say why after the copy of another rank has ended.
_SECONDS_TO_SAY_WHY = 1.0


class RankLives(threading.Thread):
    """Stands between the supervisor and the ranks: passes their reports and its orders on.

    A thread of the process whose children the ranks are, which open its descriptors as `arguments` says.
    """

    def __init__(self, num_ranks: int, orders: int, report: Report) -> None:
        """num_ranks: on this node. orders: the supervisor's pipe, lines. report: to the supervisor."""
        super().__init__(name="rank lives", daemon=True)
        self._num_ranks, self._supervisor, self._report = num_ranks, orders, report
        self._reports, self._reporting = os.pipe()
        self._orders = [os.pipe() for _ in range(num_ranks)]
        self._copies: dict[int, int] = {}
        self._ended: list[Ended] = []
        self._kill_at: float | None = None
        self._has_killed = False

    @property
    def arguments(self) -> list[str]:
        """The arguments of `launcher.worker` that name the pipes."""
        return ["--status-fd", str(self._reporting), "--orders-fd", ",".join(str(fd) for fd, _ in self._orders)]

    def run(self) -> None:
        repeat(self.name, partial(self._pass_on, {self._reports: b"", self._supervisor: b""}))

    def _pass_on(self, sources: dict[int, bytes]) -> None:
        """Wait for lines, or for the time to kill. sources: the beginning of the next line of each pipe."""
        left = None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())
        readable = select.select(list(sources), [], [], left)[0]
        for source in readable:
            data = os.read(source, 1 << 16)
            if not data:
                # The supervisor has ended, and this process is about to.
                del sources[source]
                continue
            *lines, sources[source] = (sources[source] + data).split(b"\n")
            for line in lines:
                if source == self._supervisor:
                    self._begin(line)
                else:
                    self._on_report(line)
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            self._kill()

    def _begin(self, order: bytes) -> None:
        """Have every rank begin another life."""
        self._ended.clear()
        self._has_killed = False
        for _, pipe in self._orders:
            os.write(pipe, order + b"\n")

    def _on_report(self, line: bytes) -> None:
        match status := decode_status(line):
            case Forked(rank=rank, pid=pid):
                with suppress(ProcessLookupError):
                    self._copies[rank] = os.pidfd_open(pid)
                self._report(status)
            case Ended():
                self._on_end(status)
            case _:
                self._report(status)

    def _on_end(self, end: Ended) -> None:
        if (pidfd := self._copies.pop(end.rank, None)) is not None:
            os.close(pidfd)
        self._ended.append(end)
        if end.code < 0 and not self._has_killed:
            # It could not say so itself.
            self._report(Failed(f"Rank {end.rank} (process {end.pid}) {describe_end(end.code)}.", end.code))
        if len(self._ended) == self._num_ranks:
            self._kill_at = None
            self._report(self._ended[0])
        elif end.rank == 0:
            self._kill_at = time.monotonic()
        elif self._kill_at is None:
            self._kill_at = time.monotonic() + _SECONDS_TO_SAY_WHY

    def _kill(self) -> None:
        self._has_killed = True
        for pidfd in self._copies.values():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


_MEETING_SECONDS = 600  # within which the nodes' torchrun agents must have met


def main() -> int:
    """Run the ranks until all have ended; return the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("context")
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--orders-fd", type=int)
    arguments = parser.parse_args()
    os.set_inheritable(arguments.status_fd, False)
    os.environ["PYTHONSAFEPATH"] = "1"
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGTERM,SIGINT"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    context = load_run_context(arguments.context)
    os.environ["DS_ACCELERATOR"] = "cuda" if context.config.device == "cuda" else "cpu"
    if context.config.nnodes == 1:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    worker = [arguments.context, "--agent-pid", str(os.getpid())]
    with open(arguments.status_fd, "w", encoding="utf-8") as pipe:
        report = reporter(pipe)
        if arguments.orders_fd is None:
            worker += ["--status-fd", str(arguments.status_fd)]
        else:
            os.set_inheritable(arguments.orders_fd, False)
            lives = RankLives(context.config.num_ranks_here, arguments.orders_fd, report)
            lives.start()
            worker += lives.arguments
        return _run([*_torchrun_options(context), "-m", "launcher.worker", *worker], report)


def _torchrun_options(context: RunContext) -> list[str]:
    config = context.config
    options = [
        f"--nnodes={config.nnodes}",
        f"--nproc-per-node={config.num_ranks_here}",
        "--max-restarts=0",
        # Torchrun would leave an empty directory of logs behind: the ranks write to this process's standard error.
        f"--log-dir={os.devnull}",
    ]
    if config.nnodes > 1:
        return [
            *options,
            f"--node-rank={config.node_rank}",
            "--rdzv-id=moeserve",
            "--rdzv-backend=static",
            f"--rdzv-endpoint={config.rdzv_endpoint}",
            f"--rdzv-conf=timeout={_MEETING_SECONDS}",
        ]
    return [
        *options,
        "--local-addr=127.0.0.1",
        f"--rdzv-id={context.incarnation}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={context.run_dir}/torchrun-{context.incarnation}",
        "--rdzv-conf=store_type=file",
    ]


def _run(arguments: list[str], report: Report) -> int:
    from torch.distributed import DistError
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    # A failure is reported below, in one sentence, in place of torchrun's log lines.
    logging.disable(logging.CRITICAL)
    try:
        run(parse_args(arguments))  # type: ignore[no-untyped-call]
    except SignalException:
        return 0
    except DistError as error:
        report(Failed(f"The nodes did not meet: {str(error).partition(chr(10))[0].rstrip('.')}."))
        return 1
    except ChildFailedError as error:
        # A rank that was killed is the cause: the others fail because it is missing.
        rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
        code = failure.exitcode
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        report(Failed(f"Rank {rank} (process {failure.pid}) {end}.", code))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
