"""Removes a run directory when its supervisor is gone, whatever ended it: `python sweeper.py DIRECTORY`.

Standard input is a pipe that the supervisor alone holds open. The directory holds secrets, and a supervisor that was
killed can remove nothing itself. This script needs the standard library alone, and ignores what ends a group.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time

_TRIES = 20
_SECONDS_BETWEEN_TRIES = 0.2


def main() -> None:
    """Wait for the end of the pipe, then remove the directory."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    directory = sys.argv[1]
    os.read(0, 1)
    # The other processes die a moment after the pipe has ended, and may still write.
    for _ in range(_TRIES):
        shutil.rmtree(directory, ignore_errors=True)
        if not os.path.lexists(directory):
            return
        time.sleep(_SECONDS_BETWEEN_TRIES)


if __name__ == "__main__":
    main()
