"""The kernels that are measured compute what their peers do."""

import pytest
import torch

from benchmarks.kernels.experts import SHAPES, combine_cases, moe_cases
from benchmarks.kernels.experts_case import (
    ACTIVATION,
    make_case,
    projection_call,
    route,
    sorted_pairs,
)
from kernels.gpu.device import shared_memory_of
from kernels.gpu.moe import moe_experts_reference
from kernels.gpu.moe_config import MoeConfig, MoeShape, Tile, config_for

pytestmark = pytest.mark.kernel_change

TINY = MoeShape(4, 32, 64, 2, "bfloat16")
TILE = Tile(32, 32, 1, 4, 2)


def relative(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_kernels_and_their_peers_compute_the_same(device, routing):
    def configs(shape):
        return lambda num_tokens: MoeConfig(16, TILE, TILE)

    (planned,) = moe_cases("tiny", device, configs, shape=TINY, all_num_tokens=(6,), routings=(routing,))
    case = planned.make()
    assert planned.name == f"tiny bfloat16, 6 tokens, {routing}"
    assert case.relative_error() < 1e-2
    assert {"grouped_mm", "loop over experts"} <= set(case.peers)
    assert all(len(calls) == len(case.calls) for calls in case.peers.values())
    ours = case.calls[3]()
    for calls in case.peers.values():
        assert relative(calls[3](), ours) < 1e-2
    assert relative(case.calls[4](), ours) > 0.1


def test_combining_is_what_torch_does(device):
    (planned,) = combine_cases(device, all_num_tokens=(3,))
    case = planned.make()
    assert relative(case.calls[0](), case.peers["torch"][0]()) < 5e-3


def test_bytes_and_operations_are_counted_for_the_experts_that_are_chosen(device):
    case = make_case(TINY, 6, device)
    case.expert_ids[:] = torch.tensor([1, 3], device=device)
    assert case.num_distinct_experts == 2
    assert case.max_load == 6
    assert case.num_bytes == 2 * (2 * 3 * 32 * 64) + 2 * (2 * 6 * 64)
    assert case.num_flops == 2 * 3 * 32 * 64 * 12
    one_expert = 3 * SHAPES["Qwen3-30B-A3B"].intermediate_size * SHAPES["Qwen3-30B-A3B"].hidden_size
    assert one_expert * 2 == 9437184


@pytest.mark.parametrize("weights", ["int8", "fp8", "int4", "float16"])
def test_cases_exist_for_every_stored_format(device, weights):
    shape = MoeShape(3, 32, 64, 2, weights, 32 if weights == "int4" else 0)
    case = make_case(shape, 2, device)
    expected = moe_experts_reference(case.x, case.expert_ids, case.expert_weights, case.experts, ACTIVATION)
    assert relative(case.run(config_for(shape, 2, shared_memory_of(torch.device("cpu")))), expected) < 2e-2
    assert 0.01 < expected.std() < 10


def test_skewed_routing_is_skewed_and_experts_of_a_token_are_distinct():
    loads = {}
    for routing in ("uniform", "zipf"):
        ids = route(500, 16, 4, routing, torch.Generator().manual_seed(0))
        assert all(len(set(row)) == 4 for row in ids.tolist())
        loads[routing] = torch.bincount(ids.flatten(), minlength=16).max()
    assert loads["uniform"] < 180 < 350 < loads["zipf"]


def test_projections_alone_make_what_the_operation_makes(device):
    case = make_case(TINY, 3, device)
    pairs = sorted_pairs(case, 16)
    for projection in ("gate_up", "down"):
        projection_call(case, pairs, 16, projection, TILE)()
    hidden = case.workspace.hidden.clone()
    case.run(MoeConfig(16, TILE, TILE))
    assert torch.equal(case.workspace.hidden, hidden)
