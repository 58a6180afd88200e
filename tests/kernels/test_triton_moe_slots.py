"""Experts in slots: packed bytes, put, dropped and put elsewhere, always the same results."""

import pytest
import torch

from kernels.gpu.moe_config import MoeConfig, Tile
from kernels.gpu.moe_experts import MoeWorkspace, TritonMoe, moe_experts_reference
from kernels.gpu.moe_slots import SlotLayout
from kernels.packed_experts import ExpertShape
from kernels.specs import Activation

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, NUM_TOKENS = 64, 32, 4, 2, 5
SILU = Activation()


def layout_of(device, weights=None, variant="tiled", num_slots=None, has_bias=True):
    tile = Tile(32, 32, 1, 4, 2)
    sizes = (NUM_TOKENS, TOP_K, NUM_EXPERTS, HIDDEN, WIDTH, torch.float16, device)
    moe = TritonMoe(lambda _: MoeConfig(variant, 16, tile, tile), MoeWorkspace.allocate(*sizes), 3)
    shape = ExpertShape(HIDDEN, WIDTH, torch.float16, torch.float16, has_bias)
    group = 32 if weights == "int4" else 0
    return SlotLayout(shape, device, moe, weights=weights, group_size=group, num_slots=num_slots)


def pack_all(layout, has_bias=True):
    random = torch.Generator().manual_seed(3)

    def normal(*sizes, scale=1.0):
        return (torch.randn(sizes, generator=random) * scale).half()

    for _ in range(NUM_EXPERTS):
        biases = (normal(2 * WIDTH), normal(HIDDEN)) if has_bias else ()
        yield layout.pack(normal(2 * WIDTH, HIDDEN, scale=0.1), normal(HIDDEN, WIDTH, scale=0.1), *biases)


def batch(device, num_experts=NUM_EXPERTS):
    random = torch.Generator().manual_seed(4)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=random).half()
    ids = torch.rand(NUM_TOKENS, num_experts, generator=random).topk(TOP_K).indices
    return x.to(device), ids.to(device), torch.rand(NUM_TOKENS, TOP_K, generator=random).to(device)


@pytest.mark.parametrize("variant", ["gemv", "tiled", "persistent"])
@pytest.mark.parametrize("weights", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_packed_experts_compute_what_they_hold(device, weights, variant, has_bias):
    if (weights, variant) == ("int4", "persistent"):
        variant = "gemv"
    layout = layout_of(device, weights, variant, has_bias=has_bias)
    experts = layout.experts(NUM_EXPERTS)
    assert len(experts) == NUM_EXPERTS
    for expert, packed in enumerate(pack_all(layout, has_bias)):
        assert packed.shape == (layout.num_bytes,)
        experts.put(expert, packed)
    x, ids, gates = batch(device)
    expected = moe_experts_reference(x, ids, gates, experts.resident, SILU)
    out = experts(x, ids, gates, SILU)
    assert out.dtype == torch.float32
    assert (out - expected).norm() / expected.norm() < 2e-3


def test_an_expert_that_was_dropped_and_put_elsewhere_computes_the_same_bits(device):
    layout = layout_of(device, num_slots=2)
    experts = layout.experts(NUM_EXPERTS)
    packed = list(pack_all(layout))
    experts.put(0, packed[0])
    experts.put(1, packed[1])
    with pytest.raises(ValueError, match="2 slots"):
        experts.put(2, packed[2])
    x, ids, gates = batch(device, num_experts=2)
    before = experts(x, ids, gates, SILU)
    experts.drop(0)
    experts.drop(1)
    experts.put(0, packed[0])
    experts.put(3, packed[3])
    experts.drop(3)
    assert not torch.equal(experts(x, ids, gates, SILU), before)
    experts.put(1, packed[1])
    assert torch.equal(experts(x, ids, gates, SILU), before)


@pytest.mark.parametrize("variant", ["gemv", "gemv_split", "tiled", "persistent"])
def test_products_made_in_parts_sum_to_the_same_bits(device, variant):
    layout = layout_of(device, variant=variant)
    experts = layout.experts(NUM_EXPERTS)
    for expert, packed in enumerate(pack_all(layout)):
        experts.put(expert, packed)
    x, ids, gates = batch(device)
    products = torch.zeros(NUM_TOKENS, TOP_K, HIDDEN, device=device)
    for few in (ids < 2, ids >= 2):
        experts.multiply(x, ids.where(few, -1), SILU, products)
    assert torch.equal(experts.combine(products, gates), experts(x, ids, gates, SILU))


def test_layouts_are_told_apart_by_name(device):
    names = {layout_of(device, weights).name for weights in (None, "int8", "fp8", "int4")}
    assert len(names) == 4
