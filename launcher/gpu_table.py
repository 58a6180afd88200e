"""GPUs that are elsewhere, by what their makers say of them (`gpus.json`)."""

from __future__ import annotations

import json
import re
from pathlib import Path

from moeserve.config import ConfigError
from moeserve.device import incapability
from moeserve.machine import Gpu

_TABLE = Path(__file__).with_name("gpus.json")
_CONTEXT_BYTES = 600 * 2**20  # that CUDA and its libraries take of a GPU before anything is loaded


def parse_gpus(text: str) -> tuple[Gpu, ...]:
    """Return the GPUs of `8xH100-80G` or `L4-24G`. Raise ConfigError, which names those of the table."""
    table = json.loads(_TABLE.read_text())
    found = re.fullmatch(r"(?:(\d{1,4})x)?(.+)", text.strip(), re.IGNORECASE)
    facts = None if found is None else next((table[name] for name in table if name.lower() == found[2].lower()), None)
    if found is None or facts is None or found[1] == "0":
        raise ConfigError(f"--gpus {text} is not NUMBERxNAME, as 8xH100-80G; names are {', '.join(table)}.")
    total = facts["mebibytes"] * 2**20
    gpu = Gpu(
        next(name for name in table if name.lower() == found[2].lower()),
        total,
        total - _CONTEXT_BYTES,
        facts["gigabytes_per_second"] * 1e9,
        incapability(tuple(facts["capability"]), needs_fp8=False),
    )
    return (gpu,) * int(found[1] or 1)
