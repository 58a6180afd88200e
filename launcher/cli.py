"""The `moeserve` command."""

from __future__ import annotations

import sys

import click

from launcher.lazy_group import LazyGroup
from moeserve.version import VERSION

_COMMANDS = {
    "serve": ("launcher.serve:serve", "Serve a model over HTTP until stopped."),
    "chat": ("launcher.chat:chat", "Talk to a running server from the terminal."),
    "bench": ("launcher.cli:bench", "Measure OpenAI-compatible servers under load."),
    "tune": ("launcher.cli:tune", "Measure the kernels of a model's experts on this GPU."),
    "curve-key": ("launcher.curve_key:curve_key", "Make the key that several nodes of one service share."),
    "experts": ("launcher.experts:experts", "Record, draw and replay where tokens meet their experts."),
    "demo": ("launcher.demo:demo", "Build variants of the demo model."),
    "version": ("launcher.version:version", "Print the versions of moeserve and of what it runs on."),
}


@click.group(
    cls=LazyGroup,
    entries=_COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(VERSION, "-V", "--version", message="moeserve %(version)s")
def main() -> None:
    """Inference service for mixture-of-experts language models."""


@click.group(
    cls=LazyGroup,
    entries={"serve": ("moeserve.bench.serve:command", "Measure OpenAI-compatible servers under load, side by side.")},
)
def bench() -> None:
    """Measure OpenAI-compatible servers under load."""


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": []})
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(arguments: tuple[str, ...]) -> None:
    """Leave all arguments, --help included, to a command line that also runs where click is not installed."""
    from moeserve.tune.__main__ import main as run

    sys.exit(run(list(arguments)))


if __name__ == "__main__":
    main(prog_name="moeserve")
