"""The machine on which a measurement ran."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from moeserve.config import VERSION


@dataclass(frozen=True, slots=True)
class Environment:
    """`load_before` is the load average of the last minute: above about 0.1 the machine was not quiet."""

    date: str
    client: str
    cpu: str
    num_cores: int
    memory_gib: float
    system: str
    load_before: float


def describe(cpuinfo: Path = Path("/proc/cpuinfo")) -> Environment:
    """Of the machine that runs the client; a server elsewhere has its own."""
    return Environment(
        date=datetime.now().astimezone().isoformat(timespec="seconds"),
        client=f"moeserve bench {VERSION}, Python {platform.python_version()}",
        cpu=_cpu_name(cpuinfo),
        num_cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        system=f"{platform.system()} {platform.release()}",
        load_before=round(os.getloadavg()[0], 2),
    )


def _cpu_name(cpuinfo: Path) -> str:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return platform.machine()
    fields: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    name = fields.get("model name", platform.machine())
    features = fields.get("flags", "").split()
    widest = next((label for flag, label in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in features), "")
    return f"{name} {widest}".strip()
