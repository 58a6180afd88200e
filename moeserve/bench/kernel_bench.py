"""Correctness, ceilings and the table of all kernels in one run: `python -m moeserve.bench.kernel_bench [--interpret]`.

`moeserve bench kernels` is the same. It needs a GPU; with --interpret only correctness is checked, on a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch

    from moeserve.bench.kernel_case import KernelCase, Section
    from moeserve.bench.kernel_cases_attention import AttentionCase

# So that the last case, and the compilers of its peers, end within ten minutes.
TIME_LIMIT = 480.0
NO_GPU = "There is no CUDA device to measure on; --interpret checks correctness in Triton's interpreter."


def main(arguments: list[str] | None = None) -> int:
    """The exit code: 0, 1 where a kernel is wrong or fails, 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(prog="moeserve bench kernels", description="Measure the GPU kernels.")
    parser.add_argument("--interpret", action="store_true", help="correctness alone, in Triton's interpreter on a CPU")
    parser.add_argument("--out-dir", type=Path, default=Path("docs/benchmarks"), help="where the table is written")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds after which no case begins")
    parser.add_argument(
        "--resume", action="store_true", help="go on where the last run into the same folder ended, on the same GPU"
    )
    options = parser.parse_args(arguments)
    return run(
        interpret=options.interpret, out_dir=options.out_dir, time_limit=options.time_limit, resume=options.resume
    )


def run(*, interpret: bool, out_dir: Path, time_limit: float = TIME_LIMIT, resume: bool = False) -> int:
    """Writes and prints. time_limit: seconds from now; what would begin later is left out, targets coming first.

    resume: measures only what the last run into the folder has not. Where a kernel takes the GPU from this process,
    another one takes its place.
    """
    import torch

    if interpret:
        # Triton reads it when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        from kernels.gpu.interpreter import mend_interpreter

        mend_interpreter()
        from moeserve.bench.kernel_checks import checks
        from moeserve.bench.kernel_run import print_checks

        with torch.inference_mode():
            _, right = print_checks(checks(torch.device("cpu"), 4))
            return 0 if right else 1
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    from moeserve.bench import kernel_machine
    from moeserve.bench.kernel_checks import checks
    from moeserve.bench.kernel_report import KernelReport
    from moeserve.bench.kernel_results import Results
    from moeserve.bench.kernel_run import Bench, GpuLostError, Kept, run_bench
    from moeserve.bench.kernel_targets import target_rows
    from moeserve.bench.kernel_timing import Deadline, is_lost, measure_ceilings, time_calls

    deadline = Deadline(time_limit)
    device = torch.device("cuda", 0)
    name, num_sms = kernel_machine.name(device), torch.cuda.get_device_properties(device).multi_processor_count
    path = out_dir / f"kernels-{kernel_machine.file_stem(name)}.md"
    sections = _sections(device, num_sms)
    report = KernelReport(path, f"Kernels on {name}", sections, target_rows({}, 1.0))
    report.add_line(f"{kernel_machine.versions()} {kernel_machine.hardware(device)}\n")
    results, of = path.with_suffix(".json"), f"{name}, {kernel_machine.libraries()}"
    kept = Kept(Results.read(results, of) if resume else Results(of), results)
    of_device = partial(measure_ceilings, device)
    bench = Bench(sections, partial(checks, device, num_sms), of_device, time_calls, kernel_machine.state, is_lost)
    try:
        with torch.inference_mode():
            right = run_bench(bench, report, deadline, kept)
    except GpuLostError as lost:
        print(f"The GPU refuses further work after {lost}: another process goes on.", flush=True)
        _go_on(out_dir, deadline.left())
    print(f"written to {path}")
    return 0 if right else 1


def _go_on(out_dir: Path, seconds: float) -> NoReturn:
    """In place of this process. It begins no case that this one has begun, so that this happens once per case."""
    command = [sys.executable, "-m", __spec__.name, "--resume", "--out-dir", str(out_dir)]
    os.execv(sys.executable, [*command, "--time-limit", f"{max(0.0, seconds):.0f}"])


def _sections(device: torch.device, num_sms: int) -> list[Section]:
    """All cases, with the configurations that serving would take."""
    from moeserve.bench.kernel_case import Section
    from moeserve.bench.kernel_cases_moe import ALONE_NUM_TOKENS, SHAPES, combine_cases, moe_cases, quantised_cases
    from moeserve.bench.kernel_cases_sampling import sampling_cases
    from moeserve.bench.kernel_cases_small import copy_cases, gate_cases, norm_cases
    from moeserve.model.gpu_kernels import moe_configs

    configs = partial(moe_configs, device=device)
    experts = [
        section
        for name in SHAPES
        for section in (
            Section(f"Experts of {name}", moe_cases(name, device, configs, num_tokens_alone=ALONE_NUM_TOKENS)),
            Section(f"Quantised experts of {name}", quantised_cases(name, device, configs)),
        )
    ]
    return [
        *_attention_sections(device, num_sms),
        *experts,
        Section("Norms, rotation, KV write", norm_cases(device)),
        Section("Gates and sums of experts", [*gate_cases(device), *combine_cases(device)]),
        Section("Sampling", sampling_cases(device)),
        Section("Copies of KV blocks", copy_cases(device)),
    ]


def _attention_sections(device: torch.device, num_sms: int) -> Iterator[Section]:
    from moeserve.bench.kernel_case import PlannedCase, Section
    from moeserve.bench.kernel_cases_attention import attention_cases

    cases = attention_cases()
    titles = {"decode": "Decode attention", "extend": "Attention of short extends", "prefill": "Prefill attention"}
    for kind, title in titles.items():
        planned = [
            PlannedCase(case.name, partial(_attention_case, case, device, num_sms))
            for case in cases
            if case.kind == kind
        ]
        yield Section(title, planned)


def _attention_case(case: AttentionCase, device: torch.device, num_sms: int) -> KernelCase:
    from moeserve.bench.kernel_attention import prepare
    from moeserve.bench.kernel_case import KernelCase
    from moeserve.bench.kernel_peers_attention import attention_peers
    from moeserve.model.gpu_kernels import tuned_attention

    prepared = prepare(case, device, num_sms, configs=tuned_attention(case.shape, device))
    peers = attention_peers(prepared)
    return KernelCase(
        [partial(prepared.run, index) for index in range(prepared.num_sets)],
        peers.calls,
        case.num_bytes,
        case.num_flops,
        {"sets": str(prepared.num_sets), "config": str(prepared.config)},
        peers.absent,
        partial(prepared.relative_error, 0),
    )


if __name__ == "__main__":
    sys.exit(main())
