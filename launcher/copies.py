"""Runs the engine, or a rank, in a forked copy of a process that has loaded the model and does nothing else.

Copies share the memory of the weights, which nobody writes to. When a copy dies, another one takes its place without
loading anything, so that a crash is a short pause however large the model is.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

from launcher.child import die_with_parent
from moeserve.run_context import RunContext, load_run_context
from moeserve.statuses import Ended, Forked, Report

# Serves until the event is set, and returns the exit code.
Serve = Callable[[RunContext, threading.Event], int]
# Seconds that a waiting system call may take: a signal that came just before it runs its Python handler only after the
# call.
_SECONDS_TO_SIGNAL = 0.2


class Copies:
    """Serves one life of the engine after another, each in a copy of this process, from its main thread.

    orders: lines that name the context file of the next life; its end ends this process. report: receives the start of
    each life, and each unexpected end. rank: for these reports. SIGTERM ends the copy, and this process after it.
    """

    def __init__(self, serve: Serve, orders: TextIO, report: Report, rank: int) -> None:
        self._serve, self._orders, self._report, self._rank = serve, orders, report, rank
        self._pid: int | None = None
        self._stopped = False

    def run(self, context: RunContext) -> int:
        """Serve until told to stop; return the exit code."""
        while True:
            pid, code = self._run_copy(context)
            if self._stopped:
                return code
            self._report(Ended(self._rank, pid, code))
            _wait_until_readable(self._orders.fileno())
            order = self._orders.readline().strip()
            if not order:
                return code
            context = load_run_context(order)

    def _run_copy(self, context: RunContext) -> tuple[int, int]:
        """Fork, wait for the copy, and return its pid and how it ended: its exit code, or a signal below zero."""
        this = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
        pid = self._pid = os.fork()
        if pid == 0:
            self._be_copy(context, this)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        ended = os.pidfd_open(pid)
        _wait_until_readable(ended)
        os.close(ended)
        _, status = os.waitpid(pid, 0)
        self._pid = None
        return pid, os.waitstatus_to_exitcode(status)

    def _be_copy(self, context: RunContext, parent: int) -> None:
        """Serve in a copy, and end it."""
        code = 1
        try:
            die_with_parent(parent)
            stop = threading.Event()
            signal.signal(signal.SIGTERM, lambda *_: stop.set())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
            self._report(Forked(self._rank, os.getpid()))
            code = self._serve(context, stop)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _on_sigterm(self, *_: object) -> None:
        self._stopped = True
        if self._pid is None:
            # Between two lives.
            raise SystemExit(0)
        with suppress(ProcessLookupError):
            # The copy may just have ended and been reaped.
            os.kill(self._pid, signal.SIGTERM)


def _wait_until_readable(fd: int) -> None:
    """Wait until reading `fd` does not block, or the process of a pidfd has ended. Let signal handlers run
    meanwhile."""
    while not select.select([fd], [], [], _SECONDS_TO_SIGNAL)[0]:
        pass
