"""Python loads it at its start where PYTHONPATH names this folder: HTTP processes then note their longest turns.

A turn is the processor time of the event loop's thread between two moments at which it could have done something else.
The file that NOTED_TURNS names has the longest one, in seconds as text, once it has grown.
"""

import os
import sys

if "launcher.frontend_main" in sys.orig_argv:
    import asyncio
    import time
    from pathlib import Path

    from moeserve.frontend import server

    class NotingTicker(server.Ticker):
        """A ticker that is due in every turn."""

        _last: float | None = None
        _longest = 0.0

        def start(self) -> None:
            super().start()
            if self._last is None:
                self._note()

        def _note(self) -> None:
            now = time.thread_time()
            took = 0.0 if self._last is None else now - self._last
            if took > self._longest:
                self._longest = took
                Path(os.environ["NOTED_TURNS"]).write_text(f"{took:.3f}")
            self._last = time.thread_time()
            asyncio.get_running_loop().call_later(0.002, self._note)

    server.Ticker = NotingTicker  # type: ignore[misc]
