"""NCCL on one GPU: begins a group of one rank, captures its collectives in a graph, replays them and leaves."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist


def main() -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531", "NCCL_GRAPH_REGISTER": "0"}
    began = time.monotonic()
    dist.init_process_group("nccl", rank=0, world_size=1)
    x, out = torch.ones(64, 2048, device="cuda"), torch.empty(64, 2048, device="cuda")

    def exchange() -> None:
        dist.all_gather_into_tensor(out, x)
        dist.all_to_all_single(out, x)
        dist.all_reduce(out)

    exchange()
    torch.cuda.synchronize()
    print(f"group and first collectives after {time.monotonic() - began:.1f} s")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        exchange()
    began = time.monotonic()
    for _ in range(100):
        graph.replay()
    torch.cuda.synchronize()
    print(f"100 replays of three collectives in {1000 * (time.monotonic() - began):.1f} ms")
    del graph
    dist.destroy_process_group()
    print("left the group")


if __name__ == "__main__":
    main()
