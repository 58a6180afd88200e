"""Correctness, ceilings and the table of all kernels in one run: `python -m moeserve.bench.kernel_bench [--interpret]`.

`moeserve bench kernels` is the same. It needs a GPU; with --interpret only correctness is checked, on a CPU.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from collections.abc import Iterator
from datetime import date
from functools import partial
from pathlib import Path

import torch

from moeserve.bench.kernel_case import KernelCase

SECONDS = 540.0
NO_GPU = "There is no CUDA device to measure on; --interpret checks correctness in Triton's interpreter."


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 for a kernel that is wrong, 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(prog="moeserve bench kernels", description="Measure the GPU kernels.")
    parser.add_argument("--interpret", action="store_true", help="correctness alone, in Triton's interpreter on a CPU")
    parser.add_argument("--out-dir", type=Path, default=Path("docs/benchmarks"), help="where the table is written")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="no case of the table begins later")
    options = parser.parse_args(arguments)
    return run(interpret=options.interpret, out_dir=options.out_dir, seconds=options.seconds)


def run(*, interpret: bool, out_dir: Path, seconds: float = SECONDS) -> int:
    if interpret:
        # Triton reads it when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        from kernels.gpu.interpreter import mend_interpreter

        mend_interpreter()
        return 0 if _check(torch.device("cpu"), 4) else 1
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    device = torch.device("cuda", 0)
    if not _check(device, torch.cuda.get_device_properties(device).multi_processor_count):
        return 1
    name = torch.cuda.get_device_name(device)
    out_dir.mkdir(parents=True, exist_ok=True)
    path = out_dir / f"kernels-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    with torch.inference_mode():
        text = "\n".join(_report(device, name, seconds)) + "\n"
    path.write_text(text)
    print(text + f"\nwritten to {path}")
    return 0


def _check(device: torch.device, num_sms: int) -> bool:
    from moeserve.bench.kernel_checks import checks

    all_passed = True
    with torch.inference_mode():
        for check in checks(device, num_sms):
            all_passed &= check.passed
            print(f"{'ok   ' if check.passed else 'WRONG'} {check.name}: relative error {check.error:.1e}", flush=True)
    return all_passed


def _report(device: torch.device, name: str, seconds: float) -> Iterator[str]:
    import triton

    from moeserve.bench.kernel_timing import Deadline, measure_ceilings, time_calls

    deadline = Deadline(seconds)
    yield f"# Kernels on {name}"
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    yield f"\n{date.today()}, {versions}."
    yield "Correctness was checked in the same run. Percentages are of the ceilings measured in the same run:\n"
    ceilings = measure_ceilings(device)
    yield f"- copy {ceilings.copy / 1e12:.2f} TB/s (read and written), sum {ceilings.read / 1e12:.2f} TB/s (read)"
    yield f"- product of two 8192 x 8192 matrices in bf16: {ceilings.flops / 1e12:.0f} TFLOP/s\n"
    yield "| case | us | spread | GB/s | of copy | TFLOP/s | of product | times the best peer | peers, us |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for case in _cases(device):
        if deadline.passed:
            yield f"| {case.name} | not measured: {seconds:.0f} s were over | | | | | | | |"
            continue
        own = time_calls(case.calls)
        rate, flops = case.num_bytes / own.microseconds * 1e6, case.num_flops / own.microseconds * 1e6
        peers = {peer: time_calls(calls).microseconds for peer, calls in case.peers.items()}
        ratio = f"{min(peers.values()) / own.microseconds:.2f}" if peers else ""
        beside = [f"{peer} {time:.1f}" for peer, time in sorted(peers.items(), key=lambda entry: entry[1])]
        beside += [f"{peer}: {reason}" for peer, reason in case.absent.items()]
        yield (
            f"| {case.name} | {own.microseconds:.1f} | {own.spread:.0%} "
            f"| {rate / 1e9:.0f} | {rate / ceilings.copy:.0%} "
            f"| {flops / 1e12:.1f} | {flops / ceilings.flops:.0%} | {ratio} | {'; '.join(beside)} |"
        )


def _cases(device: torch.device) -> Iterator[KernelCase]:
    import triton

    from kernels.gpu.moe_config import MoeShape
    from kernels.gpu.moe_experts import device_of
    from kernels.gpu.tuning import MoeConfigs, Platform
    from moeserve.bench.kernel_attention import prepare
    from moeserve.bench.kernel_cases_attention import attention_cases
    from moeserve.bench.kernel_cases_moe import combine_cases, moe_cases
    from moeserve.bench.kernel_cases_small import small_cases
    from moeserve.bench.kernel_peers_attention import attention_peers

    platform_of = Platform(torch.cuda.get_device_name(device), triton.__version__)
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count

    def configs(shape: MoeShape) -> MoeConfigs:
        return MoeConfigs(shape, device_of(device), platform_of)

    yield from small_cases(device)
    yield from combine_cases(device)
    yield from moe_cases(device, configs)
    for case in attention_cases():
        prepared = prepare(case, device, num_sms)
        calls = [partial(prepared.run, index) for index in range(prepared.num_sets)]
        peers = attention_peers(prepared)
        yield KernelCase(case.kind, case.name, calls, peers.calls, case.num_bytes, case.num_flops, absent=peers.absent)


if __name__ == "__main__":
    sys.exit(main())
