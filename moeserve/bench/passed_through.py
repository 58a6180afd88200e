"""Commands that leave their arguments to a module which runs on machines without click as well."""

from __future__ import annotations

import importlib
import sys

import click


def passed_through(name: str, module: str) -> click.Command:
    """`moeserve ... NAME ARGUMENTS` is `main(ARGUMENTS)` of the module, --help included; it gives the exit code."""

    def run(arguments: tuple[str, ...]) -> None:
        sys.exit(importlib.import_module(module).main(list(arguments)))

    return click.Command(
        name,
        callback=run,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        add_help_option=False,
    )
