"""`moeserve check`, also `torchrun ... -m launcher.check`: does this machine compute what it should?"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import click

from launcher.doctor import doctor
from launcher.gpu_choice import GpuHangs, run_probe
from launcher.gpu_probe import Found
from launcher.preflight import gpu_names, usable_cores
from launcher.settings_options import some_settings
from moeserve.config import VERSION, ConfigError, load_config
from moeserve.engine.gpu_check.checked import Checked, timed

if TYPE_CHECKING:
    import torch

_LIBRARIES = ("torch", "triton", "transformers")
_NUM_VALUES = 4096  # of each message between ranks
_RANKS = ("expert_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")


@click.command()
@click.argument("model", required=False)
@some_settings("device", *_RANKS)
@click.pass_context
def check(ctx: click.Context, /, model: str | None, **flags: Any) -> None:
    """Check what this machine computes, and print a report.

    On the CPU, tiny models against recorded tokens; on a GPU, its kernels against their references too. With sizes of
    `moeserve serve` the messages between that number of ranks, which torchrun starts here. With MODEL first what
    `moeserve doctor` says of it. Exit code 1 if a check fails or MODEL cannot be served.

    On several machines torchrun starts the ranks: `torchrun --nnodes ... -m launcher.check` checks their messages.
    """
    rank, num_ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if num_ranks > 1:
        sys.exit(_report(_collectives(rank, num_ranks), rank, f"rank {rank}: "))
    try:
        num_wanted = load_config(flags, os.environ).num_ranks
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    if model is not None:
        ctx.invoke(doctor, model=model, device=flags["device"], expert_parallel_size=flags["expert_parallel_size"])
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


def _collectives(rank: int, num_ranks: int) -> Iterator[Checked]:
    """Check the messages between ranks that torchrun has started: by NCCL on GPUs, by gloo on CPUs."""
    import torch
    import torch.distributed as group

    on_gpu = torch.cuda.is_available()
    local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(local)
    kind = "nccl" if on_gpu else "gloo"
    group.init_process_group(kind)
    try:
        for name, send in (("all-reduce", _reduced), ("all-gather", _gathered), ("broadcast", _broadcast)):
            yield timed(f"{kind}: {name} of {num_ranks} ranks", partial(send, rank, num_ranks, local))
    finally:
        group.destroy_process_group()


def _values(rank: int, device: torch.device) -> torch.Tensor:
    """Return the numbers that a rank sends."""
    import torch

    return torch.arange(_NUM_VALUES, dtype=torch.float32, device=device) + rank


def _reduced(rank: int, num_ranks: int, device: torch.device) -> str:
    import torch.distributed as group

    found = _values(rank, device)
    group.all_reduce(found)
    return _differs(found, sum(_values(one, device) for one in range(num_ranks)))


def _gathered(rank: int, num_ranks: int, device: torch.device) -> str:
    import torch
    import torch.distributed as group

    found = [torch.empty(_NUM_VALUES, device=device) for _ in range(num_ranks)]
    group.all_gather(found, _values(rank, device))
    return "".join(_differs(one, _values(number, device)) for number, one in enumerate(found))


def _broadcast(rank: int, num_ranks: int, device: torch.device) -> str:
    import torch.distributed as group

    found = _values(rank, device)
    group.broadcast(found, num_ranks - 1)
    return _differs(found, _values(num_ranks - 1, device))


def _differs(found: torch.Tensor, expected: torch.Tensor | int) -> str:
    return "" if bool((found == expected).all()) else "other numbers have come than were sent"


if __name__ == "__main__":
    check(prog_name="torchrun -m launcher.check")
