"""The `moeserve` command. Sub-commands are imported when they are called, so that `--help` costs nothing."""

from __future__ import annotations

from importlib import import_module

import click

# name: (module:attribute, line in the list of commands)
_COMMANDS = {
    "serve": ("launcher.serve:serve", "Serve a model over HTTP until stopped."),
    "chat": ("launcher.chat:chat", "Talk to a running server from the terminal."),
    "bench": ("moeserve.bench.cli:bench", "Measure a running server."),
    "curve-key": ("launcher.curve_key:curve_key", "Make the key that several nodes of one service share."),
    "version": ("launcher.version:version", "Print the versions of moeserve and of what it runs on."),
}


class LazyGroup(click.Group):
    """A group that knows its commands by name and imports one only to run it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
def main() -> None:
    """Inference service for mixture-of-experts language models."""


if __name__ == "__main__":
    main(prog_name="moeserve")
