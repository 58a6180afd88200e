"""`moeserve bench kernels`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from moeserve.bench.kernel_bench import TIME_LIMIT, run


@click.command(name="kernels")
@click.option("--interpret", is_flag=True, help="Check correctness alone, in Triton's interpreter on a CPU.")
@click.option(
    "--out-dir", type=click.Path(path_type=Path), default=Path("docs/benchmarks"), help="Where the table is written."
)
@click.option(
    "--time-limit",
    type=click.FloatRange(min=0),
    default=TIME_LIMIT,
    show_default=True,
    help="Seconds after which no case begins; those with targets come first.",
)
def command(interpret: bool, out_dir: Path, time_limit: float) -> None:
    """Check the GPU kernels and measure them beside their peers, in at most ten minutes."""
    sys.exit(run(interpret=interpret, out_dir=out_dir, time_limit=time_limit))
