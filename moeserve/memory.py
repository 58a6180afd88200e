"""How much memory this process may take."""

from __future__ import annotations

from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes(cgroup: Path = _CGROUP, meminfo: Path = _MEMINFO) -> int:
    """Bytes that can be taken now: what the machine has available, cut to what the container's limit leaves."""
    available = _machine_available(meminfo)
    limit, used = _read_number(cgroup / "memory.max"), _read_number(cgroup / "memory.current")
    if limit is None or used is None:
        return available
    reclaimable = _read_stat(cgroup / "memory.stat", "inactive_file")
    return max(0, min(available, limit - used + reclaimable))


def _machine_available(meminfo: Path) -> int:
    for line in meminfo.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{meminfo} does not tell MemAvailable")


def _read_number(path: Path) -> int | None:
    """None for a file that is not there or says `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.split()[0] == key), 0)
