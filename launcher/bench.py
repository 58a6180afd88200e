"""The `moeserve bench` group."""

from __future__ import annotations

import click

from launcher.cli import LazyGroup

_COMMANDS = {
    "serve": ("moeserve.bench.serve:command", "Measure OpenAI-compatible servers under load, side by side."),
    "experts": (
        "moeserve.bench.experts.command:command",
        "Measure what the experts' machinery saves, against its targets.",
    ),
    "recording": ("moeserve.bench.recording:command", "Measure what gathering routing costs a step."),
    "decode": ("moeserve.bench.decode:command", "Measure whole decode steps on a GPU, with random weights."),
    "kernels": ("moeserve.bench.kernels:command", "Check and measure the GPU kernels."),
}


@click.group(cls=LazyGroup, entries=_COMMANDS)
def bench() -> None:
    """Measure a running server, what surrounds the experts, or the GPU kernels."""
