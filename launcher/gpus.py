"""The NVIDIA GPUs of this machine and their driver, as known without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from itertools import takewhile
from pathlib import Path

_DRIVER = Path("/proc/driver/nvidia")  # not there under WSL2, where the driver is a part of Windows
_PROGRAMS_OF_WSL = "/usr/lib/wsl/lib"
_SMI = ("--query-gpu=driver_version,uuid,name", "--format=csv,noheader")
_SMI_SECONDS = 10.0  # s; a driver that takes longer to name its GPUs is taken for one that hangs, and so for no GPU


def gpu_names() -> list[str]:
    """Return the models of the NVIDIA GPUs that the driver lists and CUDA_VISIBLE_DEVICES does not hide."""
    if (gpus := _DRIVER / "gpus").is_dir():
        found = []
        for information in sorted(gpus.glob("*/information")):
            said = dict(line.partition(":")[::2] for line in information.read_text().splitlines())
            if "Model" in said:
                found.append((said["Model"].strip(), said.get("GPU UUID", "").strip()))
    else:
        found = [(name, uuid) for _, uuid, name in _ask(_find_smi())]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return [name for name, _ in found]
    names = (_visible_name(wanted.strip(), found) for wanted in visible.split(","))
    # As CUDA does, take none behind one that is not there.
    return list(takewhile(bool, names))


def driver_version() -> str:
    """Return the driver's words for its version; empty without a driver."""
    try:
        return (_DRIVER / "version").read_text().splitlines()[0]
    except (OSError, IndexError):
        return next((version for version, _, _ in _ask(_find_smi())), "")


def _visible_name(wanted: str, found: Sequence[tuple[str, str]]) -> str:
    """Return the model of a GPU by its number, the start of its UUID, or the UUID of a part of it, a MIG device; empty
    if it is not there. found: models and UUIDs. CUDA counts the fastest first, which matters where they differ."""
    if wanted.startswith("MIG-"):
        return f"{found[0][0]} MIG" if found else ""
    if wanted.isdecimal():
        return found[int(wanted)][0] if int(wanted) < len(found) else ""
    return next((name for name, uuid in found if wanted and uuid.startswith(wanted)), "")


def _find_smi() -> str | None:
    return shutil.which("nvidia-smi", path=f"{os.environ.get('PATH', os.defpath)}:{_PROGRAMS_OF_WSL}")


@cache  # The supervisor names the GPUs while it serves, and may not wait for a driver then.
def _ask(smi: str | None) -> list[tuple[str, str, str]]:
    """Return driver version, UUID and model of each GPU that nvidia-smi names; none without an answer."""
    if smi is None:
        return []
    try:
        answer = subprocess.run(
            (smi, *_SMI), stdin=subprocess.DEVNULL, capture_output=True, timeout=_SMI_SECONDS, check=True
        ).stdout.decode(errors="replace")
    except (OSError, subprocess.SubprocessError):
        return []
    lines = (line.split(", ", 2) for line in answer.splitlines())
    return [(fields[0], fields[1], fields[2]) for fields in lines if len(fields) == 3]
