"""`moeserve check`, also `torchrun ... -m launcher.check`: does this machine compute what it should?"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any

import click

from launcher.doctor import doctor
from launcher.gpu_choice import GpuHangs, run_probe
from launcher.gpu_probe import Found
from launcher.gpus import gpu_names
from launcher.preflight import usable_cores
from launcher.settings_options import some_settings
from moeserve.config import VERSION, ConfigError, load_config
from moeserve.engine.gpu_check.checked import Checked, timed

_LIBRARIES = ("torch", "triton", "transformers")
_RANKS = ("expert_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")


@click.command()
@click.argument("model", required=False)
@some_settings("device", *_RANKS)
@click.pass_context
def check(ctx: click.Context, /, model: str | None, **flags: Any) -> None:
    """Check what this machine computes, and print a report.

    On the CPU, tiny models against recorded tokens; on a GPU, its kernels against their references too. With sizes of
    `moeserve serve` the messages between that number of ranks, which torchrun starts here, and a layer whose experts
    they share. With MODEL first what `moeserve doctor` says of it. Exit code 1 if a check fails or MODEL cannot be
    served.

    On several machines torchrun starts the ranks: `torchrun --nnodes ... -m launcher.check` checks the same.
    """
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks > 1:
        from moeserve.engine.gpu_check.ranks import checks_between

        sys.exit(_report(checks_between(rank, num_ranks), rank, f"rank {rank}: "))
    try:
        num_wanted = load_config(flags, os.environ).num_ranks
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    if model is not None:
        ctx.invoke(doctor, model=model, **flags)
        click.echo()
    code = _report(_alone(), 0, "")
    if num_wanted > 1:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_wanted)]
        code |= int(subprocess.run([*torchrun, "-m", "launcher.check"], check=False).returncode != 0)
    if model is not None and not code:
        given = [f"--{name.replace('_', '-')} {value}" for name, value in flags.items() if value is not None]
        click.echo(" ".join(("Start it: moeserve serve", model, *given)))
    sys.exit(code)


def _report(checks: Iterable[Checked], rank: int, of_rank: str) -> int:
    """Print the versions and each check; return the exit code. Ranks but the first print their faults alone."""
    if rank == 0:
        libraries = ", ".join(f"{name} {version(name)}" for name in _LIBRARIES)
        click.echo(f"moeserve {VERSION}, {libraries}, Python {platform.python_version()}")
        gpus = ", ".join(gpu_names()) or "none"
        click.echo(f"{platform.system()} {platform.machine()}, {usable_cores()} cores; GPUs: {gpus}")
    told = []
    for one in checks:
        told.append(one)
        if rank == 0 or one.fault:
            click.echo(f"  {of_rank}{one.name:<40} {one.seconds:6.1f} s  {one.fault or 'passed'}")
    num_faults = sum(bool(one.fault) for one in told)
    if rank == 0:
        click.echo(f"{len(told) - num_faults} of {len(told)} checks passed.")
    return int(num_faults > 0)


def _alone() -> Iterator[Checked]:
    """Check the CPU, and the GPU if there is one."""
    from moeserve.engine.gpu_check.models import CONFIGS, wrong_tokens

    for name in CONFIGS:
        yield timed(f"CPU: tokens of a tiny {name}", partial(wrong_tokens, name, "cpu"))
    if not gpu_names():
        return
    try:
        for line in run_probe(["--check"]):
            if isinstance(line, Checked):
                yield Checked(f"GPU: {line.name}", line.seconds, line.fault)
            elif isinstance(line, Found) and line.absence:
                yield Checked("GPU", 0.0, line.absence)
    except GpuHangs as error:
        yield Checked("GPU", 0.0, str(error))


if __name__ == "__main__":
    check(prog_name="torchrun -m launcher.check")
