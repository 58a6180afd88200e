"""Tokens per second of whole decode steps on a GPU, with random weights, beside what its bandwidth allows.

`python -m benchmarks.steps` runs the shape of Qwen3-30B-A3B in bf16; `make gpu-decode` runs it within ten minutes.
Sizes are arguments, so that small ones run in Triton's interpreter (--interpret), where times mean nothing and none are
printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from moeserve.model.spec import AttentionSpec, DecoderSpec

if TYPE_CHECKING:
    import torch

    from benchmarks.decode_steps import DecodeBench, Load, Throughput
    from benchmarks.gpu import Deadline
    from moeserve.model.spec import DecoderSpec

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


PROMPT = 1024
FAILED = "FAILED"
# Tokens per second of a batch of one, and parts of the bound of larger ones, with a context of 1024.
TARGET_RATE, TARGET_PART, TARGET_BATCHES = 250, 0.7, (64, 256)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, 1 if a batch fails, 2 if there is nothing to measure on or arguments do not fit."""
    options = _parser().parse_args(arguments)
    if options.interpret:
        # Triton reads it when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        from benchmarks.kernels.interpreter import mend_interpreter

        mend_interpreter()
    import torch

    from benchmarks.decode_steps import DecodeBench, Limits, Load

    if not options.interpret and not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device = torch.device("cpu") if options.interpret else torch.device("cuda", 0)
    sizes = {name: getattr(options, name) for name in QWEN3_30B}
    loads = [Load(batch, options.prompt, options.steps) for batch in options.batch]
    try:
        bench = DecodeBench(sizes, loads, Limits(options.block_size, options.max_batched_tokens), device)
    except ValueError as error:
        print(f"Error: {error}.", file=sys.stderr)
        return 2
    if options.interpret:
        for load in loads:
            result = bench.run(load)
            print(f"{load.batch} x {load.prompt}: {result.tokens} tokens in {load.steps} steps")
        return 0
    return _write(options, bench, loads, sizes, device)


def _write(
    options: argparse.Namespace, bench: DecodeBench, loads: list[Load], sizes: dict[str, int], device: torch.device
) -> int:
    from benchmarks.gpu import Deadline, file_stem, gpu_name

    options.out_dir.mkdir(parents=True, exist_ok=True)
    path = options.out_dir / f"decode-{file_stem(gpu_name(device))}.md"
    deadline, failed = Deadline(options.time_limit), False
    with path.open("w") as file:
        for line in report(bench, loads, sizes, device, deadline):
            # Line by line, so that results are kept if time runs out.
            print(line, flush=True)
            print(line, file=file, flush=True)
            failed |= FAILED in line
    print(f"written to {path}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps", description="Measure whole decode steps.")
    parser.add_argument("--interpret", action="store_true", help="in Triton's interpreter on a CPU; prints no times")
    parser.add_argument("--out-dir", type=Path, default=Path("docs/benchmarks"), help="where the table is written")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 64, 256], help="requests that decode at once")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each request's prompt")
    parser.add_argument("--steps", type=int, default=64, help="timed decode steps")
    parser.add_argument("--time-limit", type=float, default=480.0, help="seconds after which no batch size begins")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--max-batched-tokens", type=int, default=4096)
    for name, size in QWEN3_30B.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    return parser


