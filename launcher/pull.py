"""`moeserve pull`: fetch a model of the hub before it is served, and compare it with the hub's checksums."""

from __future__ import annotations

import sys

import click
from rich.console import Console

from launcher.console import ProgressDisplay
from moeserve.model.source import pull_model
from moeserve.model.spec import ModelError


@click.command()
@click.argument("model", metavar="OWNER/NAME[:KIND|:FILE]")
@click.option("--revision", help="Branch, tag or commit.")
def pull(model: str, revision: str | None) -> None:
    """Fetch a model of the hub into the hub library's cache and print where it is.

    Of a repository of GGUF files name a kind (owner/name:Q4_K_M) or a file (owner/name:model-Q4_K_M.gguf). A download
    that broke off is resumed. Every file is compared with the hub's checksum; damaged files are removed.
    """
    progress = ProgressDisplay(Console(stderr=True, soft_wrap=True))
    try:
        place = pull_model(model, revision=revision, progress=progress.update)
    except ModelError as error:
        progress.close()
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        progress.close()
        click.echo("Stopped: the next pull resumes it.", err=True)
        sys.exit(130)
    progress.close()
    click.echo(str(place))
