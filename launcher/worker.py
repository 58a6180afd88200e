"""The model process: `python -m launcher.worker CONTEXT --status-fd N`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import traceback

from launcher.status import Report, reporter
from moeserve.config import ConfigError
from moeserve.frontend.logs import configure_logs
from moeserve.models.errors import ModelError
from moeserve.run_context import RunContext, load_run_context

_EXIT_FAILED = 3


def main() -> int:
    """Runs the engine until SIGTERM; returns the exit code. What went wrong is on the status pipe, in one sentence."""
    parser = argparse.ArgumentParser()
    parser.add_argument("context")
    parser.add_argument("--status-fd", type=int, required=True)
    arguments = parser.parse_args()
    os.set_inheritable(arguments.status_fd, False)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    context = load_run_context(arguments.context)
    configure_logs(context.config.log_level, context.config.log_format)
    with open(arguments.status_fd, "w", encoding="utf-8") as pipe:
        return _serve(context, reporter(pipe), stop)


def _serve(context: RunContext, report: Report, stop: threading.Event) -> int:
    try:
        # Imports torch, which takes seconds: the signals above must already be in place.
        from moeserve.startup import run_engine

        run_engine(context, report, stop)
    except (ModelError, ConfigError) as error:
        report({"event": "error", "message": str(error)})
        return _EXIT_FAILED
    except Exception as error:
        traceback.print_exc()
        report({"event": "error", "message": f"The model process failed: {type(error).__name__}: {error}"})
        return _EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
