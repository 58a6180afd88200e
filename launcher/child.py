"""Runs a module as a child that cannot outlive its parent: `python -m launcher.child PARENT_PID MODULE ARGS...`."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import resource
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1
# The newest objects are searched for garbage once this many more objects were made than freed.
_NEW_OBJECTS = 20_000


def collect_seldom() -> None:
    """Collect cyclic garbage only after many new objects, and only among these, from now on.

    A step of many streams makes more objects at once than Python waits for. Searching all loaded objects took a fifth
    of a token's CPU in an HTTP process, and a third of the scheduler's with 2,048 running requests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Let the kernel send this process a signal when its parent dies; exit if it has died already.

    The signal follows the parent's thread that started this process, so a supervisor starts children from its main
    thread.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent_pid:
        sys.exit(1)


def main() -> None:
    """Prepare this process and run MODULE in it."""
    parent_pid, module, *arguments = sys.argv[1:]
    die_with_parent(int(parent_pid))
    # Sent to a whole group or control group, these are for the supervisor, which ends its children itself.
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
    faulthandler.enable()
    # A core file would hold prompts and keys.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
