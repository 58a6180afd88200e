"""The model process: `python -m launcher.worker CONTEXT --status-fd N`, or one of its ranks, under torchrun.

With `--orders-fd M` it serves in copies of itself, if the model allows it (`launcher.copies`). Under the supervisor's
torchrun (`launcher.rank_group`) the descriptors belong to the agent, whose pid is `--agent-pid`, and `--orders-fd`
lists one for each rank of this node. Without a status pipe this is a rank of a user's own torchrun
(`launcher.torchrun_worker`).
"""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import TextIO, cast

from launcher.child import collect_seldom, die_with_parent
from launcher.copies import Copies
from launcher.logs import LogStream, configure_logs
from launcher.processes import reporter
from moeserve.config import ConfigError
from moeserve.engine.ranks.messages import RankError
from moeserve.model.spec import ModelError
from moeserve.run_context import RunContext, load_run_context
from moeserve.statuses import Failed, Report

_EXIT_FAILED = 3
_ALONE = "The model process"


def main() -> int:
    """Run the engine until SIGTERM; return the exit code. A failure is on the status pipe, in one sentence."""
    if "--status-fd" not in sys.argv:
        from launcher.torchrun_worker import serve_rank

        serve_rank(prog_name="torchrun -m launcher.worker")
    parser = argparse.ArgumentParser()
    parser.add_argument("context")
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int)
    parser.add_argument("--orders-fd", help="pipe for contexts of further lives")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"]) if arguments.agent_pid else 0
    status, orders = str(arguments.status_fd), arguments.orders_fd
    folder = "/proc/self/fd"
    if arguments.agent_pid:
        die_with_parent(arguments.agent_pid)
        faulthandler.enable()
        folder = f"/proc/{arguments.agent_pid}/fd"
        orders = orders and orders.split(",")[int(os.environ["LOCAL_RANK"])]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = load_run_context(arguments.context)
    logs = configure_logs(context.config.log_level, context.config.log_format)
    with ExitStack() as pipes:
        report = reporter(pipes.enter_context(_open(folder, status, "w")))
        of_orders = None if orders is None else pipes.enter_context(_open(folder, orders, "r"))
        name = f"Rank {rank}" if context.config.num_ranks > 1 else _ALONE
        return _served(lambda: _run(context, rank, of_orders, report, logs, name), report, name)


def _open(folder: str, descriptor: str, mode: str) -> TextIO:
    """Open a pipe that is a descriptor of this process or of the agent, and close this process's own, if it has it."""
    pipe = open(f"{folder}/{descriptor}", mode, encoding="utf-8")  # noqa: SIM115 - the caller closes it
    if folder == "/proc/self/fd":
        os.close(int(descriptor))
    return cast("TextIO", pipe)


def _run(context: RunContext, rank: int, orders: TextIO | None, report: Report, logs: LogStream, name: str) -> int:
    """Load the rank's part of the model and serve with it; return the exit code. name: of this process, in sentences.

    SIGTERM ends one of several ranks at once until all have joined: it may wait for a lost one for long.
    """
    stop, is_alone = threading.Event(), name == _ALONE
    if is_alone:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    # Imports torch, which takes seconds: the signals must already be in place.
    from moeserve.engine.service import LoadedPart, load_alone, serve_alone

    loaded: LoadedPart | None
    if is_alone:
        loaded = load_alone(context, report, to_copy=orders is not None)
    else:
        from moeserve.engine.ranked_service import load_member, serve_member

        loaded = load_member(context, rank, report, to_copy=orders is not None)

    def serve(context: RunContext, stop: threading.Event) -> int:
        assert loaded is not None
        if is_alone:
            serve_alone(context, loaded, report, stop)
        elif not stop.is_set():
            serve_member(context, loaded, report)
        return 0

    def serve_in_copy(context: RunContext, stop: threading.Event) -> int:
        code = _served(lambda: serve(context, stop), report, name)
        logs.drain()
        return code

    if loaded is None:
        return 0
    collect_seldom()
    if orders is None or not loaded.can_be_copied:
        return serve(context, stop)
    # From here on it waits until `Copies` listens, which does not know of `stop`.
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    return 0 if stop.is_set() else Copies(serve_in_copy, orders, report, rank).run(context)


def _served(run: Callable[[], int], report: Report, name: str) -> int:
    """Return the exit code of `run`. A failure is reported, in one sentence."""
    try:
        return run()
    except (ModelError, ConfigError, RankError) as error:
        report(Failed(str(error), of_settings=isinstance(error, ConfigError)))
    except Exception as error:
        traceback.print_exc()
        report(Failed(f"{name} failed: {type(error).__name__}: {error}".partition("\n")[0]))
    return _EXIT_FAILED


if __name__ == "__main__":
    code = main()
    logging.shutdown()  # waits for the last lines of the log
    sys.stdout.flush()
    sys.stderr.flush()
    # All that this process held is closed. If Python took itself down, Triton's library, which transformers loads for
    # some types, would print a list of what it leaks.
    os._exit(code)
