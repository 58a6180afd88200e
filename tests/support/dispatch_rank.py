"""One rank of a dispatch test.

`python -m tests.support.dispatch_rank RANK RANKS REDUNDANT DTYPE COMBINE RENDEZVOUS`
"""

from __future__ import annotations

import os
import sys
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experts.parallel.collectives import Collectives
from experts.parallel.dispatch import ExpertParallel
from experts.placement.balanced import load_balanced
from experts.placement.placement import Placement, contiguous
from kernels.activation import Activation
from kernels.moe import moe_experts, moe_experts_partial, pack_experts

NUM_EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 12, 32, 24, 3
# Rows of each rank and step; the last layer of a step computes the first half of them.
STEPS = [[5, 9, 1, 2], [0, 7, 2, 0], [3, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1], [40, 2, 0, 4]]


def make_inputs(step: int, rank: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn((num_rows, HIDDEN), generator=random).to(dtype)
    weights, ids = torch.rand((num_rows, NUM_EXPERTS), generator=random).topk(TOP_K)
    if step == 0:
        ids[:] = torch.arange(TOP_K)
    return x, ids, weights


def make_placement(num_ranks: int, num_redundant: int) -> Placement:
    """Return the placement of two layers."""
    if not num_redundant:
        return contiguous(2, NUM_EXPERTS, num_ranks)
    load = np.random.default_rng(0).random((2, NUM_EXPERTS)) ** 3
    return load_balanced(load, num_ranks, num_redundant=num_redundant)


def blocks_of(placement: Placement, layer: int, step: int, counts: list[int]) -> tuple[int, int]:
    """The rows of a block of a fixed capacity, and the rounds that it takes to send all rows."""
    num_ranks, longest = len(counts), max(counts)
    capacity = min(longest, ceil(1.5 * longest * (1 - (1 - 1 / num_ranks) ** TOP_K)))
    fullest = 0
    for home, count in enumerate(counts):
        _, ids, _ = make_inputs(step, home, count, torch.float32)
        owners = placement.serving(layer).ranks(np.full(count, home), ids.numpy()).tolist()
        fullest = max(fullest, *(sum(rank in row for row in owners) for rank in range(num_ranks)))
    return capacity, max(1, ceil(fullest / capacity))


def gloo_policies() -> set[int]:
    """The scheduling policies of gloo's threads in this process."""
    threads = [thread for thread in Path("/proc/self/task").iterdir() if "gloo" in (thread / "comm").read_text()]
    return {os.sched_getscheduler(int(thread.name)) for thread in threads}


def main() -> None:
    rank, num_ranks, num_redundant = map(int, sys.argv[1:4])
    dtype, combine_dtype = (getattr(torch, name) for name in sys.argv[4:6])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN).div(8).to(dtype)
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE).div(8).to(dtype)
    everything = pack_experts(gate_up, down)
    placement = make_placement(num_ranks, num_redundant)
    held = [list(placement.experts_on(layer, rank)) for layer in range(2)]
    own = [pack_experts(gate_up[here], down[here]) for here in held]
    collectives = Collectives(rank, num_ranks)
    collectives.open(Path(sys.argv[6]), timeout=30)
    assert gloo_policies() == {os.SCHED_BATCH}
    # The operations of a GPU, with tensors that are on the CPU.
    ways = {
        for_devices: ExpertParallel(
            collectives,
            placement,
            [0, 1],
            last_layer=1,
            compute=moe_experts_partial,
            for_devices=for_devices,
            combine_dtype=combine_dtype,
        )
        for for_devices in (False, True)
    }
    tolerance = 1e-5 if dtype == combine_dtype == torch.float32 else 0.05
    for here in ((), own):
        for experts in ways.values():
            for max_rows, sizes in ((512, [16, 128]), (40, [16, 40]), (8, [8])):
                seconds = experts.measure(HIDDEN, TOP_K, dtype, here, Activation(), max_rows=max_rows)
                assert list(seconds) == sizes
            assert all(set(of_shapes) == {"allgather", "alltoall", "fixed"} for of_shapes in seconds.values())
    most_rounds = 1
    of_shape: dict[tuple[str, bool], list[Tensor]] = {
        (shape, for_devices): [] for for_devices in ways for shape in ("allgather", "alltoall", "fixed")
    }
    for (shape, for_devices), outputs in of_shape.items():
        experts = ways[for_devices]
        experts.forget_counts()
        experts.use(shape)
        first, last = experts.dispatch_of(0), experts.dispatch_of(1)
        wanted_rows_sent = 0
        for step, all_rows in enumerate(STEPS):
            num_rows = all_rows[:num_ranks]
            num_last = [count // 2 for count in num_rows]
            experts.begin_step(num_rows, num_last)
            for layer, (dispatch, counts) in enumerate(((first, num_rows), (last, num_last))):
                x, ids, weights = make_inputs(step, rank, counts[rank], dtype)
                before = x.clone()
                out = dispatch(x, ids, weights, own[layer], Activation())
                outputs.append(out)
                assert out.dtype == dtype
                assert torch.equal(x, before)
                if len(x):
                    local = moe_experts(x, ids, weights, everything, Activation())
                    torch.testing.assert_close(out, local, atol=tolerance, rtol=tolerance)
                owners = placement.serving(layer).ranks(np.full(len(ids), rank), ids.numpy())
                if shape == "alltoall":
                    wanted_rows_sent += sum(len(set(row) - {rank}) for row in owners.tolist())
                elif shape == "allgather":
                    wanted_rows_sent += max(counts) * (num_ranks - 1)
                elif any(counts):
                    capacity, num_rounds = blocks_of(placement, layer, step, counts)
                    most_rounds = max(most_rounds, num_rounds)
                    wanted_rows_sent += num_rounds * capacity * (num_ranks - 1)
        assert experts.num_rows_sent == wanted_rows_sent
        num_bytes = experts.sent()[num_ranks:]
        assert sum(num_bytes) > wanted_rows_sent * x.shape[1] * x.element_size()
        assert [count > 0 for count in num_bytes] == [other != rank for other in range(num_ranks)]
    for first, *others in zip(*of_shape.values(), strict=True):
        assert all(torch.equal(first, other) for other in others)
    # Blocks of two and three ranks have room for every row.
    assert (most_rounds > 1) == (num_ranks > 3)
    collectives.close()
    print("all agree")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
