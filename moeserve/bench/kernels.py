"""`moeserve bench kernels`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command(name="kernels")
@click.option("--interpret", is_flag=True, help="Check correctness alone, in Triton's interpreter on a CPU.")
@click.option(
    "--out-dir", type=click.Path(path_type=Path), default=Path("docs/benchmarks"), help="Where the table is written."
)
def command(interpret: bool, out_dir: Path) -> None:
    """Check the GPU kernels and measure them beside their peers, in at most ten minutes."""
    from moeserve.bench.kernel_bench import run

    sys.exit(run(interpret=interpret, out_dir=out_dir))
