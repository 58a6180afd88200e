"""`moeserve tune`: time the kernels of a model's attention and experts on this GPU and keep the fastest configurations.

`python -m moeserve.tune MODEL` does the same on a machine without the command's libraries, where MODEL is a folder.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from kernels.gpu.moe_config import TUNED_NUM_TOKENS, MoeShape, WeightFormat
from moeserve.model.spec import DecoderSpec, ModelError

if TYPE_CHECKING:
    from kernels.gpu.attention_config import AnyConfig
    from kernels.gpu.moe_config import MoeConfig

BLOCK_SIZE, GROUP_SIZES = 16, (128, 64, 32)
# The names of `moeserve serve`; `moeserve.model.gpu.kernels.kv_dtype_of` gives their dtypes.
KV_CACHE_DTYPES = ("auto", "fp8_e4m3")
Sizes = tuple[int, int, int, int]
_SHAPE = re.compile(r"(\d+),(\d+),(\d+),(\d+)")


class TuneError(Exception):
    """Nothing can be tuned, or the result cannot be kept. The message is one sentence for the user."""


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, or 1 with a sentence on stderr."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if (options.model is None) == (options.shape is None):
        parser.error("give either a MODEL or --shape")
    try:
        tune(options)
    except TuneError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted: what is written so far serves.", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="moeserve tune",
        description="Measure the kernels of MODEL's attention and experts on this GPU and keep the fastest "
        "configurations for serving. What was found is written as soon as it is.",
    )
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", help="a folder or a model of the hub, downloaded if it is not here"
    )
    parser.add_argument(
        "--shape",
        type=_sizes,
        metavar="E,N,K,TOP_K",
        help="instead of a model: experts, their width, the hidden size, experts per token",
    )
    parser.add_argument(
        "--weights",
        choices=get_args(WeightFormat),
        default="bfloat16",
        help="how the experts' weights are stored (%(default)s)",
    )
    parser.add_argument(
        "--group-size",
        type=int,
        choices=GROUP_SIZES,
        help="values that share a scale, for int4; by itself the first that divides the sizes, as in serving",
    )
    parser.add_argument(
        "--block-size",
        type=_power_of_two,
        default=BLOCK_SIZE,
        help="tokens per KV block, for a MODEL's attention (%(default)s)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=KV_CACHE_DTYPES,
        default=KV_CACHE_DTYPES[0],
        help="how keys and values are stored, for a MODEL's attention; auto: as the activations are (%(default)s)",
    )
    parser.add_argument(
        "--num-tokens",
        type=_numbers,
        metavar="T,...",
        default=TUNED_NUM_TOKENS,
        help=f"for which batches experts are tuned, in this order ({','.join(map(str, TUNED_NUM_TOKENS))})",
    )
    parser.add_argument(
        "--out", type=Path, help="file for the experts; by itself one in the cache, where serving looks"
    )
    return parser


def _sizes(text: str) -> Sizes:
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(number) for number in text.split(","))
    if unknown := set(numbers) - set(TUNED_NUM_TOKENS):
        raise argparse.ArgumentTypeError(f"{min(unknown)} is none of {', '.join(map(str, TUNED_NUM_TOKENS))}")
    return numbers


def _power_of_two(text: str) -> int:
    size = int(text)
    if size < 1 or size & (size - 1):
        raise argparse.ArgumentTypeError(f"{size} is not a power of two")
    return size


def parse_sizes(text: str) -> Sizes:
    """Parse experts, their width, the hidden size and experts per token. Raises ValueError."""
    match = _SHAPE.fullmatch(text.replace(" ", ""))
    if match is None or any(int(size) < 1 for size in match.groups()):
        raise ValueError(f"{text!r} is not like 128,768,2048,8")
    experts, width, hidden, top_k = (int(size) for size in match.groups())
    if top_k > experts:
        raise ValueError(f"{experts} experts have no {top_k} best")
    return experts, width, hidden, top_k


def tune(options: argparse.Namespace) -> None:
    """Tune by the options of `_parser` and print the progress. Raises TuneError."""
    import torch

    if not torch.cuda.is_available():
        raise TuneError("There is no CUDA GPU here to measure on.")
    spec = None if options.model is None else _spec_of(options.model)
    sizes: Sizes | None = options.shape
    if spec is not None and spec.moe is not None:
        sizes = spec.moe.num_experts, spec.moe.intermediate_size, spec.hidden_size, spec.moe.gate.top_k
    shape = None if sizes is None else _moe_shape(sizes, options.weights, options.group_size)
    if spec is not None:
        _tune_attention(spec, options.block_size, options.weights, options.kv_cache_dtype)
    if shape is not None:
        _tune_experts(shape, options.num_tokens, options.out)
    elif spec is not None:
        print(f"A {spec.model_type} model has no experts to tune.")


def _moe_shape(sizes: Sizes, weights: WeightFormat, group_size: int | None) -> MoeShape:
    if weights != "int4":
        return MoeShape(*sizes, weights)
    _, width, hidden, _ = sizes
    groups = GROUP_SIZES if group_size is None else (group_size,)
    group = next((size for size in groups if not (width % size or hidden % size)), None)
    if group is None:
        raise TuneError(f"Groups of {groups[-1]} do not divide {hidden} and {width}.")
    return MoeShape(*sizes, weights, group)


def _spec_of(model: str) -> DecoderSpec:
    from moeserve.model.families import build_spec, load_config

    try:
        return build_spec(load_config(_folder_of(model)))
    except ModelError as error:
        raise TuneError(str(error)) from error


def _folder_of(model: str) -> Path:
    """Return the model's folder. Only its config.json is read, so it need not hold more."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    try:
        from moeserve.model.source import resolve_model
    except ImportError as error:
        raise TuneError(f"There is no folder {model}, and finding models by name needs {error.name}.") from error
    return resolve_model(model)


