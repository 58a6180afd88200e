"""`moeserve curve-key`: makes the key that the nodes of one service share."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from moeserve.config import ConfigError
from moeserve.ranks.keys import create_keys


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
def curve_key(file: Path) -> None:
    """Write a new key to FILE, which only its owner may read. Copy it to every node (--curve-key-file)."""
    try:
        create_keys(file)
    except ConfigError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(2)
    click.echo(f"The key is in {file}: copy it to every node by a safe way, and give --curve-key-file there.")
