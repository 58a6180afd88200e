"""What a rank of several hears of its own rows and of others, on their way to the experts."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor

from experts.prediction.prefetcher import GateRecall, PrefetchObserver, RankPrefetcher
from experts.routing.files import Tap
from experts.routing.gates import GatePreview, GatesAhead
from experts.routing.predictors import RecallSample
from moeserve.plan import Chunk, StepPlan

NUM_EXPERTS, TOP_K = 4, 2


class Gate:
    """Says of a state [T, E] that it is the logits."""

    product = None

    def preview(self, x: Tensor) -> Tensor:
        return x


def gates(num_layers: int) -> GatesAhead:
    ones = [torch.ones(NUM_EXPERTS)] * num_layers
    return GatesAhead(GatePreview([Gate()] * num_layers, ones, 3, Tap.EARLY), num_layers)


def plan(num_rows: int) -> StepPlan:
    return StepPlan(0, [Chunk("a", array("i", [0] * num_rows), 0, array("i"), None)] if num_rows else [])


def test_own_rows_are_followed_once_the_loads_have_begun_and_also_where_no_rows_arrive() -> None:
    class Followed(RankPrefetcher):
        def __init__(self) -> None:
            self.followed: list[tuple[int, list[list[int]]]] = []

        def follow(self, layer: int, expert_ids: Tensor) -> None:
            self.followed.append((layer, expert_ids.tolist()))

    observer = Followed()
    ids = torch.tensor([[2, 3]])
    for layer, come in enumerate(([[2, -1]], [])):
        observer.chose(layer, ids)
        assert len(observer.followed) == layer
        arrived = torch.tensor(come, dtype=torch.int64).view(-1, 2)
        observer.arrived(layer, torch.eye(NUM_EXPERTS)[: len(come)], arrived, torch.ones(len(come), 2))
    assert observer.followed == [(0, [[2, 3]]), (1, [[2, 3]])]


@pytest.mark.parametrize("num_rows", [1, 2, 20])
def test_gates_are_judged_by_the_rows_at_home(num_rows: int) -> None:
    recall = RecallSample(interval=2)
    observer = GateRecall(PrefetchObserver(), gates(3), recall)
    rows = torch.eye(NUM_EXPERTS)[torch.tensor([1, 2] * 10)[:num_rows]] + 0.1 * torch.eye(NUM_EXPERTS)[0]
    right, wrong = rows.topk(TOP_K).indices, (-rows).topk(TOP_K).indices
    observer.begin(plan(num_rows))
    observer.gated(2, rows, wrong)
    observer.abandon(plan(num_rows))
    for _ in range(2):
        observer.begin(plan(num_rows))
        for layer, chosen in enumerate((wrong, right, wrong)):
            observer.gated(layer, rows, chosen)
        observer.launched()
        observer.begin(plan(0))
        observer.launched()
    counted = {(count.source, count.distance): count for count in recall.counts()}
    assert set(counted) == {("gate-early", 1), ("gate-early", 2)}
    judged = len(range(0, num_rows, -(-num_rows // 8))) * TOP_K
    assert counted["gate-early", 1].num_chosen == 2 * judged
    assert counted["gate-early", 1].num_recalled == judged
    assert (counted["gate-early", 2].num_chosen, counted["gate-early", 2].num_recalled) == (judged, 0)


def test_rows_that_a_layer_leaves_out_are_not_judged() -> None:
    recall = RecallSample(interval=1)
    observer = GateRecall(PrefetchObserver(), gates(2), recall)
    rows = torch.rand(16, NUM_EXPERTS)
    observer.begin(plan(16))
    for layer, count in enumerate((16, 8)):
        chosen = rows[:count].topk(TOP_K).indices
        observer.gated(layer, rows[:count], chosen)
    observer.launched()
    assert recall.counts() == []
