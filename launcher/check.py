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

    from experts.parallel.collectives import Collectives

    Experts = tuple[torch.Tensor, torch.Tensor]  # gate and up projections, and down projections

_LIBRARIES = ("torch", "triton", "transformers")
_NUM_VALUES = 4096  # of each message between ranks
_HIDDEN, _WIDTH, _NUM_ROWS = 64, 32, 9  # of the layer whose experts all ranks share
_PATIENCE_S = 60.0  # s that a rank waits for the others
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
    os.environ["DS_ACCELERATOR"] = "cuda" if on_gpu else "cpu"
    from experts.parallel.collectives import Collectives  # Imported late: deepspeed looks at the environment then.

    local = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(local)
    kind = "nccl" if on_gpu else "gloo"
    group.init_process_group(kind)
    collectives = Collectives(rank, num_ranks, device=local if on_gpu else None)
    try:
        for name, send in (("all-reduce", _reduced), ("all-gather", _gathered), ("broadcast", _broadcast)):
            yield timed(f"{kind}: {name} of {num_ranks} ranks", partial(send, rank, num_ranks, local))
        yield timed(f"{kind}: experts over {num_ranks} ranks", partial(_experts_of_all, collectives))
    finally:
        collectives.close()
        if group.is_initialized():
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


def _experts_of_all(collectives: Collectives) -> str:
    """Compute a layer's experts on the ranks that hold them, in each shape of dispatch, and compare with all of them
    computed here."""
    import torch

    from experts.parallel.dispatch import ExpertParallel
    from experts.placement.placement import contiguous
    from kernels.moe import moe_experts_reference
    from kernels.specs import Activation

    def compute(
        x: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, experts: Experts, activation: Activation
    ) -> torch.Tensor:
        return moe_experts_reference(x, slots, weights, *experts, activation)

    rank, num_ranks, device = collectives.rank, collectives.num_ranks, collectives.device
    placement = contiguous(1, 2 * num_ranks, num_ranks)
    drawn, own_rows = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    sizes = ((2 * _WIDTH, _HIDDEN), (_HIDDEN, _WIDTH))
    gate_up, down = (torch.randn((2 * num_ranks, *size), generator=drawn).to(device) / 8 for size in sizes)
    here = list(placement.experts_on(0, rank))
    x = torch.randn((_NUM_ROWS, _HIDDEN), generator=own_rows).to(device)
    weights, ids = torch.rand((_NUM_ROWS, 2 * num_ranks), generator=own_rows).to(device).topk(2)
    expected = moe_experts_reference(x, ids, weights, gate_up, down, Activation())
    collectives.open(None, _PATIENCE_S, interface=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))
    layer: ExpertParallel[Experts] = ExpertParallel(
        collectives, placement, [0], last_layer=-1, compute=compute, for_devices=device.type == "cuda"
    )
    for shape in ("allgather", "alltoall", "fixed"):
        layer.use(shape)
        layer.begin_step([_NUM_ROWS] * num_ranks, [_NUM_ROWS] * num_ranks)
        found = layer.dispatch_of(0)(x, ids, weights, (gate_up[here], down[here]), Activation())
        if not torch.allclose(found, expected, rtol=1e-4, atol=1e-4):
            return f"by {shape} the sums are not those of one rank"
    return ""


def _differs(found: torch.Tensor, expected: torch.Tensor | int) -> str:
    return "" if bool((found == expected).all()) else "other numbers have come than were sent"


if __name__ == "__main__":
    check(prog_name="torchrun -m launcher.check")
