"""`moeserve bench quality`: the perplexity of a model on a fixed English text for each form of its weights on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import exp
from pathlib import Path

import click
import torch

from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.experts.fit import TextReader, half_of_topics, pieces
from moeserve.engine.memory_plan import rounding_of
from moeserve.model.checkpoint import read_index
from moeserve.model.expert_store import layouts_in_store
from moeserve.model.families import build_spec, load_config
from moeserve.model.rounding import Rounding
from moeserve.model.source import resolve_model
from moeserve.model.spec import ModelError


@dataclass(frozen=True, slots=True)
class Form:
    """A form of weights, rows, keys and values, in the words of the flags of `moeserve serve`."""

    quantization: str = "none"
    arithmetic: str = "exact"
    kv_dtype: str = "float32"
    dtype: str = "float32"


# The others are compared with the first.
FORMS = (
    Form(),
    Form(kv_dtype="bfloat16"),
    Form(kv_dtype="int8"),
    Form(kv_dtype="bfloat16", dtype="bfloat16"),
    Form("int8", "int8"),
    Form("int8", "int8", "bfloat16"),
    Form("int8"),
    Form("experts=int4", "int8", "bfloat16"),
    Form("int4", "int8", "bfloat16"),
    Form("int4"),
    Form("int4", "int8", "int8"),
)
# The same of a quantised model, whose weights stay as they are: (arithmetic, dtype of keys and values).
_STORED_FORMS = (("exact", "float32"), ("auto", "bfloat16"))


@dataclass(frozen=True, slots=True)
class Quality:
    """The perplexity of one form. num_tokens: the tokens that were foretold."""

    form: str
    perplexity: float
    num_tokens: int


def measure(folder: Path, max_tokens: int, forms: Sequence[Form] = FORMS) -> Iterator[Quality]:
    """Yield the quality of each form on the beginnings of every other topic of Python's documentation.

    One form is in memory at a time. Raise ModelError, also for experts that cannot be quantised.
    """
    for form in forms:
        rounding = replace(Rounding.named(form.quantization, form.arithmetic), narrow=form.dtype == "bfloat16")
        if rounding.experts is not None:
            layouts_in_store(folder, build_spec(load_config(folder)), torch.float32, rounding)
        name = "as in the checkpoint" if rounding.is_none else f"{rounding.name}, activations {rounding.arithmetic}"
        name += ", activations bfloat16" if rounding.narrow else ""
        yield _measure_form(folder, name, rounding, form.kv_dtype, max_tokens)


def measure_stored(model: str, folder: Path, max_tokens: int) -> Iterator[Quality]:
    """Yield the quality of a model whose weights stay in the bits of their file, in exact and in default arithmetic.

    model: its name. Raise ModelError, and ConfigError for weights that are not quantised.
    """
    spec, index = build_spec(load_config(folder)), read_index(folder)
    for arithmetic, kv_dtype in _STORED_FORMS:
        rounding = rounding_of(ServeConfig(arithmetic=arithmetic), spec, index)
        if rounding.is_none:
            raise ConfigError(
                f"{model} has no quantised weights: name it first, and files to compare with it after it."
            )
        computed = "int8" if rounding.rounds_rows else "exact"
        yield _measure_form(folder, f"{model}: {rounding.name}, activations {computed}", rounding, kv_dtype, max_tokens)


def _measure_form(folder: Path, name: str, rounding: Rounding, kv_dtype: str, max_tokens: int) -> Quality:
    reader = TextReader(folder, rounding, getattr(torch, kv_dtype))
    total, count = 0.0, 0
    for token_ids in pieces(reader, half_of_topics(1), max_tokens):
        total += reader.read(token_ids).log_likelihood
        count += len(token_ids) - 1
    name += "" if kv_dtype == "float32" else f", keys and values {kv_dtype}"
    return Quality(name, exp(-total / count), count)


@click.command(name="quality")
@click.argument("model", required=False)
@click.argument("files", nargs=-1)
@click.option("--tokens", default=8192, show_default=True, type=click.IntRange(min=1024), help="Tokens to read.")
def command(model: str | None, files: tuple[str, ...], tokens: int) -> None:
    """Compare the perplexity of MODEL, a folder or hub id, with weights of fewer bits; the demo when left out.

    With FILES, quantised models like GGUF files, MODEL as it is is compared with them as they are.
    """
    try:
        folder, *others = (_resolve(name) for name in (model, *files))
        measured: Iterator[Quality] = measure(folder, tokens, FORMS[:1] if files else FORMS)
        of_files = (measure_stored(Path(name).name, other, tokens) for name, other in zip(files, others, strict=True))
        plain = None
        for quality in chain(measured, *of_files):
            if plain is None:
                plain = quality.perplexity
                click.echo(f"{quality.num_tokens} tokens of Python's documentation\n")
                click.echo("| weights | perplexity | |\n|---|---|---|")
            change = quality.perplexity / plain - 1
            click.echo(f"| {quality.form} | {quality.perplexity:.3f} | {change:+.2%} |")
    except (ModelError, ConfigError) as error:
        raise click.ClickException(str(error)) from error


def _resolve(model: str | None) -> Path:
    return Path(resolve_model(model, revision=None, offline=False, progress=lambda *_: None))
