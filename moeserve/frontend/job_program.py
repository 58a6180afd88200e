"""The side of a program that `job_process` starts. It imports nothing of its owner's, since many are started."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

# Of the length before a job or an answer.
SIZE_BYTES = 4


def serve_jobs(answer: Callable[[bytes], bytes]) -> None:
    """Answer the jobs of standard input until it ends. The body of a program; `answer` calls `limit_cpu`."""
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while len(size := jobs.read(SIZE_BYTES)) == SIZE_BYTES:
        data = answer(jobs.read(int.from_bytes(size)))
        limit_cpu(0)
        answers.write(len(data).to_bytes(SIZE_BYTES) + data)
        answers.flush()


def limit_cpu(seconds: float) -> None:
    """End this process by SIGPROF after so much more processor time; 0 takes the limit away."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
