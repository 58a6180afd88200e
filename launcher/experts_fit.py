"""`moeserve experts fit`: learns what later gates will choose from what earlier ones see."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console


@click.command()
@click.argument("model", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option(
    "--text",
    "texts",
    multiple=True,
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="What the model will read, in UTF-8; may be given several times. Half of Python's documentation otherwise.",
)
@click.option("--max-tokens", type=click.IntRange(256), default=8192, show_default=True, help="To learn from.")
def fit(model: Path, texts: tuple[Path, ...], max_tokens: int) -> None:
    """Fit gates to the MODEL in a folder, for --expert-prefetch: the model reads text, with all experts in memory.

    For one to three layers ahead a linear map is fitted from what a gate sees, and from the state after its layer, to
    what the later gate said. It costs no more than that gate, and recalls more of what it will choose. The maps are
    kept in the cache, where --expert-prefetch finds them.
    """
    from moeserve.expert_service.fitted_gates import keep_fitted_gates
    from moeserve.expert_service.gate_fitting import TextReader, fit_gates, pieces
    from moeserve.expert_service.texts import half_of_topics
    from moeserve.models.errors import ModelError

    contents = [_read(path) for path in texts] or half_of_topics(0)
    try:
        reader = TextReader(model)
    except ModelError as error:
        raise click.ClickException(str(error)) from None
    if not reader.num_gates:
        raise click.ClickException(f"The model in {model} has no experts.")
    read = list(pieces(reader, contents, max_tokens))
    if not read:
        raise click.ClickException("There is no text to learn from.")
    with Console(stderr=True).status("reading"):
        fitted = fit_gates(reader, read)
    click.echo(f"{keep_fitted_gates(model, fitted)}: fitted to {fitted.num_tokens} tokens")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise click.ClickException(f"{path} is no text in UTF-8.") from None
