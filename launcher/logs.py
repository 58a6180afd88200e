"""The logs of a process: structlog on standard error, for people on a terminal and as JSON elsewhere.

The reader of standard error may stop reading, and then a write to it waits for ever. So lines go through a bounded
queue to a thread; lines that do not fit are dropped and counted.
"""

from __future__ import annotations

import io
import json
import logging
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO, cast

import structlog

from moeserve.forever import repeat

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_MAX_WAITING_CHARS = 4 * 2**20
_LAST_LINES_S = 1.0


class LogStream(io.TextIOBase):
    """A text stream over a descriptor whose writes never wait. Each call of `write` is whole lines.

    num_dropped: the lines that did not fit or could not be written; the next line that fits is preceded by `notice` of
    their number.
    """

    def __init__(
        self,
        descriptor: int,
        notice: Callable[[int], str] = lambda count: f"{count} log lines were dropped\n",
        max_waiting_chars: int = _MAX_WAITING_CHARS,
    ) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._notice = notice
        self._max_waiting = max_waiting_chars
        self._waiting: deque[str] = deque()
        self._num_waiting = 0  # characters, without the line that is being written
        self._is_writing = False
        self._num_told = 0
        self.num_dropped = 0
        self._start()
        os.register_at_fork(after_in_child=self._start)

    def write(self, text: str) -> int:
        with self._change:
            if self._num_waiting + len(text) > self._max_waiting:
                self.num_dropped += max(1, text.count("\n"))
                return len(text)
            if untold := self.num_dropped - self._num_told:
                self._num_told = self.num_dropped
                self._put(self._notice(untold))
            self._put(text)
            self._change.notify_all()
        return len(text)

    def drain(self, seconds: float = _LAST_LINES_S) -> bool:
        """Wait until all lines are written, or for the given time. Return whether they are."""
        with self._change:
            return self._change.wait_for(lambda: not self._waiting and not self._is_writing, seconds)

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def _start(self) -> None:
        """Begin to write, in a forked copy too: it has neither the thread nor lines to write."""
        self._change = threading.Condition()
        self._waiting.clear()
        self._num_waiting = 0
        threading.Thread(target=repeat, args=("logs", self._write_next), name="logs", daemon=True).start()

    def _put(self, text: str) -> None:
        self._waiting.append(text)
        self._num_waiting += len(text)

    def _write_next(self) -> None:
        with self._change:
            self._is_writing = False
            self._change.notify_all()
            self._change.wait_for(lambda: self._waiting)
            text = self._waiting.popleft()
            self._num_waiting -= len(text)
            self._is_writing = True
        try:
            self._write(text.encode("utf-8", "backslashreplace"))
        except (OSError, MemoryError):
            # The disk is full, or nobody can read this any more.
            with self._change:
                self.num_dropped += max(1, text.count("\n"))

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._descriptor, data) :]
            except BlockingIOError:
                # Another process may have made the descriptor non-blocking.
                select.select([], [self._descriptor], [])


def configure_logs(level: str, log_format: str, fields: Mapping[str, Any] | None = None) -> LogStream:
    """Set up structlog, and return its stream, which is drained when the interpreter ends.

    Lines of libraries, in the same form, are shown from warnings on. `log_format`: auto, console or json. fields: of
    every line.
    """
    common = dict(fields or {})
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    stream = LogStream(sys.stderr.fileno(), _json_notice) if as_json else LogStream(sys.stderr.fileno())
    renderer = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer()
    structlog.configure(
        processors=[
            lambda _logger, _method, line: {**common, **line},
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", stream)),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(level=logging.WARNING, handlers=[_Forwarding(stream)])
    return stream


class _Forwarding(logging.Handler):
    """Writes the log lines of libraries as lines of this program; `logger` names the library's logger.

    `logging.shutdown`, which the interpreter calls when it ends, waits until the stream's lines are written.
    """

    def __init__(self, stream: LogStream) -> None:
        super().__init__()
        self._stream = stream

    def flush(self) -> None:
        self._stream.drain()

    def emit(self, record: logging.LogRecord) -> None:
        logger = structlog.get_logger(record.name)
        write = logger.error if record.levelno >= logging.ERROR else logger.warning
        write(record.getMessage(), logger=record.name, exc_info=record.exc_info)


def _json_notice(count: int) -> str:
    return json.dumps({"count": count, "event": "log_lines_dropped", "level": "warning"}) + "\n"
