"""`moeserve pull` and `moeserve verify`: fetch a model of the hub, compare a model folder with its record."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from launcher.console import shown_progress
from moeserve.model.cache import MANIFEST_NAME, record, verify
from moeserve.model.source import check_folder, pull_model


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


@click.command(name="verify")
@click.argument("folder", metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--record", "records", is_flag=True, help=f"Write the hashes of the files as they are ({MANIFEST_NAME}).")
def verify_command(folder: Path, records: bool) -> None:
    """Compare every file of the folder MODEL with the hash (sha256) in its manifest.

    A folder with a recorded manifest is verified whenever it is served, too. Exit code 1 if it differs or cannot be
    served.
    """
    with shown_progress() as progress:
        check_folder(folder)
        manifest = record(folder, progress) if records else verify(folder, thorough=True, progress=progress)
    count = len(manifest.files)
    said = "is recorded" if records else "is what its manifest says"
    click.echo(f"{folder} {said}: {count} file{'' if count == 1 else 's'}.")
