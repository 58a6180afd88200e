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
from typing import TYPE_CHECKING

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
    options = parser.parse_args(arguments)
    return run(interpret=options.interpret, out_dir=options.out_dir, time_limit=options.time_limit)


def run(*, interpret: bool, out_dir: Path, time_limit: float = TIME_LIMIT) -> int:
    """Writes and prints. time_limit: seconds from now; what would begin later is left out, targets coming first."""
    import torch

    if interpret:
        # Triton reads it when a kernel is defined.
        os.environ["TRITON_INTERPRET"] = "1"
        from kernels.gpu.interpreter import mend_interpreter

        mend_interpreter()
        from moeserve.bench.kernel_checks import checks
        from moeserve.bench.kernel_run import print_checks

        with torch.inference_mode():
            return 0 if print_checks(checks(torch.device("cpu"), 4)) else 1
    if not torch.cuda.is_available():
        print(NO_GPU, file=sys.stderr)
        return 2
    from moeserve.bench.kernel_checks import checks
    from moeserve.bench.kernel_report import KernelReport
    from moeserve.bench.kernel_run import Bench, run_bench
    from moeserve.bench.kernel_targets import targets_first
    from moeserve.bench.kernel_timing import Deadline, measure_ceilings, time_calls

    deadline = Deadline(time_limit)
    device = torch.device("cuda", 0)
    name, num_sms = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).multi_processor_count
    path = out_dir / f"kernels-{re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')}.md"
    sections = targets_first(_sections(device, num_sms))
    report = KernelReport(path, f"Kernels on {name}", sections)
    report.add_line(_versions() + "\n")
    bench = Bench(sections, partial(checks, device, num_sms), partial(measure_ceilings, device), time_calls)
    with torch.inference_mode():
        right = run_bench(bench, report, deadline)
    print(f"written to {path}")
    return 0 if right else 1


def _versions() -> str:
    import torch
    import triton

    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    return f"{date.today()}, {versions}."


def _sections(device: torch.device, num_sms: int) -> list[Section]:
    """All cases, with the configurations that serving would take."""
    from moeserve.bench.kernel_case import Section
    from moeserve.bench.kernel_cases_moe import SHAPES, combine_cases, moe_cases
    from moeserve.bench.kernel_cases_small import small_cases
    from moeserve.cuda.expert_kernels import moe_configs

    return [
        *(
            Section(f"Experts of {name}", moe_cases(name, device, partial(moe_configs, device=device)))
            for name in SHAPES
        ),
        *_attention_sections(device, num_sms),
        Section("Norms, rotation, sampling, copies", [*small_cases(device), *combine_cases(device)]),
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
    from moeserve.cuda.attention_kernels import tuned_attention

    prepared = prepare(case, device, num_sms, configs=tuned_attention(case.shape, device))
    peers = attention_peers(prepared)
    return KernelCase(
        [partial(prepared.run, index) for index in range(prepared.num_sets)],
        peers.calls,
        case.num_bytes,
        case.num_flops,
        {"config": str(prepared.config)},
        peers.absent,
        partial(prepared.relative_error, 0),
    )


if __name__ == "__main__":
    sys.exit(main())
