"""One rank that sends rows by the service's dispatch and as DeepSpeed's AutoEP does, and counts both.

`python -m benchmarks.experts.dispatch_rank RANK NUM_RANKS RENDEZVOUS JOB` prints one line of JSON. The logger of
`deepspeed.comm` observes every call. It synchronises after each, so nothing is timed while it is on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed.comm as comm
import msgspec
import numpy as np
import torch
from torch import Tensor

from benchmarks.experts.synthetic_traces import SyntheticSpec, synthetic_trace
from experts.parallel.collectives import Collectives
from experts.parallel.dispatch import ExpertParallel
from experts.placement.placement import contiguous
from kernels.activation import Activation
from kernels.moe import moe_experts_partial, pack_experts
from moeserve.engine.ranked_service import bind_to_cores

_REQUESTS_PER_RANK = 16


def routed(routing: str, num_experts: int, top_k: int, num_tokens: int, seed: int, rank: int, num_ranks: int) -> Tensor:
    """Return distinct experts of the rank's tokens, [T, k] int64: at random, or a layer of structured routing.

    The ranks serve one model, so they share one structured trace, whose requests are dealt to them in turn.
    """
    if routing == "uniform":
        scores = torch.rand((num_tokens, num_experts), generator=torch.Generator().manual_seed(1000 * seed + rank))
        return scores.topk(top_k).indices
    spec = SyntheticSpec(4, num_experts, top_k, topic=1.5, popularity=0.75, coupling=0.8)
    trace = synthetic_trace(spec, _REQUESTS_PER_RANK * num_ranks, num_tokens // _REQUESTS_PER_RANK, seed)
    return torch.from_numpy(trace.ids[-1, trace.homes(num_ranks) == rank].astype(np.int64))


def row_per_expert(collectives: Collectives, x: Tensor, ids: Tensor, rank_of: Tensor) -> int:
    """Send a row for each remote expert of a token, there and back; return the number of rows on the way out.

    AutoEP also hands the collective the rows for its own rank; they are left out here, since they go nowhere.
    """
    num_ranks, me = collectives.num_ranks, collectives.rank
    owners = rank_of[ids]
    tokens = [(owners == rank).nonzero()[:, 0] if rank != me else torch.empty(0, dtype=torch.int64)
              for rank in range(num_ranks)]  # fmt: skip
    num_to = [len(rows) for rows in tokens]
    ones = [1] * num_ranks
    num_from = collectives.all_to_all(torch.tensor(num_to), ones, ones).tolist()
    arrived = collectives.all_to_all(x[torch.cat(tokens)], num_to, num_from)
    collectives.all_to_all(arrived, num_from, num_to)
    return sum(num_to)


def logged_bytes() -> int:
    """Return the bytes that the logger has counted so far: the size of the sent tensor of each call."""
    sizes = comm.comms_logger.get_raw_data().values()
    return sum(int(size) * int(record[0]) for of_operation in sizes for size, record in of_operation.items())


def main() -> None:
    rank, num_ranks = int(sys.argv[1]), int(sys.argv[2])
    rendezvous, job = Path(sys.argv[3]), msgspec.json.decode(sys.argv[4])
    torch.set_num_threads(1)
    bind_to_cores(rank, num_ranks, 1)
    num_experts, top_k, hidden, num_tokens = (job[name] for name in ("experts", "top_k", "hidden", "tokens"))
    placement = contiguous(1, num_experts, num_ranks)
    collectives = Collectives(rank, num_ranks)
    collectives.open(rendezvous, timeout=120)
    parallel = ExpertParallel(collectives, placement, [0], last_layer=1, compute=moe_experts_partial)
    # The times of the fewest rows, which steps of decodes have.
    seconds = min(parallel.measure(job["timed_hidden"], job["timed_top_k"], torch.float32).items())[1]
    comm.configure(enabled=True, prof_all=True)
    parallel.use("alltoall")
    dispatch = parallel.dispatch_of(0)
    share = num_experts // num_ranks
    experts = pack_experts(torch.zeros(share, 16, hidden), torch.zeros(share, hidden, 8))
    rank_of = torch.from_numpy(placement.first_ranks()[0])
    found = []
    for routing in job["routings"]:
        for seed in job["seeds"]:
            ids = routed(routing, num_experts, top_k, num_tokens, seed, rank, num_ranks)
            x = torch.randn((len(ids), hidden), generator=torch.Generator().manual_seed(seed))
            parallel.forget_counts()
            parallel.begin_step([len(ids)] * num_ranks, [len(ids)] * num_ranks)
            logged = logged_bytes()
            dispatch(x, ids, torch.full(ids.shape, 1 / top_k), experts, Activation())
            counted = {"rows": parallel.num_rows_sent, "bytes": sum(collectives.traffic.bytes_to)}
            counted["logged"] = logged_bytes() - logged
            before, logged = sum(collectives.traffic.bytes_to), logged_bytes()
            counted["plain_rows"] = row_per_expert(collectives, x, ids, rank_of)
            counted["plain_bytes"] = sum(collectives.traffic.bytes_to) - before
            counted["plain_logged"] = logged_bytes() - logged
            found.append({"routing": routing, "seed": seed, "tokens": len(ids), **counted})
    collectives.close()
    print(msgspec.json.encode({"seconds": seconds, "counts": found}).decode())


if __name__ == "__main__":
    with torch.inference_mode():
        main()
