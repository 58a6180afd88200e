"""The GPU on which kernels are measured, and the libraries that they are measured with."""

from __future__ import annotations

import platform
import re
import subprocess
from datetime import date

import torch
import triton

_QUERY = ("nvidia-smi", "--format=csv,noheader", "--query-gpu")
_STATE = "clocks.sm,clocks.mem,power.draw,temperature.gpu,utilization.gpu"


def file_stem(device_name: str) -> str:
    """Of a device's name, for files."""
    return re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")


def name(device: torch.device) -> str:
    """As its driver calls it."""
    return torch.cuda.get_device_name(device)


def libraries() -> str:
    """Their versions."""
    return f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"


def versions() -> str:
    """Of today's run, with the date."""
    return f"{date.today()}, {libraries()}."


def hardware(device: torch.device) -> str:
    """One sentence."""
    properties = torch.cuda.get_device_properties(device)
    cache = getattr(properties, "L2_cache_size", 0)
    return (
        f"{properties.name}: {properties.multi_processor_count} multiprocessors, "
        f"{properties.total_memory / 2**30:.0f} GiB, {cache / 2**20:.0f} MiB of L2; CUDA {torch.version.cuda}, "
        f"driver {_ask('driver_version')}."
    )


def state() -> str:
    """What `nvidia-smi` says of clocks, power, temperature and load at this moment. Nothing is ever set."""
    return f"nvidia-smi says {_STATE.replace(',', ', ')}: {_ask(_STATE)}"


def _ask(what: str) -> str:
    """Of the first device; it is not asked which one CUDA calls by that number."""
    *command, query = _QUERY
    try:
        result = subprocess.run([*command, f"{query}={what}"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown ({type(error).__name__})"
    lines = result.stdout.splitlines()
    return lines[0].strip() if lines else "unknown"