def _tune_attention(spec: DecoderSpec, block_size: int, weights: WeightFormat, kv_cache_dtype: str) -> None:
    """Tune for activations as wide as the weights, and for bfloat16 where weights are quantised."""
    import torch

    from kernels.gpu.attention_config import write_attention
    from kernels.gpu.moe_config import file_name
    from moeserve.model.gpu.kernels import attention_shape, kv_dtype_of, platform_of, tuned_folder
    from moeserve.tune.attention import tune_attention

    device = torch.device("cuda")
    dtypes: dict[WeightFormat, torch.dtype] = {"float32": torch.float32, "float16": torch.float16}
    dtype, kv_dtype = dtypes.get(weights, torch.bfloat16), kv_dtype_of(kv_cache_dtype)
    if kv_dtype is not None and dtype == torch.float32:
        raise TuneError(f"Nothing is served in float32 over keys and values in {kv_cache_dtype}.")
    shape, platform = attention_shape(spec, block_size, dtype, kv_dtype), platform_of(device)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    path = tuned_folder() / file_name(shape, platform)
    found: dict[str, tuple[AnyConfig, float]] = {}
    with torch.inference_mode(), _explained("Attention", path):
        for kind, config, time in tune_attention(shape, device, num_sms, report=_tell):
            found[kind] = config, time
            write_attention(path, shape, platform, found)
    print(f"Wrote {path}")


@contextlib.contextmanager
def _explained(what: str, path: Path) -> Iterator[None]:
    """Turn errors of measuring and of the file into a sentence."""
    try:
        yield
    except OSError as error:
        raise TuneError(f"{path} cannot be written: {error.strerror}.") from error
    except RuntimeError as error:
        raise TuneError(f"{what} cannot be tuned: {str(error).splitlines()[0]}.") from error


def _tell(line: str) -> None:
    print(line, flush=True)


def _tune_experts(shape: MoeShape, all_num_tokens: tuple[int, ...], out: Path | None) -> None:
    import torch

    from kernels.gpu.moe_config import file_name, write_tuned
    from moeserve.model.gpu.kernels import platform_of, tuned_folder
    from moeserve.tune.experts import tune_shape

    device = torch.device("cuda")
    platform = platform_of(device)
    path = out or tuned_folder() / file_name(shape, platform)
    configs: dict[int, MoeConfig] = {}
    times: dict[int, float] = {}
    with torch.inference_mode(), _explained("Experts", path):
        for num_tokens, tuned in tune_shape(shape, all_num_tokens, device, report=_tell):
            configs[num_tokens], times[num_tokens] = tuned.config, tuned.microseconds
            # Written at once, so that a run which is stopped keeps its results.
            write_tuned(path, shape, platform, configs, times)
    print(f"Wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
