"""`moeserve tune`: measures the kernels of a model's attention and experts on this GPU and writes what was fastest."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import click

from kernels.gpu.moe_config import TUNED_NUM_TOKENS, MoeShape, WeightFormat
from moeserve.models.errors import ModelError
from moeserve.models.spec import DecoderSpec

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
@click.option(
    "--block-size", type=click.IntRange(min=1), default=16, help="Tokens per KV block, for a MODEL's attention."
)
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="File for the experts.  [default: in the cache]"
)
def tune(
    model: str | None,
    sizes: tuple[int, int, int, int] | None,
    weights: WeightFormat,
    group_size: int,
    block_size: int,
    out: Path | None,
) -> None:
    """Measure the kernels of MODEL's attention and experts on this GPU and keep the fastest configurations for serving.

    MODEL is a folder or a model of the hub, which is downloaded if it is not here.
    """
    if (model is None) == (sizes is None):
        raise click.UsageError("Give either a MODEL or --shape.")
    import torch

    if not torch.cuda.is_available():
        raise click.ClickException("There is no CUDA GPU here to measure on.")
    spec = None if model is None else _spec_of(model)
    if spec is not None and spec.moe is not None:
        sizes = spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size, spec.moe.gate.top_k
    group = group_size if weights == "int4" else 0
    if group and sizes is not None and any(size % group for size in sizes[1:3]):
        raise click.ClickException(f"Groups of {group} do not divide {sizes[2]} and {sizes[1]}.")
    if spec is not None:
        _tune_attention(spec, block_size, weights)
    if sizes is not None:
        experts, width, hidden, top_k = sizes
        _tune_experts(MoeShape(experts, width, hidden, top_k, weights, group), out)


def _spec_of(model: str) -> DecoderSpec:
    from moeserve.models.families import build_spec
    from moeserve.models.hf_config import load_config
    from moeserve.models.source import resolve_model

    try:
        return build_spec(load_config(resolve_model(model)))
    except ModelError as error:
        raise click.ClickException(str(error)) from error


def _tune_attention(spec: DecoderSpec, block_size: int, weights: WeightFormat) -> None:
    """For activations as wide as the weights, and for bfloat16 where weights are quantised."""
    import torch

    from kernels.gpu.attention_tuning import write_attention
    from kernels.gpu.tuning import file_name
    from moeserve.bench.tune_attention import tune_attention
    from moeserve.cuda.attention_kernels import attention_shape
    from moeserve.cuda.expert_kernels import platform_of, tuned_folder

    if block_size & (block_size - 1):
        raise click.ClickException(f"The block size {block_size} is not a power of two.")
    device = torch.device("cuda")
    dtypes = {"float32": torch.float32, "float16": torch.float16}
    shape, platform = attention_shape(spec, block_size, dtypes.get(weights, torch.bfloat16)), platform_of(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    found = tune_attention(shape, device, num_sms, report=click.echo)
    path = tuned_folder() / file_name(shape, platform)
    with _written(path):
        write_attention(path, shape, platform, found)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Says what became of a file."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"{path} cannot be written: {error.strerror}.") from error
    click.echo(f"Wrote {path}")


def _tune_experts(shape: MoeShape, out: Path | None) -> None:
    import torch

    from kernels.gpu.tuning import file_name, write_tuned
    from moeserve.bench.tune_moe import tune_shape
    from moeserve.cuda.expert_kernels import platform_of, tuned_folder

    device = torch.device("cuda")
    platform = platform_of(device)
    path = out or tuned_folder() / file_name(shape, platform)
    tuned = tune_shape(shape, TUNED_NUM_TOKENS, device, report=click.echo)
    with _written(path):
        write_tuned(
            path,
            shape,
            platform,
            {tokens: entry.config for tokens, entry in tuned.items()},
            {tokens: entry.microseconds for tokens, entry in tuned.items()},
        )
