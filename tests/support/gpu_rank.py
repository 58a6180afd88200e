"""One rank of several as on GPUs: `python -m tests.support.gpu_rank RANK RANKS RENDEZVOUS CASES`.

CASES is a JSON list of the fields of `RankCase`. Without a GPU the kernels run in Triton's interpreter and the
collectives over gloo. Every rank plans for all, as rank 0 does while serving, computes its own plans and learns the
others' results. Prints, for each case and request, its tokens with their log probabilities.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from kernels.gpu.interpreter import mend_interpreter

    mend_interpreter()

from experts.collectives import Collectives
from experts.placement.choice import choose_placement
from experts.placement.rebalance import Migration
from experts.routing.step_routing import NOT_COMPUTED, unpack
from moeserve.expert_service.recording import routing_shape
from moeserve.kv_budget import KvBudget
from moeserve.model_loading import ModelPlan
from moeserve.models.families import build_spec
from moeserve.models.hf_config import load_config
from moeserve.plan import StepPlan, StepResult, wanted_logits
from moeserve.ranks.gpu_member import GpuMember
from moeserve.ranks.step_rows import StepRows, captures_decodes
from tests.support.rank_requests import NUM_BLOCKS, RankCase, serve

TIMEOUT = 120


def make_member(case: RankCase, collectives: Collectives) -> GpuMember:
    folder = Path(case.model)
    spec = build_spec(load_config(folder))
    assert spec.moe is not None
    placement = choose_placement(
        "contiguous",
        (len(spec.moe_layers), spec.moe.num_experts, collectives.num_ranks),
        num_redundant=case.redundant,
        num_nodes=1,
        num_groups=1,
        statistics=None,
    )
    plan = ModelPlan(spec, torch.float32, KvBudget(0, 0), 0, placement)
    return GpuMember(folder, plan, case.settings(spec), collectives, shape=case.shape, timeout=TIMEOUT)


@dataclass
class Together:
    """Steps in lasting batches: how many, and of them those with an idle rank and with two ranks of unequal batches."""

    all: int = 0
    idle: int = 0
    unequal: int = 0

    def count(self, num_rows: Sequence[int]) -> None:
        self.all += 1
        self.idle += min(num_rows) == 0
        self.unequal += 0 < min(num_rows) < max(num_rows)


def run_on_ranks(member: GpuMember, moves: bool, together: Together, plans: list[StepPlan]) -> list[StepResult]:
    if moves and plans[0].step > 1 and member.migrator.version == 0:
        swap_experts(member)
    rows = StepRows.of(plans)
    member.begin_step(rows)
    if member.steps.decode_size is not None:
        together.count(rows.num_rows)
    own = member.runner.run(plans[member.collectives.rank])
    if plans[member.collectives.rank].chunks:
        check_routing(member, plans[member.collectives.rank], own)
    results: list[StepResult] = [own] * len(plans)
    torch.distributed.all_gather_object(results, own)
    return results


def check_together(case: RankCase, together: Together) -> None:
    """Decodes are computed in lasting batches where that can be, by ranks with unequal batches or none."""
    captures = captures_decodes(case.shape, eager=case.eager, all_resident=case.num_slots is None)
    assert (together.all > 0) == captures
    if captures and case.num_requests > 2:
        assert together.idle > 0, together
        assert together.unequal > 0, together


def swap_experts(member: GpuMember) -> None:
    """The first and the last expert of a layer change places, as rank 0 would have all ranks do between two steps."""
    ranks = list(member.experts.placement.ranks[0])
    ranks[0], ranks[-1] = ranks[-1], ranks[0]
    member.migrator.begin(Migration(1, 0, tuple(ranks)))
    while (outcome := member.migrator.outcome()) is None:
        time.sleep(0.01)
    assert outcome.error is None, outcome
    member.migrator.switch(1)
    assert member.experts.placement.ranks[0] == tuple(ranks)


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
    torch.set_num_threads(1)
    collectives = Collectives(rank, num_ranks, Path(sys.argv[3]), TIMEOUT)
    said = []
    for fields in json.loads(sys.argv[4]):
        case = RankCase(**fields)
        member = make_member(case, collectives)
        member.warm_up()
        assert member.model.kv.num_blocks == NUM_BLOCKS
        together = Together()
        said.append(serve(case, member.model.kv, num_ranks, partial(run_on_ranks, member, case.moves, together)))
        check_together(case, together)
        assert member.migrator.version == case.moves
        if num_ranks > 1:
            assert sum(member.experts.sent()) > 0
        if (stats := member.memory_stats()) is not None:
            counters = stats.counters
            assert min(counters.num_evictions, counters.num_misses, counters.prefetch_bytes) > 0, counters
            assert all(len(experts) == case.num_slots for experts in stats.resident)
            # In layer 0 those that have moved may still be there.
            assert member.experts.experts_here(1) >= set(stats.resident[1])
    collectives.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
