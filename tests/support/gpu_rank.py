"""One rank of several as on GPUs: `python -m tests.support.gpu_rank RANK RANKS MODEL RENDEZVOUS SHAPE REDUNDANT`.

Without a GPU its kernels run in Triton's interpreter and its collectives over gloo. Every rank plans for all, as rank 0
does while serving, computes its own plans and learns the others' results. Prints the tokens of all requests.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from pathlib import Path

import torch
import torch.distributed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from kernels.gpu.interpreter import mend_interpreter

    mend_interpreter()

from experts.collectives import Collectives
from experts.placement.choice import choose_placement
from experts.routing.step_routing import NOT_COMPUTED, unpack
from moeserve.cuda.gpu_model import GpuSettings
from moeserve.expert_service.recording import routing_shape
from moeserve.kv_budget import KvBudget
from moeserve.kv_pool import kv_block_bytes
from moeserve.model_loading import ModelPlan
from moeserve.models.families import build_spec
from moeserve.models.hf_config import load_config
from moeserve.plan import StepPlan, StepResult, wanted_logits
from moeserve.ranks.gpu_member import GpuMember
from moeserve.request import Request, SamplingParams
from moeserve.scheduler import Scheduler
from radix_cache import PrefixCache

MAX_LEN, NUM_BLOCKS, BLOCK_SIZE = 32, 24, 4
# One after the other, so that at first one rank has nothing to do; the third finds the first's prefix.
ARRIVALS = {
    0: [[3, 14, 15, 92, 65, 35, 89, 79, 32]],
    2: [[27, 18], [3, 14, 15, 92, 65, 35, 89, 7]],
    4: [[41, 42, 43, 44, 45, 46]],
}
MAX_TOKENS = 3


def make_member(rank: int, num_ranks: int, folder: Path, rendezvous: Path, shape: str, redundant: int) -> GpuMember:
    spec = build_spec(load_config(folder))
    assert spec.moe is not None
    collectives = Collectives(rank, num_ranks, rendezvous, timeout=120)
    sizes = (len(spec.moe_layers), spec.moe.num_experts, num_ranks)
    placement = choose_placement(
        "contiguous" if not redundant else "balanced",
        sizes,
        num_redundant=redundant,
        num_nodes=1,
        num_groups=1,
        statistics=None,
    )
    memory = NUM_BLOCKS * kv_block_bytes(spec.kv_layers, BLOCK_SIZE, torch.float32)
    settings = GpuSettings(BLOCK_SIZE, 4, 8, MAX_LEN, memory, 0.9, False, hears_gates=True)
    plan = ModelPlan(spec, torch.float32, KvBudget(0, 0), 0, placement)
    return GpuMember(folder, plan, settings, collectives, shape=shape, timeout=120)


def serve(member: GpuMember) -> list[list[int]]:
    num_ranks = member.collectives.num_ranks
    scheduler = Scheduler(
        [PrefixCache(member.model.kv.num_blocks, BLOCK_SIZE) for _ in range(num_ranks)],
        max_num_seqs=4,
        max_num_batched_tokens=8,
        max_num_queued_reqs=9,
        max_model_len=MAX_LEN,
    )
    tokens: list[list[int]] = []
    idle_steps = 0
    for step in range(100):
        for prompt in ARRIVALS.get(step, ()):
            sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
            scheduler.add(Request(f"{len(tokens)}", array("i", prompt), sampling))
            tokens.append([])
        plans = scheduler.schedule()
        if plans is None:
            if step > max(ARRIVALS):
                break
            continue
        idle_steps += any(not plan.chunks for plan in plans)
        for output in scheduler.commit(plans, run(member, plans)):
            assert output.error is None
            if output.token_id is not None:
                tokens[int(output.request.request_id)].append(output.token_id)
    scheduler.check_idle()
    assert num_ranks == 1 or idle_steps > 0
    return tokens


def run(member: GpuMember, plans: list[StepPlan]) -> list[StepResult]:
    member.experts.begin_step([plan.num_tokens for plan in plans], [plan.num_logit_rows for plan in plans])
    own = member.runner.run(plans[member.collectives.rank])
    if plans[member.collectives.rank].chunks:
        check_routing(member, plans[member.collectives.rank], own)
    results: list[StepResult] = [own] * len(plans)
    torch.distributed.all_gather_object(results, own)
    return results


def check_routing(member: GpuMember, plan: StepPlan, result: StepResult) -> None:
    """Every row of this rank chose distinct experts in each layer that computed it."""
    shape = routing_shape(member.model.spec)
    assert shape is not None
    assert result.routing is not None
    ids = unpack(bytes(result.routing), shape, plan.num_tokens, wanted_logits(plan.chunks)[0])
    computed = ids[ids[..., 0] != NOT_COMPUTED]
    assert len(computed)
    assert computed.min() >= 0
    assert computed.max() < shape.num_experts
    assert all(len(set(row)) == shape.top_k for row in computed.tolist())


def main() -> None:
    rank, num_ranks = map(int, sys.argv[1:3])
    shape, redundant = sys.argv[5], int(sys.argv[6])
    torch.set_num_threads(1)
    member = make_member(rank, num_ranks, Path(sys.argv[3]), Path(sys.argv[4]), shape, redundant)
    member.warm_up()
    assert member.model.kv.num_blocks == NUM_BLOCKS
    tokens = serve(member)
    if num_ranks > 1:
        assert sum(member.experts.sent()) > 0
    member.close()
    print(json.dumps(tokens))


if __name__ == "__main__":
    main()
