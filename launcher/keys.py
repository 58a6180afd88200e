"""`moeserve key new`: lines for the key file."""

from __future__ import annotations

import sys
from typing import Any

import click

from moeserve.config import ConfigError
from moeserve.frontend.key_file import ROLES, USER, new_line


@click.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--role", type=click.Choice(ROLES), default=USER, show_default=True, help="What the key opens.")
@click.option("--weight", help="Part among the keys that have requests; 1 unless given.")
@click.option("--tokens", help="Tokens of prompts and answers in a day, like 5M/day.")
@click.option("--requests", help="Requests that may begin in a minute, like 60/min.")
def new(names: tuple[str, ...], role: str, **words: Any) -> None:
    """Print a line with a new key for each NAME: `moeserve key new alice bob >> keys`.

    A running service reads the file again by itself. A key is in its line alone: give it to its owner from there.
    """
    given = [(word, value) for word, value in words.items() if value is not None]
    try:
        lines = [new_line(name, role, given) for name in names]
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    click.echo("\n".join(lines))
