"""Measures the kernels of a model's attention and experts on this GPU and writes what was fastest.

`python -m moeserve.bench.tune_kernels MODEL` is `moeserve tune MODEL` for a machine without the command's libraries;
MODEL has to be a folder there.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

from kernels.gpu.moe_config import TUNED_NUM_TOKENS, MoeShape, WeightFormat
from moeserve.models.errors import ModelError
from moeserve.models.spec import DecoderSpec

BLOCK_SIZE, GROUP_SIZE = 16, 128
# As `moeserve serve` calls them; what they stand for is `moeserve.cuda.attention_kernels.kv_dtype_of`.
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
Sizes = tuple[int, int, int, int]
_SHAPE = re.compile(r"(\d+),(\d+),(\d+),(\d+)")


class TuneError(Exception):
    """Nothing can be tuned, or not be kept. The message is one sentence for the user."""


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 1 with a sentence on stderr."""
    parser = argparse.ArgumentParser(prog="moeserve tune", description="Measure the GPU kernels of a model.")
    parser.add_argument("model", nargs="?", help="a folder with a config.json")
    parser.add_argument("--shape", type=parse_sizes, metavar="E,N,K,TOP_K", help="experts instead of a model")
    parser.add_argument("--weights", choices=get_args(WeightFormat), default="bfloat16")
    parser.add_argument("--group-size", type=int, default=GROUP_SIZE)
    parser.add_argument("--block-size", type=int, default=BLOCK_SIZE)
    parser.add_argument("--kv-cache-dtype", choices=KV_CACHE_DTYPES, default=KV_CACHE_DTYPES[0])
    parser.add_argument("--out", type=Path, help="file for the experts")
    options = parser.parse_args(arguments)
    if (options.model is None) == (options.shape is None):
        parser.error("give either a model or --shape")
    try:
        tune(
            options.model,
            options.shape,
            options.weights,
            options.group_size,
            options.block_size,
            options.kv_cache_dtype,
            options.out,
        )
    except TuneError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def parse_sizes(text: str) -> Sizes:
    """Experts, their width, the hidden size, experts per token. Raises ValueError."""
    match = _SHAPE.fullmatch(text.replace(" ", ""))
    if match is None or any(int(size) < 1 for size in match.groups()):
        raise ValueError(f"{text!r} is not like 128,768,2048,8")
    experts, width, hidden, top_k = (int(size) for size in match.groups())
    if top_k > experts:
        raise ValueError(f"{experts} experts have no {top_k} best")
    return experts, width, hidden, top_k


def tune(
    model: str | None,
    sizes: Sizes | None,
    weights: WeightFormat,
    group_size: int,
    block_size: int,
    kv_cache_dtype: str,
    out: Path | None,
) -> None:
    """Tunes the attention and experts of `model`, or experts of `sizes`. Prints what it does. Raises TuneError.

    kv_cache_dtype: one of `KV_CACHE_DTYPES`.
    """
    import torch

    if not torch.cuda.is_available():
        raise TuneError("There is no CUDA GPU here to measure on.")
    spec = None if model is None else _spec_of(model)
    if spec is not None and spec.moe is not None:
        sizes = spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size, spec.moe.gate.top_k
    group = group_size if weights == "int4" else 0
    if group and sizes is not None and any(size % group for size in sizes[1:3]):
        raise TuneError(f"Groups of {group} do not divide {sizes[2]} and {sizes[1]}.")
    if spec is not None:
        if block_size & (block_size - 1):
            raise TuneError(f"The block size {block_size} is not a power of two.")
        _tune_attention(spec, block_size, weights, kv_cache_dtype)
    if sizes is not None:
        experts, width, hidden, top_k = sizes
        _tune_experts(MoeShape(experts, width, hidden, top_k, weights, group), out)


def _spec_of(model: str) -> DecoderSpec:
    from moeserve.models.families import build_spec
    from moeserve.models.hf_config import load_config

    try:
        return build_spec(load_config(_folder_of(model)))
    except ModelError as error:
        raise TuneError(str(error)) from error


def _folder_of(model: str) -> Path:
    """Only config.json is read of it, so a folder need not hold more."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        from moeserve.models.source import resolve_model
    except ImportError as error:
        raise TuneError(f"There is no folder {model}, and finding models by name needs {error.name}.") from error
    return resolve_model(model)


def _tune_attention(spec: DecoderSpec, block_size: int, weights: WeightFormat, kv_cache_dtype: str) -> None:
    """For activations as wide as the weights, and for bfloat16 where weights are quantised."""
    import torch

    from kernels.gpu.attention_tuning import write_attention
    from kernels.gpu.tuning import file_name
    from moeserve.bench.tune_attention import tune_attention
    from moeserve.cuda.attention_kernels import attention_shape, kv_dtype_of
    from moeserve.cuda.expert_kernels import platform_of, tuned_folder

    device = torch.device("cuda")
    dtypes: dict[WeightFormat, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}
    dtype, kv_dtype = dtypes.get(weights, torch.bfloat16), kv_dtype_of(kv_cache_dtype)
    if kv_dtype is not None and dtype == torch.float32:
        raise TuneError(f"Nothing is served in float32 over keys and values in {kv_cache_dtype}.")
    shape, platform = attention_shape(spec, block_size, dtype, kv_dtype), platform_of(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    try:
        found = tune_attention(shape, device, num_sms, report=print)
    except RuntimeError as error:
        raise TuneError(f"Attention cannot be tuned: {error}.") from error
    path = tuned_folder() / file_name(shape, platform)
    with _written(path):
        write_attention(path, shape, platform, found)


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Says what became of a file."""
    try:
        yield
    except OSError as error:
        raise TuneError(f"{path} cannot be written: {error.strerror}.") from error
    print(f"Wrote {path}")


def _tune_experts(shape: MoeShape, out: Path | None) -> None:
    import torch

    from kernels.gpu.tuning import file_name, write_tuned
    from moeserve.bench.tune_moe import tune_shape
    from moeserve.cuda.expert_kernels import platform_of, tuned_folder

    device = torch.device("cuda")
    platform = platform_of(device)
    path = out or tuned_folder() / file_name(shape, platform)
    tuned = tune_shape(shape, TUNED_NUM_TOKENS, device, report=print)
    with _written(path):
        write_tuned(
            path,
            shape,
            platform,
            {tokens: entry.config for tokens, entry in tuned.items()},
            {tokens: entry.microseconds for tokens, entry in tuned.items()},
        )


if __name__ == "__main__":
    sys.exit(main())
