"""The `moeserve experts` group."""

from __future__ import annotations

import click

from launcher.lazy_group import LazyGroup

_COMMANDS = {
    "trace": ("launcher.experts_trace:trace", "Record a routing trace of a running server."),
    "simulate": ("moeserve.simulation.command:simulate", "Replay a routing trace through the expert memory."),
    "fit": ("launcher.experts_fit:fit", "Fit gates to a model, to load its experts ahead by."),
    "deepnvme": ("moeserve.expert_service.deepnvme_command:deepnvme", "Compile what reads experts faster."),
    "report": ("launcher.experts_report:report", "Draw load, affinity and balance from a file."),
}


@click.group(cls=LazyGroup, entries=_COMMANDS)
def experts() -> None:
    """Record, draw, replay and foresee where tokens meet their experts."""
