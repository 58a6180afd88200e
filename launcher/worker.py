"""The model process: `python -m launcher.worker CONTEXT --status-fd N`, or one of its ranks, under torchrun.

With `--orders-fd M` it serves in copies of itself, if the model allows it (`launcher.copies`).
Under the supervisor's torchrun (`launcher.rank_group`) the status pipe is descriptor N of the agent, whose pid is
`--agent-pid`. Without a status pipe this is a rank of a user's own torchrun (`launcher.torchrun_worker`).
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

from launcher.child import die_with_parent
from launcher.copies import Copies
from launcher.processes import Report, reporter
from moeserve.config import ConfigError
from moeserve.frontend.logs import LogStream, configure_logs
from moeserve.model.spec import ModelError
from moeserve.ranks.messages import RankError
from moeserve.wire import RunContext, load_run_context

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
    parser.add_argument("--orders-fd", type=int, help="pipe for contexts of further lives")
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"]) if arguments.agent_pid else 0
    if arguments.agent_pid:
        die_with_parent(arguments.agent_pid)
        faulthandler.enable()
    else:
        os.set_inheritable(arguments.status_fd, False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = load_run_context(arguments.context)
    logs = configure_logs(context.config.log_level, context.config.log_format)
    status = f"/proc/{arguments.agent_pid}/fd/{arguments.status_fd}" if arguments.agent_pid else arguments.status_fd
    with open(status, "w", encoding="utf-8") as pipe:
        report = reporter(pipe)
        if context.config.expert_parallel_size > 1:
            return _served(lambda: _run_rank(context, rank, report), report, f"Rank {rank}")
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        return _served(lambda: _run_alone(context, arguments.orders_fd, report, stop, logs), report, _ALONE)


def _run_rank(context: RunContext, rank: int, report: Report) -> int:
    from moeserve.ranked_service import run_rank

    run_rank(context, rank, report)
    return 0


def _run_alone(
    context: RunContext, orders_fd: int | None, report: Report, stop: threading.Event, logs: LogStream
) -> int:
    # Imports torch, which takes seconds: the signals must already be in place.
    from moeserve.service import load_alone, serve_alone

    loaded = load_alone(context, report, to_copy=orders_fd is not None)
    if orders_fd is None or not loaded.can_be_copied:
        serve_alone(context, loaded, report, stop)
        return 0

    def serve(context: RunContext, stop: threading.Event) -> int:
        def run() -> int:
            serve_alone(context, loaded, report, stop)
            return 0

        code = _served(run, report, _ALONE)
        logs.drain()
        return code

    os.set_inheritable(orders_fd, False)
    with open(orders_fd, encoding="utf-8") as orders:
        # From here on it waits until `Copies` listens, which does not know of `stop`.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        return 0 if stop.is_set() else Copies(serve, orders, report).run(context)


def _served(run: Callable[[], int], report: Report, name: str) -> int:
    """Return the exit code of `run`. A failure is reported, in one sentence."""
    try:
        return run()
    except (ModelError, ConfigError, RankError) as error:
        report({"event": "error", "message": str(error)})
    except Exception as error:
        traceback.print_exc()
        report({"event": "error", "message": f"{name} failed: {type(error).__name__}: {error}"})
    return _EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
