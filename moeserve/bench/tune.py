"""`moeserve tune`: measures the kernels of a model's experts on this GPU and writes what was fastest."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import click

from kernels.gpu.moe_config import TUNED_NUM_TOKENS, MoeShape, WeightFormat
from moeserve.models.errors import ModelError

_SHAPE = re.compile(r"(\d+),(\d+),(\d+),(\d+)")


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, int, int, int] | None:
    if value is None:
        return None
    match = _SHAPE.fullmatch(value.replace(" ", ""))
    if match is None or any(int(size) < 1 for size in match.groups()):
        raise click.BadParameter(f"{value!r} is not like 128,768,2048,8", ctx, param)
    experts, width, hidden, top_k = (int(size) for size in match.groups())
    if top_k > experts:
        raise click.BadParameter(f"{experts} experts have no {top_k} best", ctx, param)
    return experts, width, hidden, top_k


@click.command("tune", context_settings={"show_default": True})
@click.argument("model", required=False)
@click.option(
    "--shape",
    "sizes",
    callback=_sizes,
    metavar="E,N,K,TOP_K",
    help="Instead of a model: experts, their width, the hidden size, experts per token.",
)
@click.option(
    "--weights", type=click.Choice(get_args(WeightFormat)), default="bfloat16", help="How weights are stored."
)
@click.option("--group-size", type=click.IntRange(min=32), default=128, help="Values that share a scale, for int4.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="File to write.  [default: in the cache]")
def tune(
    model: str | None,
    sizes: tuple[int, int, int, int] | None,
    weights: WeightFormat,
    group_size: int,
    out: Path | None,
) -> None:
    """Measure the kernels of MODEL's experts on this GPU and keep the fastest configurations for serving.

    MODEL is a folder or a model of the hub, which is downloaded if it is not here.
    """
    if (model is None) == (sizes is None):
        raise click.UsageError("Give either a MODEL or --shape.")
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("There is no CUDA GPU here to measure on.")
    experts, width, hidden, top_k = sizes or _sizes_of(model or "")
    group = group_size if weights == "int4" else 0
    if group and (hidden % group or width % group):
        raise click.ClickException(f"Groups of {group} do not divide {hidden} and {width}.")
    _tune(MoeShape(experts, width, hidden, top_k, weights, group), out)


def _sizes_of(model: str) -> tuple[int, int, int, int]:
    from moeserve.models.families import build_spec
    from moeserve.models.hf_config import load_config
    from moeserve.models.source import resolve_model

    try:
        spec = build_spec(load_config(resolve_model(model)))
    except ModelError as error:
        raise click.ClickException(str(error)) from error
    if spec.moe is None:
        raise click.ClickException(f"{model} has no experts.")
    return spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size, spec.moe.gate.top_k


def _tune(shape: MoeShape, out: Path | None) -> None:
    import torch

    from kernels.gpu.tuning import file_name, write_tuned
    from moeserve.bench.tune_moe import tune_shape
    from moeserve.cuda.expert_kernels import platform_of, tuned_folder

    device = torch.device("cuda")
    platform = platform_of(device)
    path = out or tuned_folder() / file_name(shape, platform)
    tuned = tune_shape(shape, TUNED_NUM_TOKENS, device, report=click.echo)
    try:
        write_tuned(
            path,
            shape,
            platform,
            {tokens: entry.config for tokens, entry in tuned.items()},
            {tokens: entry.microseconds for tokens, entry in tuned.items()},
        )
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}.") from error
    click.echo(f"Wrote {path}")
