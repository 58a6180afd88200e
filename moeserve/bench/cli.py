"""The `moeserve bench` group. A measuring command is imported when it is called."""

from __future__ import annotations

from importlib import import_module

import click

# name: (module whose attribute `command` it is, line in the list of commands)
_COMMANDS = {
    "serve": ("moeserve.bench.serve", "Measure OpenAI-compatible servers under load, side by side."),
    "experts": ("moeserve.bench.experts.command", "Measure what the experts' machinery saves, against its targets."),
    "recording": ("moeserve.bench.recording", "Measure what gathering routing costs a step."),
    "kernels": ("moeserve.bench.kernels", "Check and measure the GPU kernels."),
}


class _BenchGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = import_module(_COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=_BenchGroup)
def bench() -> None:
    """Measure a running server, what surrounds the experts, or the GPU kernels."""
