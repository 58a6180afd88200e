"""`moeserve demo build`: the demo model with other numbers of experts."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from launcher.console import ProgressDisplay
from moeserve.models.errors import ModelError


@click.command()
@click.option("--experts", type=click.IntRange(min=1), default=8, show_default=True, help="Experts per layer.")
@click.option("--top-k", type=click.IntRange(min=1), default=2, show_default=True, help="Experts a token chooses.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder; the cache unless given.")
def build(experts: int, top_k: int, out: Path | None) -> None:
    """Build the demo model with other numbers of experts and print its folder.

    Experts come in tied groups, of which a token chooses one: the model computes what the dense one does.
    """
    from moeserve.models.demo.cache import ensure_demo

    progress = ProgressDisplay(Console(stderr=True, soft_wrap=True))
    try:
        folder = ensure_demo(experts=experts, top_k=top_k, out=out, progress=progress.update)
    except ModelError as error:
        progress.close()
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    progress.close()
    click.echo(str(folder))
