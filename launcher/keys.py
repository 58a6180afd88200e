"""`moeserve key new`: lines for the key file."""

from __future__ import annotations

import sys
from typing import Any

import click

from moeserve.config import ConfigError
from moeserve.frontend.key_file import ROLES, USER, new_line


@click.command()
@click.argument("name")
@click.option("--role", type=click.Choice(ROLES), default=USER, show_default=True, help="What the key opens.")
@click.option("--weight", help="Part among the keys that have requests; 1 unless given.")
@click.option("--tokens", help="Tokens of prompts and answers in a day, like 5M/day.")
@click.option("--requests", help="Requests that may begin in a minute, like 60/min.")
def new(name: str, role: str, **words: Any) -> None:
    """Print the line of a new key for NAME: `moeserve key new alice >> keys`.

    A running service reads the file again by itself. The key is in this line alone: give it to its owner from there.
    """
    try:
        line = new_line(name, role, [(word, value) for word, value in words.items() if value is not None])
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    click.echo(line)
