"""The model process: `python -m launcher.worker CONTEXT --status-fd N`, or one of its ranks, under torchrun.

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

from launcher.child import die_with_parent
from launcher.processes import Report, reporter
from moeserve.config import ConfigError
from moeserve.frontend.logs import configure_logs
from moeserve.model.spec import ModelError
from moeserve.ranks.messages import RankError
from moeserve.wire import RunContext, load_run_context

_EXIT_FAILED = 3


def main() -> int:
    """Run the engine until SIGTERM; return the exit code. A failure is on the status pipe, in one sentence."""
    if "--status-fd" not in sys.argv:
        from launcher.torchrun_worker import serve_rank

        serve_rank(prog_name="torchrun -m launcher.worker")
    parser = argparse.ArgumentParser()
    parser.add_argument("context")
    parser.add_argument("--status-fd", type=int, required=True)
    parser.add_argument("--agent-pid", type=int)
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"]) if arguments.agent_pid else 0
    if arguments.agent_pid:
        die_with_parent(arguments.agent_pid)
        faulthandler.enable()
    else:
        os.set_inheritable(arguments.status_fd, False)
    stop = threading.Event()
    if rank == 0:
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = load_run_context(arguments.context)
    configure_logs(context.config.log_level, context.config.log_format)
    status = f"/proc/{arguments.agent_pid}/fd/{arguments.status_fd}" if arguments.agent_pid else arguments.status_fd
    with open(status, "w", encoding="utf-8") as pipe:
        return _serve(context, rank, reporter(pipe), stop)


def _serve(context: RunContext, rank: int, report: Report, stop: threading.Event) -> int:
    name = "The model process" if context.config.expert_parallel_size == 1 else f"Rank {rank}"
    try:
        # Imports torch, which takes seconds: the signals above must already be in place.
        if context.config.expert_parallel_size == 1:
            from moeserve.service import run_alone

            run_alone(context, report, stop)
        else:
            from moeserve.ranked_service import run_rank

            run_rank(context, rank, report, stop)
    except (ModelError, ConfigError, RankError) as error:
        report({"event": "error", "message": str(error)})
        return _EXIT_FAILED
    except Exception as error:
        traceback.print_exc()
        report({"event": "error", "message": f"{name} failed: {type(error).__name__}: {error}"})
        return _EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
