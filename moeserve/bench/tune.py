"""`moeserve tune`."""

from __future__ import annotations

import sys

import click


@click.command(
    "tune", context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def tune(arguments: tuple[str, ...]) -> None:
    """Measure the kernels of a model's attention and experts on this GPU."""
    from moeserve.bench.tune_kernels import main

    sys.exit(main(list(arguments)))
