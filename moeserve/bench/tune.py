"""`moeserve tune`."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import click

from kernels.gpu.moe_config import WeightFormat
from moeserve.bench.tune_kernels import BLOCK_SIZE, GROUP_SIZE, KV_CACHE_DTYPES, Sizes, TuneError, parse_sizes
from moeserve.bench.tune_kernels import tune as tune_kernels


def _sizes(ctx: click.Context, param: click.Parameter, value: str | None) -> Sizes | None:
    try:
        return None if value is None else parse_sizes(value)
    except ValueError as error:
        raise click.BadParameter(str(error), ctx, param) from error


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
@click.option(
    "--group-size", type=click.IntRange(min=32), default=GROUP_SIZE, help="Values that share a scale, for int4."
)
@click.option(
    "--block-size", type=click.IntRange(min=1), default=BLOCK_SIZE, help="Tokens per KV block, for a MODEL's attention."
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(KV_CACHE_DTYPES),
    default=KV_CACHE_DTYPES[0],
    help="How keys and values are stored, for a MODEL's attention; auto: as the activations are.",
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the experts.  [default: in the cache]"
)
def tune(
    model: str | None,
    sizes: Sizes | None,
    weights: WeightFormat,
    group_size: int,
    block_size: int,
    kv_cache_dtype: str,
    out: Path | None,
) -> None:
    """Measure the kernels of MODEL's attention and experts on this GPU and keep the fastest configurations for serving.

    MODEL is a folder or a model of the hub, which is downloaded if it is not here.
    """
    if (model is None) == (sizes is None):
        raise click.UsageError("Give either a MODEL or --shape.")
    try:
        tune_kernels(model, sizes, weights, group_size, block_size, kv_cache_dtype, out)
    except TuneError as error:
        raise click.ClickException(str(error)) from error