def report(
    bench: DecodeBench, loads: Sequence[Load], sizes: dict[str, int], device: torch.device, deadline: Deadline
) -> Iterator[str]:
    """Yield the lines of the file as they become known."""
    import torch

    from benchmarks.gpu import gpu_name, gpu_state, hardware, measure_ceilings, versions

    copy = measure_ceilings(device).copy
    torch.cuda.empty_cache()
    yield f"# Decode steps on {gpu_name(device)}\n"
    yield f"{versions()} {hardware(device)}\n"
    yield f"Before, {gpu_state()}.\n"
    yield (
        f"Random weights in bf16, {', '.join(f'{key} {size}' for key, size in sizes.items())}; scheduler and runner "
        f"in one process, decode steps in CUDA graphs, {loads[0].steps} of them timed; tokens drawn at temperature 1."
    )
    yield (
        f"A copy moves {copy / 1e12:.2f} TB/s; the bound is what a step reads at that rate: the experts that its "
        "tokens chose, other weights, keys and values.\n"
    )
    yield "| batch | context | tokens/s | ms per step | distinct experts | bound, tokens/s | of it | target |"
    yield "|---|---|---|---|---|---|---|---|"
    for load in loads:
        if deadline.passed():
            yield _remark(load, f"not measured: {deadline.seconds:.0f} s were used up")
            continue
        try:
            yield _row(bench.spec, load, bench.run(load), copy, asked=sizes == QWEN3_30B and load.prompt == PROMPT)
        except Exception as error:  # A batch that does not fit leaves the others to be measured.
            traceback.print_exc(file=sys.stderr)
            yield _remark(load, f"{FAILED}: {type(error).__name__}: {error}".replace("\n", " ").replace("|", "/")[:200])
    yield f"\nAt the end, {gpu_state()}."


def _remark(load: Load, text: str) -> str:
    return f"| {load.batch} | {text} |{' |' * 6}"


def _row(spec: DecoderSpec, load: Load, result: Throughput, copy: float, *, asked: bool) -> str:
    """asked: whether targets were set for this model and context."""
    rate = result.tokens / result.seconds
    step_bytes = decode_bytes(spec, load.batch, result.context, 2, result.distinct_experts)
    bound = bound_tokens_per_second(step_bytes, load.batch, copy)
    verdict = ""
    if asked and load.batch == 1:
        verdict = f"{TARGET_RATE} tokens/s {'met' if rate >= TARGET_RATE else 'MISSED'}"
    elif asked and load.batch in TARGET_BATCHES:
        verdict = f"{TARGET_PART:.0%} of the bound {'met' if rate >= TARGET_PART * bound else 'MISSED'}"
    cells = (
        str(load.batch),
        str(result.context),
        f"{rate:.0f}",
        f"{1e3 * load.batch / rate:.2f}",
        f"{result.distinct_experts:.1f}",
        f"{bound:.0f}",
        f"{rate / bound:.0%}",
        verdict,
    )
    return f"| {' | '.join(cells)} |"


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """Return the expected number of experts that any of the tokens chooses, if all are equally likely."""
    return num_experts * (1.0 - (1.0 - top_k / num_experts) ** num_tokens)


def decode_bytes(spec: DecoderSpec, batch: int, context: int, element_size: int, distinct: float | None = None) -> int:
    """Return the bytes that a step of `batch` sequences of `context` positions reads: attention's weights, gates, the
    chosen experts, the output projection, and all keys and values.

    For a model with shared KV heads and experts in all layers. distinct: experts that a layer's tokens choose between
    them; by default `distinct_experts`.
    """
    attention, moe, hidden = spec.attention, spec.moe, spec.hidden_size
    if not isinstance(attention, AttentionSpec) or moe is None:
        raise ValueError("the bound is of plain attention and experts in every layer")
    of_heads = (2 * attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim * hidden
    expert = 3 * moe.intermediate_size * hidden
    if distinct is None:
        distinct = distinct_experts(moe.num_experts, moe.gate.top_k, batch)
    experts = distinct * expert
    cached = 2 * attention.num_kv_heads * attention.head_dim * batch * context
    per_layer = of_heads + moe.num_experts * hidden + experts + cached
    return round((spec.num_layers * per_layer + spec.vocab_size * hidden) * element_size)


def bound_tokens_per_second(step_bytes: int, batch: int, bytes_per_second: float) -> float:
    return batch * bytes_per_second / step_bytes


if __name__ == "__main__":
    sys.exit(main())
