"""What this machine offers, found without loading anything."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
_NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")


def usable_cores(cpu_quota: Path = _CGROUP_CPU) -> int:
    """Cores this process may use: its affinity, cut to the container's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_quota.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))


def gpu_names(gpus: Path = _NVIDIA_GPUS) -> list[str]:
    """Models of the NVIDIA GPUs that the driver lists."""
    names = []
    for information in sorted(gpus.glob("*/information")):
        lines = information.read_text().splitlines()
        names += [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]
    return names
