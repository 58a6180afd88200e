"""Tell whether the machine has a core to spare for the thread that copies experts."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STAT = Path("/proc/stat")
# Seconds between two looks at the machine's counters.
_INTERVAL = 1.0
# The share of a core that counts as a core to spare.
_SPARE = 0.5


class FreeCores:
    """Looks about once a second at the processor time that other processes take. The own copying thread's is not
    counted, so the answer does not depend on whether experts are loaded ahead."""

    def __init__(self, num_threads: int) -> None:
        """num_threads: the threads that compute."""
        self._num_threads = num_threads
        self._num_cores = os.cpu_count() or 1
        self._has_one = num_threads < self._num_cores
        self._looked_at = time.monotonic()
        self._others = _seconds_of_others()

    def has_one(self) -> bool:
        """Return True if the computing threads and other processes leave a core free."""
        now = time.monotonic()
        if now - self._looked_at >= _INTERVAL and self._others is not None:
            others = _seconds_of_others()
            if others is not None:
                taken = max(0.0, others - self._others) / (now - self._looked_at)
                self._has_one = is_one_free(self._num_cores, self._num_threads, taken)
                self._looked_at, self._others = now, others
        return self._has_one


def is_one_free(num_cores: int, num_threads: int, taken: float) -> bool:
    """Return True if `num_threads` and the cores that others take, a number of cores, leave one to spare."""
    return num_cores - num_threads - taken >= _SPARE


def _seconds_of_others() -> float | None:
    """Return the processor time of all other processes since the machine started; None where it is not known."""
    try:
        user, nice, system, _, _, irq, softirq = map(int, _STAT.read_text().split("\n", 1)[0].split()[1:8])
    except (OSError, ValueError):
        return None
    own = os.times()
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK") - own.user - own.system
