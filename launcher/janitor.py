"""Cleans up after a supervisor that was killed: `python -I -S janitor.py DIRECTORY`.

`launcher.run_directory` starts it as a program of its own, which needs nothing but the standard library. Its standard
input is a pipe that ends with the supervisor. The kernel kills the model process then, and tells the HTTP process,
which has a few seconds for its clients. After that nothing is left of the service: neither a process nor the directory,
which holds secrets.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

# Seconds, which leave time of the five within which nothing may be left. A live HTTP process takes two at most.
_SECONDS_FOR_LAST_WORDS = 3.0
_SECONDS_TO_REMOVE = 1.0
_SECONDS_BETWEEN_LOOKS = 0.05


def main(directory: str) -> None:
    """Wait until standard input ends, then end the processes that serve from `directory`, and remove it."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        # Sent to a whole control group, they are for the supervisor.
        signal.signal(number, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 4096):
        continue
    deadline = time.monotonic() + _SECONDS_FOR_LAST_WORDS
    while processes_of(directory) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    deadline = time.monotonic() + _SECONDS_TO_REMOVE
    while time.monotonic() < deadline:
        for pid in processes_of(directory):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
        # A process that is just ending may have put another file there.
        if not os.path.exists(directory):
            return
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def processes_of(directory: str) -> list[int]:
    """Return the pids of the processes that were started with a run context in `directory`."""
    return [int(path.name) for path in Path("/proc").glob("[0-9]*") if _serves_from(directory, path)]


def _serves_from(directory: str, process: Path) -> bool:
    try:
        arguments = (process / "cmdline").read_bytes().split(b"\0")
    except OSError:
        # It has ended.
        return False
    context = os.fsencode(f"{directory}/run.")
    of_launcher = any(argument.startswith(b"launcher.") for argument in arguments)
    return of_launcher and any(argument.startswith(context) for argument in arguments)


if __name__ == "__main__":
    main(sys.argv[1])
