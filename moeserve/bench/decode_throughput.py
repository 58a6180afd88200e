"""Tokens per second of whole decode steps on a GPU, with random weights, beside what its bandwidth allows.

`python -m moeserve.bench.decode_throughput` runs the shape of Qwen3-30B-A3B in bf16; `moeserve bench decode` is the
same. Sizes are arguments, so that small ones run in Triton's interpreter (--interpret), where times mean nothing and
none are printed.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

NO_GPU = "There is no CUDA device to measure on; --interpret runs the steps in Triton's interpreter."
QWEN3_30B = {
    "layers": 48,
    "hidden": 2048,
    "heads": 32,
    "kv_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "expert_width": 768,
    "top_k": 8,
    "vocab": 151936,
}


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, or 2 where there is nothing to measure on."""
    options = _parser().parse_args(arguments)
    if options.interpret:
        # Triton reads it when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        from kernels.gpu.interpreter import mend_interpreter

        mend_interpreter()
    import torch

    if options.interpret:
        _interpret(options)
        return 0
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    name = torch.cuda.get_device_name(device)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    path = options.out_dir / f"decode-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    with path.open("w") as file:
        for line in _report(options, device, name):
            # Line by line: what was measured is kept if time runs out.
            print(line, flush=True)
            print(line, file=file, flush=True)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="moeserve bench decode", description="Measure whole decode steps.")
    parser.add_argument("--interpret", action="store_true", help="in Triton's interpreter on a CPU; prints no times")
    parser.add_argument("--out-dir", type=Path, default=Path("docs/benchmarks"), help="where the table is written")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256], help="requests that decode at once")
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each request's prompt")
    parser.add_argument("--steps", type=int, default=64, help="timed decode steps")
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds after which no batch size begins")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--max-batched-tokens", type=int, default=4096)
    for name, size in QWEN3_30B.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    return parser


def _interpret(options: argparse.Namespace) -> None:
    import torch

    from moeserve.bench.decode_steps import Limits, Load, measure

    loads = [Load(batch, options.prompt, options.steps) for batch in options.batch]
    limits = Limits(options.block_size, options.max_batched_tokens)
    for load, _, result in measure(_sizes(options), loads, limits, torch.device("cpu")):
        print(f"{load.batch} x {load.prompt}: {result.tokens} tokens in {load.steps} steps")


def _sizes(options: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(options, name) for name in QWEN3_30B}


def _report(options: argparse.Namespace, device: torch.device, name: str) -> Iterator[str]:
    import torch
    import triton

    from moeserve.bench.decode_bound import bound_tokens_per_second, decode_bytes
    from moeserve.bench.decode_steps import Limits, Load, measure
    from moeserve.bench.kernel_timing import Deadline, measure_ceilings

    deadline = Deadline(options.time_limit)
    copy = measure_ceilings(device).copy
    torch.cuda.empty_cache()
    sizes = _sizes(options)
    yield f"# Decode steps on {name}\n"
    yield f"{date.today()}, torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}."
    yield f"Random weights in bf16, {', '.join(f'{key} {size}' for key, size in sizes.items())}."
    yield f"A copy moves {copy / 1e12:.2f} TB/s; the bound is what a step reads at that rate, if routing is even.\n"
    yield "| batch | context | tokens/s | ms per step | bound, tokens/s | of it |"
    yield "|---|---|---|---|---|---|"
    loads = [Load(batch, options.prompt, options.steps) for batch in options.batch]
    limits = Limits(options.block_size, options.max_batched_tokens)
    results = measure(sizes, loads, limits, device)
    for load in loads:
        if deadline.passed():
            yield f"| {load.batch} | not measured: {options.time_limit:.0f} s were used up | | | | |"
            continue
        _, spec, result = next(results)
        rate = result.tokens / result.seconds
        bound = bound_tokens_per_second(decode_bytes(spec, load.batch, result.context, 2), load.batch, copy)
        yield (
            f"| {load.batch} | {result.context} | {rate:.0f} | {1e3 * load.batch / rate:.2f} "
            f"| {bound:.0f} | {rate / bound:.0%} |"
        )


if __name__ == "__main__":
    sys.exit(main())
