"""The ranks of one service on this machine, under torchrun: `python -m launcher.rank_group CONTEXT --status-fd N`.

With `--orders-fd M` the ranks serve in copies of themselves where they can, one life of the engine after another
(`launcher.rank_lives`).

This process becomes torchrun's agent. On one node its store is a file and the ranks meet in a file, so that nothing but
loopback is listened on. With several nodes the store is on node 0 and listens on every interface. The agent ends with
its ranks and reports which one failed.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys

from launcher.processes import Report, reporter
from launcher.rank_lives import RankLives
from moeserve.wire import RunContext, load_run_context

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
            lives = RankLives(context.config.expert_parallel_size // context.config.nnodes, arguments.orders_fd, report)
            lives.start()
            worker += lives.arguments
        return _run([*_torchrun_options(context), "-m", "launcher.worker", *worker], report)


def _torchrun_options(context: RunContext) -> list[str]:
    config = context.config
    options = [
        f"--nnodes={config.nnodes}",
        f"--nproc-per-node={config.expert_parallel_size // config.nnodes}",
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
        report(
            {"event": "error", "message": f"The nodes did not meet: {str(error).partition(chr(10))[0].rstrip('.')}."}
        )
        return 1
    except ChildFailedError as error:
        # A rank that was killed is the cause: the others fail because it is missing.
        rank, failure = min(error.failures.items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))
        code = failure.exitcode
        end = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        report({"event": "error", "message": f"Rank {rank} (process {failure.pid}) {end}.", "code": code})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
