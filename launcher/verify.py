"""`moeserve verify`: compares a model folder with the record of its files."""

from __future__ import annotations

from pathlib import Path

import click

from launcher.console import shown_progress
from moeserve.model.cache import MANIFEST_NAME, record, verify
from moeserve.model.source import check_folder


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
