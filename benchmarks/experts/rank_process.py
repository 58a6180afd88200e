"""Ranks of a measurement: processes that run the same module and each print one line of JSON at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.experts.unavailable import Unavailable

_TIMEOUT = 600.0


def run_ranks(module: str, num_ranks: int, job: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of `python -m module RANK NUM_RANKS RENDEZVOUS JOB` printed last. Raises Unavailable if one fails.

    Each has one thread; the others are killed when one fails.
    """
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        # They must find the same packages, also where they are not installed.
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }
    with tempfile.TemporaryDirectory(prefix="moeserve-bench-") as folder:
        rest = [str(num_ranks), str(Path(folder) / "rendezvous"), msgspec.json.encode(job).decode()]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", module, str(rank), *rest],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(num_ranks)
        ]
        try:
            return [_answer(rank, process) for rank, process in enumerate(processes)]
        finally:
            for process in processes:
                process.kill()
                process.wait()
                for stream in (process.stdout, process.stderr):
                    if stream is not None:
                        stream.close()


def _answer(rank: int, process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        said, errors = process.communicate(timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"Rank {rank} has not ended in {_TIMEOUT:g} s.") from None
    lines = said.strip().splitlines()
    if process.returncode or not lines:
        raise Unavailable(f"Rank {rank} failed: {(errors.strip().splitlines() or ['no word'])[-1]}")
    answer: dict[str, Any] = msgspec.json.decode(lines[-1])
    return answer


def arguments() -> tuple[int, int, Path, dict[str, Any]]:
    """What `run_ranks` gave this process: rank, number of ranks, where they meet, and the job."""
    rank, num_ranks, rendezvous, job = sys.argv[1:5]
    return int(rank), int(num_ranks), Path(rendezvous), msgspec.json.decode(job)
