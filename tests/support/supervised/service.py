"""A service under the real supervisor with stand-in children. Prints one line per thing that happens."""

import asyncio
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from launcher.preflight import open_listener
from launcher.run_directory import run_directory
from launcher.supervisor import Grace, Listeners, Supervisor
from moeserve.config import ServeConfig
from moeserve.run_context import RunContext


def say(*words: object) -> None:
    """Write a line at once: other processes write to the same pipe."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def main() -> int:
    max_restarts = int(os.environ.get("STANDIN_RESTARTS", "0"))
    http_ready = float(os.environ.get("STANDIN_HTTP_READY", "30"))
    reporting = float(os.environ.get("STANDIN_REPORTING", "1800"))
    num_frontends = int(os.environ.get("STANDIN_FRONTENDS", "1"))
    config = ServeConfig(
        port=0,
        engine_timeout=float(os.environ.get("STANDIN_TIMEOUT", "30")),
        shutdown_timeout=20.0,
        max_restarts=max_restarts,
        num_frontends=num_frontends,
    )
    listener = open_listener(config.host, config.port)
    with run_directory(os.environ) as directory:
        context = RunContext(
            config=config,
            model_dir="none",
            model_hash="none",
            run_dir=str(directory),
            incarnation=7,
            secret="00",
            served_model_names=("standin",),
        )
        supervisor = Supervisor(
            context,
            listener,
            Listeners(
                loading=lambda status: say("loading", status.done, status.total),
                ready=lambda _: say("ready", supervisor.worker_pid, *supervisor.frontend_pids),
                stopping=lambda: say("stopping"),
                failed=lambda sentence: say("failed", sentence),
                notice=lambda sentence: say("notice", sentence, supervisor.worker_pid, *supervisor.frontend_pids),
                state=lambda sentence: say("state", sentence),
                beating=lambda: say("beating"),
            ),
            grace=replace(
                Grace(), telling=0.3, after_failure=0.3, at_once=0.3, http_ready=http_ready, reporting=reporting
            ),
            worker_module="tests.support.supervised.worker",
            frontend_module="tests.support.supervised.frontend",
        )
        fault = patch("launcher.supervisor.wait_for_silence", side_effect=MemoryError)
        with fault if "STANDIN_FAULT" in os.environ else nullcontext():
            return asyncio.run(supervisor.run())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    sys.exit(main())
