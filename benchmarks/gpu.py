"""The GPU on which a benchmark runs: its name and state, its measured ceilings, and the time that is left on it."""

from __future__ import annotations

import platform
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import torch
import triton

from benchmarks.kernels.measure import time_calls

_QUERY = ("nvidia-smi", "--format=csv,noheader", "--query-gpu")
_STATE = "clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"
_COPY_BYTES = 4 * 2**30
_SUM_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Bytes per second of a copy (read and written) and of a sum (read), and bf16 FLOP/s of a large product."""

    copy: float
    read: float
    flops: float


def measure_ceilings(device: torch.device) -> Ceilings:
    """Takes and gives back some 9 GB. Numbers are random: zeros are faster."""
    random = torch.Generator(device).manual_seed(0)
    source = torch.randn(_COPY_BYTES // 4, device=device, generator=random)
    target = torch.empty_like(source)
    # By a kernel, as everything that is compared with it. A graph hands plain copies to the copy engine: 2.8 TB/s on an
    # H200 where a kernel moves 4.2.
    copy = 2 * _COPY_BYTES / _seconds(lambda: torch.mul(source, 1.0, out=target))
    part = source[: _SUM_BYTES // 4]
    read = _SUM_BYTES / _seconds(part.sum)
    a, b = (torch.randn(8192, 8192, device=device, generator=random).to(torch.bfloat16) for _ in range(2))
    return Ceilings(copy, read, 2 * 8192**3 / _seconds(lambda: a @ b))


def _seconds(call: Callable[[], torch.Tensor]) -> float:
    return time_calls([call])[0].microseconds / 1e6


def is_lost() -> bool:
    """Return whether the GPU refuses all further work of this process."""
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def gpu_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)


def file_stem(device_name: str) -> str:
    """Return a device's name as a part of a file name: `nvidia-h200`."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def versions() -> str:
    """Return today's date and the versions of the libraries."""
    return (
        f"{date.today()}, torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}."
    )


def hardware(device: torch.device) -> str:
    """Return one sentence."""
    properties = torch.cuda.get_device_properties(device)
    cache = getattr(properties, "L2_cache_size", 0)
    return (
        f"{properties.name}: {properties.multi_processor_count} multiprocessors, "
        f"{properties.total_memory / 2**30:.0f} GiB, {cache / 2**20:.0f} MiB of L2; CUDA {torch.version.cuda}, "
        f"driver {_ask('driver_version')}."
    )


def gpu_state() -> str:
    """Return what `nvidia-smi` reports of clocks, power, temperature and load at this moment. Nothing is ever set."""
    return f"nvidia-smi says {_STATE.replace(',', ', ')}: {_ask(_STATE)}"


def _ask(query: str) -> str:
    """Ask for the first device, which need not be the one that CUDA calls 0."""
    *command, option = _QUERY
    try:
        result = subprocess.run([*command, f"{option}={query}"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    lines = result.stdout.splitlines()
    return lines[0].strip() if lines else "unknown"


class Deadline:
    """The time limit of a whole run; it begins with the constructor."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self._clock = seconds, clock
        self._end = clock() + seconds

    def passed(self) -> bool:
        return self._clock() >= self._end

    def left(self) -> float:
        """Return the seconds that are left, negative ones past the end."""
        return self._end - self._clock()
