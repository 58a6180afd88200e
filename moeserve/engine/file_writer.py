"""Files written beside the engine's loop: a disk that hangs must not hold up a step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class FileJob:
    """A file to be written. write: writes it, on any thread, or raises OSError. result: the answer to its command."""

    write: Callable[[], None]
    result: dict[str, Any]


# Takes a job and the error that ended it, if one did.
Finished = Callable[[FileJob, OSError | None], None]


class FileWriter:
    """Writes one file at a time, on a thread that does not keep the process alive. Only one thread uses it."""

    def __init__(self) -> None:
        self._current: _Write | None = None

    @property
    def is_busy(self) -> bool:
        """True while a file is being written, and until `take_finished` has returned its call."""
        return self._current is not None

    def start(self, job: FileJob, finished: Finished) -> None:
        """Begin to write. `take_finished` returns `finished` with its arguments once the file is written."""
        assert self._current is None
        self._current = _Write(job, finished)
        self._current.start()

    def wait(self, seconds: float) -> None:
        if self._current is not None:
            self._current.join(seconds)

    def take_finished(self) -> Callable[[], None] | None:
        """Return, once, the call that is due after a write has ended; None if no call is due."""
        write = self._current
        if write is None or write.is_alive():
            return None
        self._current = None
        if write.failure is not None:
            raise write.failure
        return lambda: write.finished(write.job, write.error)


class _Write(threading.Thread):
    def __init__(self, job: FileJob, finished: Finished) -> None:
        super().__init__(name="file-writer", daemon=True)
        self.job = job
        self.finished = finished
        self.error: OSError | None = None
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            self.job.write()
        except OSError as error:
            self.error = error
        except Exception as error:  # a defect: raised on the engine's thread, where it ends the service with a sentence
            self.failure = error
