"""Correctness, ceilings and the table of all kernels in one run: `python -m benchmarks.kernels`.

It needs a GPU; with --interpret only correctness is checked, on a CPU. `make gpu-bench` runs it within ten minutes.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from benchmarks.kernels.cases import Section

# So that the last case, and the compilers of its peers, end within ten minutes.
TIME_LIMIT = 480.0
NO_GPU = "There is no CUDA device to measure on; --interpret checks correctness in Triton's interpreter."


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 0, 1 where a kernel is wrong or fails, 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description="Measure the GPU kernels.")
    parser.add_argument("--interpret", action="store_true", help="correctness alone, in Triton's interpreter on a CPU")
    parser.add_argument("--out-dir", type=Path, default=Path("docs/benchmarks"), help="where the table is written")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT, help="seconds after which no case begins")
    parser.add_argument("--cases", default="", metavar="REGEX", help="measure the cases alone whose names have a match")
    options = parser.parse_args(arguments)
    if options.interpret:
        return _check_interpreted()
    import torch

    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    return _measure(torch.device("cuda", 0), options.out_dir, options.time_limit, options.cases)


def _check_interpreted() -> int:
    # Triton reads it when a kernel is defined.
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from benchmarks.kernels.interpreter import mend_interpreter

    mend_interpreter()
    from benchmarks.kernels.checks import checks
    from benchmarks.kernels.run import print_checks

    with torch.inference_mode():
        _, right = print_checks(checks(torch.device("cpu"), 4))
    return 0 if right else 1


def _measure(device: torch.device, out_dir: Path, time_limit: float, names: str) -> int:
    """Write and print. time_limit: seconds from now; later cases are left out, cases with targets come first. names: a
    regular expression that matches within the names of the cases to measure."""
    import torch

    from benchmarks.gpu import Deadline, file_stem, gpu_name, gpu_state, hardware, is_lost, measure_ceilings, versions
    from benchmarks.kernels.checks import checks
    from benchmarks.kernels.measure import time_calls
    from benchmarks.kernels.report import KernelReport, target_rows
    from benchmarks.kernels.run import Bench, run_bench

    deadline = Deadline(time_limit)
    name, num_sms = gpu_name(device), torch.cuda.get_device_properties(device).multi_processor_count
    path = out_dir / f"kernels-{file_stem(name)}.md"
    sections = [
        replace(section, cases=[case for case in section.cases if re.search(names, case.name)])
        for section in _sections(device, num_sms)
    ]
    report = KernelReport(path, f"Kernels on {name}", sections, target_rows({}, 1.0))
    report.add_line(f"{versions()} {hardware(device)}\n")
    of_device = partial(measure_ceilings, device)
    bench = Bench(sections, partial(checks, device, num_sms), of_device, time_calls, gpu_state, is_lost)
    with torch.inference_mode():
        right = run_bench(bench, report, deadline)
    print(f"written to {path}")
    return 0 if right else 1


def _sections(device: torch.device, num_sms: int) -> list[Section]:
    """Return all cases, with the configurations that serving would choose."""
    from benchmarks.kernels.attention import attention_sections
    from benchmarks.kernels.cases import Section
    from benchmarks.kernels.experts import ALONE_NUM_TOKENS, SHAPES, combine_cases, moe_cases, quantised_cases
    from benchmarks.kernels.fused import fused_cases
    from benchmarks.kernels.small import gate_cases, norm_cases, sampling_cases
    from kernels.gpu.device import shared_memory_of
    from kernels.gpu.moe_config import MoeConfigs

    configs = partial(MoeConfigs, shared_bytes=shared_memory_of(device))
    experts = [
        section
        for name in SHAPES
        for section in (
            Section(f"Experts of {name}", moe_cases(name, device, configs, num_tokens_alone=ALONE_NUM_TOKENS)),
            Section(f"Quantised experts of {name}", quantised_cases(name, device, configs)),
        )
    ]
    return [
        *attention_sections(device, num_sms),
        *experts,
        Section("Norms, rotation, KV write", norm_cases(device)),
        Section("Parts of a decode step", fused_cases(device, num_sms)),
        Section("Gates and sums of experts", [*gate_cases(device), *combine_cases(device)]),
        Section("Sampling", sampling_cases(device)),
    ]


if __name__ == "__main__":
    sys.exit(main())
