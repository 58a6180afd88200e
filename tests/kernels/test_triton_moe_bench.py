"""What is measured computes the same everywhere, and the tuner keeps what was fastest."""

import pytest
import torch
from triton.runtime.errors import OutOfResources

from benchmarks.kernels.experts import SHAPES, combine_cases, moe_cases
from kernels.gpu.moe import device_of, moe_experts_reference
from kernels.gpu.moe_config import MoeConfig, MoeShape, Tile, heuristic_config
from moeserve.tune.experts import ACTIVATION, MoeCase, make_case, projection_call, route, sorted_pairs, tune_shape

pytestmark = pytest.mark.kernel_change

TINY = MoeShape(4, 32, 64, 2, "bfloat16")
TILE = Tile(32, 32, 1, 4, 2)


def relative(actual, expected):
    return ((actual.float() - expected.float()).norm() / expected.float().norm()).item()


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_kernels_and_their_peers_compute_the_same(device, routing):
    def configs(shape):
        return lambda num_tokens: MoeConfig("tiled", 16, TILE, TILE)

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
    assert relative(case.run(heuristic_config(shape, 2, device_of(torch.device("cpu")))), expected) < 2e-2
    assert 0.01 < expected.std() < 10


def test_skewed_routing_is_skewed_and_experts_of_a_token_are_distinct():
    loads = {}
    for routing in ("uniform", "zipf"):
        ids = route(500, 16, 4, routing, torch.Generator().manual_seed(0))
        assert all(len(set(row)) == 4 for row in ids.tolist())
        loads[routing] = torch.bincount(ids.flatten(), minlength=16).max()
    assert loads["uniform"] < 180 < 350 < loads["zipf"]


def test_the_tuner_keeps_the_fastest_of_all_that_it_timed(device):
    times, lines, sets = [], [], set()

    def time_us(calls):
        # The work is done elsewhere in these tests; here it is the bookkeeping that counts.
        sets.add(len(calls))
        times.append(1000.0 - len(times))
        return times[-1]

    found = tune_shape(TINY, (2, 300), device, time_us=time_us, report=lines.append)
    assert next(found)[0] == 2, "the first is known before the next is timed"
    assert len(lines) < 20
    number, tuned = next(found)
    assert (number, tuned.microseconds) == (300, times[-1])
    assert next(found, None) is None
    # Weights this small are there several times, so that no run finds them in the cache.
    assert sets == {8}
    assert tuned.config.variant in ("tiled", "persistent")
    assert lines[-1].endswith(f"{times[-1]:.1f} us")
    assert any("persistent" in line for line in lines)
    assert any("gemv" in line for line in lines)


def test_candidates_that_do_not_run_or_are_wrong_are_passed_over(device, monkeypatch):
    lines, fast = [], iter(range(1, 10000))
    plain = MoeCase.relative_error

    def time_us(calls):
        if next(fast) <= 5:
            raise OutOfResources(1, 2, "shared memory")
        return 100.0

    def relative_error(case, config):
        return 0.5 if config.variant == "gemv_split" else plain(case, config)

    monkeypatch.setattr(MoeCase, "relative_error", relative_error)
    ((_, tuned),) = tune_shape(TINY, (2,), device, time_us=time_us, report=lines.append)
    assert tuned.config.variant in ("gemv", "tiled")
    assert any(line.startswith("skipped gemv") and line.endswith("OutOfResources") for line in lines)
    assert any(line.startswith("WRONG: MoeConfig(variant='gemv_split'") for line in lines)


def test_where_nothing_runs_that_is_the_error(device):
    def time_us(calls):
        raise OutOfResources(1, 2, "shared memory")

    with pytest.raises(RuntimeError, match="no candidate for moe-e4-i32-h64-k2-bfloat16 runs"):
        list(tune_shape(TINY, (2,), device, time_us=time_us))


@pytest.mark.parametrize("variant", ["gemv", "gemv_split", "tiled", "persistent"])
def test_projections_alone_make_what_the_operation_makes(device, variant):
    case = make_case(TINY, 3, device)
    pairs = None if variant.startswith("gemv") else sorted_pairs(case, 16)
    for projection in ("gate_up", "down"):
        projection_call(case, variant, pairs, 16, projection, TILE, device_of(device))()
    hidden = case.workspace.hidden.clone()
    case.run(MoeConfig(variant, 16, TILE, TILE))
    assert torch.equal(case.workspace.hidden, hidden)
