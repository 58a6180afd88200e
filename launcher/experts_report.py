"""`moeserve experts report`: pictures of a statistics file or a routing trace."""

from __future__ import annotations

from pathlib import Path

import click

from moeserve.report.source import ReportError, read_report_source


@click.command()
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path(),
    help="Folder for the pictures; the working directory unless given.",
)
def report(file: Path, out: Path) -> None:
    """Draw FILE, which --expert-statistics or a trace wrote, as PNG.

    experts-load.png is a heat map of layers and experts, experts-affinity.png shows which expert follows which,
    experts-balance.png how evenly load lies on experts and on ranks.
    """
    try:
        from moeserve.report.pictures import draw_report
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "matplotlib":
            raise
        raise click.ClickException(
            "Pictures need matplotlib, which is not installed: pip install 'moeserve[report]'."
        ) from None
    try:
        statistics = read_report_source(file)
    except ReportError as error:
        raise click.ClickException(str(error)) from None
    try:
        out.mkdir(parents=True, exist_ok=True)
        paths = draw_report(statistics, out)
    except OSError as error:
        raise click.ClickException(f"{error.filename or out} cannot be written ({error.strerror or error}).") from None
    for path in paths:
        click.echo(str(path))
