"""`moeserve pull`: fetch a model of the hub before it is served, and compare it with the hub's checksums."""

from __future__ import annotations

import sys

import click

from launcher.console import shown_progress
from moeserve.model.source import pull_model


@click.command()
@click.argument("model", metavar="OWNER/NAME[:KIND|:FILE]")
@click.option("--revision", help="Branch, tag or commit.")
def pull(model: str, revision: str | None) -> None:
    """Fetch a model of the hub into the hub library's cache and print where it is.

    Of a repository of GGUF files name a kind (owner/name:Q4_K_M) or a file (owner/name:model-Q4_K_M.gguf). A download
    that broke off is resumed. Every file is compared with the hub's checksum; damaged files are removed.
    """
    try:
        with shown_progress() as progress:
            place = pull_model(model, revision=revision, progress=progress)
    except KeyboardInterrupt:
        click.echo("Stopped: the next pull resumes it.", err=True)
        sys.exit(130)
    click.echo(str(place))
