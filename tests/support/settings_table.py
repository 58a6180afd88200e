"""Prints the tables of settings in docs/configuration.md: `python -m tests.support.settings_table`."""

from __future__ import annotations

import sys
from dataclasses import Field, fields
from itertools import groupby
from typing import Any

from moeserve.config import ServeConfig, environment_name, flag_name
from moeserve.settings.quantities import exact_size, parse_size


def settings_table() -> str:
    """Return one Markdown table per heading, in the order of the fields."""
    tables = []
    for heading, group in groupby(fields(ServeConfig), key=lambda setting: str(setting.metadata["group"])):
        rows = "\n".join(_row(setting) for setting in group)
        tables.append(f"## {heading}\n\n| flag | environment | default | meaning |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(tables)


def _row(setting: Field[Any]) -> str:
    metadata = setting.metadata
    flag = "MODEL" if setting.name == "model" else flag_name(setting)
    if isinstance(setting.default, bool):
        flag, default = f"{flag}` `--no-{flag[2:]}", "on" if setting.default else "off"
    else:
        is_size = setting.default and metadata.get("parse") is parse_size
        shown = exact_size(getattr(ServeConfig, setting.name)) if is_size else setting.default
        default = "" if setting.default in (None, ()) else f"`{shown}`"
        default += f", `{metadata['on_gpu']}` on a GPU" if "on_gpu" in metadata else ""
    meaning = str(metadata["help"])
    if "choices" in metadata:
        meaning += " One of " + ", ".join(f"`{choice}`" for choice in metadata["choices"]) + "."
    if metadata.get("multiple"):
        meaning += " Several allowed."
    return f"| `{flag}` | `{environment_name(setting)}` | {default} | {meaning} |"


if __name__ == "__main__":
    sys.stdout.write(settings_table())
