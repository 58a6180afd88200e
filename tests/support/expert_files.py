"""Expert files that services write while they serve."""

from __future__ import annotations

import threading


def wait_until_written() -> None:
    """Wait until the services of this process write no expert file any more."""
    for thread in threading.enumerate():
        if thread.name == "expert-file":
            thread.join()
