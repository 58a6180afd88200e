"""Runs test files side by side, where pytest is alone: `python -m tests.support.side_by_side [FILE|FOLDER|TEST]...`.

Kernels are compiled by the processes that launch them, which takes most of the time of a first run on a GPU. Each
process is told about when it ends. Long tests are left out. Exit code 1 if anything failed.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Each has a context of its own in the GPU's memory.
_MOST = 8
_NOTHING_TO_RUN = 5


def main(wanted: list[str]) -> int:
    jobs = [job for name in wanted for job in (sorted(Path(name).glob("**/test_*.py")) or [Path(name)])]
    with ThreadPoolExecutor(min(_MOST, os.cpu_count() or 1)) as pool:
        return max(pool.map(run, jobs), default=1)


def run(job: Path | str) -> int:
    command = [sys.executable, "-m", "pytest", "-q", "--disable-warnings", "-m", "not long", str(job)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"-- {job}\n{done.stdout}", end="", flush=True)
    return int(done.returncode not in (0, _NOTHING_TO_RUN))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
