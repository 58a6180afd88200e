"""Two commands at once: `python -m tests.support.beside COMPUTES WAITS`.

The first one computes and gets the time that the second leaves it, which waits for services most of the time. What the
first prints comes at the end. Exit code 1 if one of them fails.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile

_NICE = 10
# A test that gives way to others takes long on a machine that does other things too.
_TIMEOUT = {"PYTEST_TIMEOUT": "3000"}


def main(computes: str, waits: str) -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with TemporaryFile("w+") as output:
        first = subprocess.Popen(
            shlex.split(computes),
            env=os.environ | _TIMEOUT,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_give_way,
        )
        second = subprocess.Popen(shlex.split(waits))
        try:
            failed = [process.wait() != 0 for process in (second, first)]
        finally:
            for process in (first, second):
                if process.poll() is None:
                    process.terminate()
        output.seek(0)
        shutil.copyfileobj(output, sys.stdout)
    return int(any(failed))


def _give_way() -> None:
    os.nice(_NICE)
    with suppress(OSError):
        # Linux may share processors among sessions first, and within each by niceness.
        Path("/proc/self/autogroup").write_text(str(_NICE))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
