"""The HTTP process whose event loop tells every few milliseconds how far it is: `launcher.frontend_main`'s arguments.

On the pipe of `--beat-fd` it writes `TICK` records in place of single bytes.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from contextlib import suppress

from launcher.frontend_main import leave, main
from moeserve.frontend import server

# On the clocks of `time`: `perf_counter`, `thread_time` of the event loop, `process_time`.
TICK = struct.Struct("ddd")
TICK_S = 0.002


class FineTicker(server.Ticker):
    """A ticker that writes times."""

    def start(self) -> None:
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self._descriptor, TICK.pack(time.perf_counter(), time.thread_time(), time.process_time()))
        self._next = asyncio.get_running_loop().call_later(TICK_S, self.start)


if __name__ == "__main__":
    server.Ticker = FineTicker  # type: ignore[misc]
    leave(main())
