"""Check that ranks get each other's messages, and compute a layer together as one of them does alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as group

from experts.placement.placement import contiguous
from kernels.moe import moe_experts_reference
from kernels.specs import Activation
from moeserve.engine.gpu_check.checked import Checked, timed

if TYPE_CHECKING:
    from experts.parallel.collectives import Collectives

Experts = tuple[torch.Tensor, torch.Tensor]  # gate and up projections, and down projections

_NUM_VALUES = 4096  # of each message
_HIDDEN, _WIDTH, _NUM_ROWS = 64, 32, 9  # of the layer, and its rows on each rank
_PATIENCE_S = 60.0  # s that a rank waits for the others


def checks_between(rank: int, num_ranks: int) -> Iterator[Checked]:
    """Check ranks that torchrun has started: their messages, by NCCL on GPUs and by gloo on CPUs, and a layer whose
    experts they share."""
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
    return torch.arange(_NUM_VALUES, dtype=torch.float32, device=device) + rank


def _reduced(rank: int, num_ranks: int, device: torch.device) -> str:
    found = _values(rank, device)
    group.all_reduce(found)
    return _differs(found, sum(_values(one, device) for one in range(num_ranks)))


def _gathered(rank: int, num_ranks: int, device: torch.device) -> str:
    found = [torch.empty(_NUM_VALUES, device=device) for _ in range(num_ranks)]
    group.all_gather(found, _values(rank, device))
    return "".join(_differs(one, _values(number, device)) for number, one in enumerate(found))


def _broadcast(rank: int, num_ranks: int, device: torch.device) -> str:
    found = _values(rank, device)
    group.broadcast(found, num_ranks - 1)
    return _differs(found, _values(num_ranks - 1, device))


def _experts_of_all(collectives: Collectives) -> str:
    """Compute a layer's experts on the ranks that hold them, in each shape of dispatch, and compare with all of them
    computed here."""
    from experts.parallel.dispatch import ExpertParallel

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
