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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    from benchmarks.kernels.interpreter import mend_interpreter

    mend_interpreter()

from experts.parallel.collectives import Collectives
from experts.placement.rebalance import Migration
from experts.placement.search import choose_placement
from experts.routing.choices import NOT_COMPUTED, unpack
from moeserve.device import KvBudget
from moeserve.engine.assemble import load_rank
from moeserve.engine.experts.observe import routing_shape
from moeserve.engine.memory_plan import ModelPlan
from moeserve.engine.rank import Group, Rank
from moeserve.engine.ranks.together import StepRows, captures_decodes
from moeserve.model.families import build_spec, load_config
from moeserve.plan import Pending, StepPlan, StepResult, wanted_logits
from tests.support.rank_requests import NUM_BLOCKS, TIMEOUT, RankCase, serve


def make_rank(case: RankCase, collectives: Collectives) -> Rank:
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
    plan = ModelPlan(spec, torch.float32, KvBudget(0, 0), 0, placement, device="cuda")
    config = case.config(spec, collectives.num_ranks)
    return load_rank(folder, plan, config, lambda _: None, collectives).start()


class Ranks:
    """Computes the plans of this rank and learns the results of the others.

    Counts steps: those in which a rank has nothing, those in lasting batches, and of these those with an idle rank and
    with two ranks of unequal batches; and chunks whose token was not known yet.
    """

    def __init__(self, rank: Rank, moves: bool) -> None:
        self._rank, self._moves = rank, moves
        self.counts = Counter[str]()

    def check(self) -> None:
        """Nothing can be missing."""

    def launch(self, plans: Sequence[StepPlan]) -> OfAllRanks:
        rank = self._rank
        assert rank.group is not None
        assert rank.migrator is not None
        if self._moves and plans[0].step > 1 and rank.migrator.version == 0:
            swap_experts(rank)
        rows = StepRows.of(plans)
        rank.begin_step(rows)
        self._count(rows, plans)
        plan = plans[rank.group.collectives.rank]
        return OfAllRanks(rank, plan, rank.runner.launch(plan), len(plans))

    def check_counts(self, case: RankCase) -> None:
        """Decodes are computed in lasting batches where that can be, by ranks with unequal batches or none."""
        counts = self.counts
        captures = captures_decodes(case.shape, eager=case.eager, all_resident=case.num_slots is None)
        assert counts["idle"] > 0
        assert (counts["lasting"] > 0) == captures, counts
        if captures and case.num_requests > 2:
            assert min(counts["lasting, idle"], counts["lasting, unequal"], counts["not known"]) > 0, counts

    def _count(self, rows: StepRows, plans: Sequence[StepPlan]) -> None:
        least, most = min(rows.num_rows), max(rows.num_rows)
        lasts = group_of(self._rank).steps.decode_size is not None
        self.counts["idle"] += least == 0
        self.counts["lasting"] += lasts
        self.counts["lasting, idle"] += lasts and least == 0
        self.counts["lasting, unequal"] += lasts and 0 < least < most
        self.counts["not known"] += sum(chunk.drawn_by is not None for plan in plans for chunk in plan.chunks)


@dataclass
class OfAllRanks:
    """A step of all ranks. step: of this one."""

    rank: Rank
    plan: StepPlan
    step: Pending[StepResult]
    num_ranks: int
    done: bool = False

    def result(self) -> list[StepResult]:
        own = self.step.result()
        if self.plan.chunks:
            check_routing(self.rank, self.plan, own)
        found: list[StepResult] = [own] * self.num_ranks
        torch.distributed.all_gather_object(found, own)
        return found


def group_of(rank: Rank) -> Group:
    assert rank.group is not None
    return rank.group


def swap_experts(rank: Rank) -> None:
    """The first and the last expert of a layer change places, as rank 0 would have all ranks do between two steps."""
    experts, migrator = group_of(rank).experts, rank.migrator
    assert migrator is not None
    ranks = list(experts.placement.ranks[0])
    ranks[0], ranks[-1] = ranks[-1], ranks[0]
    migrator.begin(Migration(1, 0, tuple(ranks)))
    while (outcome := migrator.outcome()) is None:
        time.sleep(0.01)
    assert outcome.error is None, outcome
    migrator.switch(1)
    assert experts.placement.ranks[0] == tuple(ranks)


def check_routing(rank: Rank, plan: StepPlan, result: StepResult) -> None:
    """Every row of this rank chose distinct experts in each layer that computed it."""
    shape = routing_shape(rank.model.spec)
    assert shape is not None
    assert result.routing is not None
    ids = unpack(bytes(result.routing), shape, plan.num_tokens, wanted_logits(plan.chunks)[0])
    computed = ids[ids[..., 0] != NOT_COMPUTED]
    assert len(computed)
    assert computed.min() >= 0
    assert computed.max() < shape.num_experts
    assert all(len(set(row)) == shape.top_k for row in computed.tolist())


def main() -> None:
    number, num_ranks = map(int, sys.argv[1:3])
    torch.set_num_threads(1)
    collectives = Collectives(number, num_ranks)
    collectives.open(Path(sys.argv[3]), TIMEOUT)
    said = []
    for fields in json.loads(sys.argv[4]):
        case = RankCase(**fields)
        rank = make_rank(case, collectives)
        assert rank.migrator is not None
        assert rank.model.kv.num_blocks == NUM_BLOCKS
        ranks = Ranks(rank, case.moves)
        said.append(serve(case, rank.model.kv, num_ranks, ranks))
        ranks.check_counts(case)
        assert rank.migrator.version == case.moves
        if num_ranks > 1:
            assert sum(group_of(rank).experts.sent()) > 0
        if (stats := rank.memory_stats()) is not None:
            counters = stats.counters
            assert min(counters.num_evictions, counters.num_misses, counters.prefetch_bytes) > 0, counters
            assert all(len(experts) == case.num_slots for experts in stats.resident)
            # In layer 0 experts that have moved may still be there.
            assert set(stats.resident[1]) <= set(group_of(rank).experts.experts_here(1))
    collectives.close()
    print(json.dumps(said))


if __name__ == "__main__":
    main()
