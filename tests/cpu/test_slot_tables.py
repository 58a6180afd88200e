"""Tables of a placement stay where they are when it changes: captured graphs follow the new placement."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from experts.parallel.collectives import Collectives
from experts.parallel.dispatch import ExpertParallel
from experts.parallel.tables import SlotTables
from experts.placement.balanced import load_balanced
from experts.placement.placement import Placement, contiguous
from kernels.activation import Activation

NUM_EXPERTS, NUM_ROWS, TOP_K, HIDDEN = 6, 4, 2, 3


class Echo(Collectives):
    """Collectives of two ranks. The other rank sends the same as this one."""

    def all_gather(self, rows: Tensor) -> Tensor:
        return torch.cat((rows, rows))

    def reduce_scatter(self, parts: Tensor) -> Tensor:
        return parts.view(2, -1, parts.shape[1]).sum(0)


def slots_as_rows(x: Tensor, slots: Tensor, weights: Tensor, _experts: object, _activation: Activation) -> Tensor:
    """Instead of what experts compute: the sum of the slots that do, from one on, weighted."""
    return ((slots + 1) * weights).sum(1, keepdim=True).expand(x.shape).float()


def dispatch_of(experts: ExpertParallel[Any]) -> Any:
    dispatch = experts.dispatch_of(0)
    return lambda x, ids, weights: dispatch(x, ids, weights, None, Activation())


def make() -> ExpertParallel[Any]:
    experts: ExpertParallel[Any] = ExpertParallel(
        Echo(0, 2), contiguous(1, NUM_EXPERTS, 2), [0], last_layer=7, compute=slots_as_rows
    )
    experts.begin_step([NUM_ROWS] * 2, [NUM_ROWS] * 2)
    return experts


def test_what_was_captured_goes_by_a_placement_that_changes_later() -> None:
    experts = make()
    inputs = torch.zeros(NUM_ROWS, HIDDEN), torch.tensor([[0, 3], [1, 5], [2, 4], [-1, -1]]), torch.ones(NUM_ROWS, 2)
    # A trace holds the tensors that it met, as a CUDA graph holds their addresses, and runs no Python.
    captured = make_fx(dispatch_of(experts))(*inputs)
    before = captured(*inputs)
    assert before[:, 0].tolist() == [2 * 1.0, 2 * 2.0, 2 * 3.0, 0.0]
    ranks = list(experts.placement.ranks[0])
    ranks[0], ranks[3] = ranks[3], ranks[0]
    experts.place(0, tuple(ranks))
    after = captured(*inputs)
    assert after.tolist() == dispatch_of(experts)(*inputs).tolist()
    assert after[:, 0].tolist() == [2 * 1.0, 2 * 2.0, 2 * 3.0, 0.0]
    other = torch.tensor([[0, 4], [1, 5], [2, 4], [-1, 3]])
    assert captured(inputs[0], other, inputs[2])[:, 0].tolist() == [0.0, 2 * 2.0, 2 * 3.0, 2 * 1.0]


@pytest.mark.parametrize("here", [0, 1])
def test_expert_minus_one_has_no_slot_anywhere(here: int) -> None:
    placement = Placement(2, (((0,), (0, 1), (1,)),))
    tables = SlotTables.of(placement.serving(0), [[0, 1], [1, 2]], here)
    ids = torch.tensor([[0, 1, 2, -1], [-1, 2, 1, 0]])
    assert tables.slots_on_ranks(ids)[..., 0, 3].tolist() == [-1, -1]
    assert (
        tables.slots_here(ids)[:, :].tolist()
        == [
            [[0, 1, -1, -1], [-1, -1, -1, 0]],
            [[-1, -1, 1, -1], [-1, 1, 0, -1]],
        ][here]
    )


def test_tables_become_those_of_another_placement_where_they_lie() -> None:
    first, second = contiguous(1, NUM_EXPERTS, 2), contiguous(1, NUM_EXPERTS, 2)
    ranks = list(first.ranks[0])
    ranks[1], ranks[4] = ranks[4], ranks[1]
    second = second.with_layer(0, tuple(ranks))
    tables, other = (
        SlotTables.of(placement.serving(0), [placement.experts_on(0, rank) for rank in (0, 1)], 0)
        for placement in (first, second)
    )
    addresses = tables.to_ranks.data_ptr(), tables.from_homes.data_ptr()
    assert not tables.to_ranks.equal(other.to_ranks)
    tables.become(other)
    assert tables.to_ranks.equal(other.to_ranks)
    assert tables.from_homes.equal(other.from_homes)
    assert (tables.to_ranks.data_ptr(), tables.from_homes.data_ptr()) == addresses


@pytest.mark.parametrize("seed", range(6))
def test_replicas_are_chosen_alike_by_tables_of_all_ranks_and_without_torch(seed: int) -> None:
    random = np.random.default_rng(seed)
    num_ranks, num_experts, top_k = 4, 12, 3
    placement = load_balanced(random.random((1, num_experts)), num_ranks, num_redundant=8)
    serving = placement.serving(0)
    held = [placement.experts_on(0, rank) for rank in range(num_ranks)]
    tables = [SlotTables.of(serving, held, rank) for rank in range(num_ranks)]
    ids = random.random((num_ranks * 10, num_experts)).argsort(axis=1)[:, :top_k]
    homes = np.repeat(np.arange(num_ranks), 10)
    chosen = serving.ranks(homes, ids)
    arrived = [of_rank.slots_here(torch.from_numpy(ids)) for of_rank in tables]
    for row, (home, experts) in enumerate(zip(homes.tolist(), ids.tolist(), strict=True)):
        sent = tables[home].slots_on_ranks(torch.from_numpy(ids[row : row + 1]))[:, 0]
        for place, expert in enumerate(experts):
            rank = int(chosen[row, place])
            assert held[rank][int(sent[rank, place])] == expert
            assert [int(slots[row, place]) for slots in arrived] == sent[:, place].tolist()
            assert (sent[:, place] >= 0).sum() == 1
            if home in placement.ranks[0][expert]:
                assert rank == home
        by_default = set(serving.destinations[home, experts].tolist()) - {home}
        assert set(chosen[row].tolist()) - {home} <= by_default


def test_a_replica_on_a_rank_that_the_token_is_sent_to_anyway_saves_a_row() -> None:
    serving = Placement(3, (((0,), (1,), (2,), (1, 2), (0,)),)).serving(0)
    assert serving.destinations[0, 3] == 1
    ids = np.array([[2, 3], [0, 3], [1, 3]])
    assert serving.ranks(np.zeros(3, np.int64), ids).tolist() == [[2, 2], [0, 1], [1, 1]]


def test_padding_has_no_slot_where_there_are_replicas() -> None:
    placement = Placement(2, (((0,), (0, 1), (1,)),))
    tables = SlotTables.of(placement.serving(0), [[0, 1], [1, 2]], 1)
    assert tables.replicas is not None
    assert tables.slots_here(torch.tensor([[-1, -1], [-1, 2]])).tolist() == [[-1, -1], [-1, 1]]
