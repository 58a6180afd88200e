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
@click.option("--split", is_flag=True, help="Experts out of split neurons, which do not come in groups.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Folder; the cache unless given.")
def build(experts: int, top_k: int, split: bool, out: Path | None) -> None:
    """Build the demo model with other numbers of experts and print its folder.

    Experts come in tied groups, of which a token chooses one: the model computes what the dense one does. With --split
    they are parts of the dense model that are chosen one by one, and most of it is left out: such a model is worse
    than the dense one, by how much is measured and printed.
    """
    from moeserve.models.demo.cache import ensure_demo
    from moeserve.models.demo.quality import read_quality

    progress = ProgressDisplay(Console(stderr=True, soft_wrap=True))
    try:
        folder = ensure_demo(experts=experts, top_k=top_k, split=split, out=out, progress=progress.update)
    except ModelError as error:
        progress.close()
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    progress.close()
    click.echo(str(folder))
    if split:
        quality = read_quality(folder)
        click.echo(
            f"perplexity {quality.split:.2f}, of the dense model {quality.dense:.2f} "
            f"({quality.tokens} tokens of {quality.text})"
        )
