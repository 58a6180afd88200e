"""`moeserve verify`: compares a model folder with the record of its files."""

from __future__ import annotations

import sys
from pathlib import Path

import click
from rich.console import Console

from launcher.console import ProgressDisplay
from moeserve.model.cache import MANIFEST_NAME, record, verify
from moeserve.model.source import check_folder
from moeserve.model.spec import ModelError


@click.command(name="verify")
@click.argument("folder", metavar="MODEL", type=click.Path(path_type=Path))
@click.option("--record", "records", is_flag=True, help=f"Write the hashes of the files as they are ({MANIFEST_NAME}).")
def verify_command(folder: Path, records: bool) -> None:
    """Compare every file of the folder MODEL with the hash (sha256) in its manifest.

    A folder with a recorded manifest is verified whenever it is served, too. Exit code 1 if it differs or cannot be
    served.
    """
    progress = ProgressDisplay(Console(stderr=True, soft_wrap=True))
    try:
        check_folder(folder)
        if records:
            count = len(record(folder, progress.update).files)
        else:
            count = len(verify(folder, thorough=True, progress=progress.update).files)
    except ModelError as error:
        progress.close()
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
    progress.close()
    said = "is recorded" if records else "is what its manifest says"
    click.echo(f"{folder} {said}: {count} file{'' if count == 1 else 's'}.")
