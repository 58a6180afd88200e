"""`moeserve bench decode`."""

from __future__ import annotations

import sys

import click


@click.command(
    name="decode", context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Measure whole decode steps of a random model on a GPU."""
    from moeserve.bench.decode_throughput import main

    sys.exit(main(list(arguments)))
