"""Experts in slots: packed bytes, here and there and elsewhere, always the same results."""

import pytest
import torch

from kernels.gpu.moe import MoeWorkspace, SlotExperts, SlotLayout, TritonMoe, moe_experts_reference
from kernels.gpu.moe_config import MoeConfig, Tile, WeightStorage
from kernels.packed_experts import ExpertShape
from kernels.specs import Activation

pytestmark = pytest.mark.kernel_change

HIDDEN, WIDTH, NUM_EXPERTS, TOP_K, NUM_TOKENS = 64, 32, 4, 2, 5
SILU = Activation()


SLOT_BYTES = 20480


def layout_of(weights=None, has_bias=True):
    shape = ExpertShape(HIDDEN, WIDTH, torch.float16, torch.float16, has_bias)
    return SlotLayout(shape, None if weights is None else WeightStorage(weights, 32 if weights == "int4" else 0))


def slots_of(layout, device, num_slots=NUM_EXPERTS):
    """Experts over slots that are larger than they are, and the slots."""
    tile = Tile(32, 32, 1, 4, 2)
    sizes = (NUM_TOKENS, TOP_K, NUM_EXPERTS, HIDDEN, WIDTH, torch.float16, device)
    moe = TritonMoe(lambda _: MoeConfig(16, tile, tile), MoeWorkspace.allocate(*sizes))
    arena = torch.full((num_slots, SLOT_BYTES), 0xFF, dtype=torch.uint8, device=device)
    return SlotExperts(layout, arena, NUM_EXPERTS, moe), arena


def compute(experts, x, ids, gates):
    products = torch.zeros(*ids.shape, HIDDEN, device=x.device)
    experts.multiply(x, ids, SILU, products)
    return experts.combine(products, gates)


def fill(arena, slot, packed):
    arena[slot, : len(packed)].copy_(packed)


def pack_all(layout, has_bias=True):
    random = torch.Generator().manual_seed(3)

    def normal(*sizes, scale=1.0):
        return (torch.randn(sizes, generator=random) * scale).half()

    for _ in range(NUM_EXPERTS):
        biases = (normal(2 * WIDTH), normal(HIDDEN)) if has_bias else (None, None)
        yield layout.pack((normal(2 * WIDTH, HIDDEN, scale=0.1), normal(HIDDEN, WIDTH, scale=0.1), *biases))


def batch(device, num_experts=NUM_EXPERTS):
    random = torch.Generator().manual_seed(4)
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=random).half()
    ids = torch.rand(NUM_TOKENS, num_experts, generator=random).topk(TOP_K).indices
    return x.to(device), ids.to(device), torch.rand(NUM_TOKENS, TOP_K, generator=random).to(device)


@pytest.mark.parametrize("weights", [None, "int8", "fp8", "int4"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
def test_packed_experts_compute_what_they_hold(device, weights, has_bias):
    layout = layout_of(weights, has_bias)
    experts, arena = slots_of(layout, device)
    for expert, packed in enumerate(pack_all(layout, has_bias)):
        assert packed.shape == (layout.num_bytes,)
        fill(arena, expert, packed)
    experts.show(range(NUM_EXPERTS))
    x, ids, gates = batch(device)
    expected = moe_experts_reference(x, ids, gates, experts.resident, SILU)
    out = compute(experts, x, ids, gates)
    assert out.dtype == torch.float32
    assert (out - expected).norm() / expected.norm() < 2e-3


def test_an_expert_that_left_and_came_back_elsewhere_computes_the_same_bits(device):
    layout = layout_of()
    experts, arena = slots_of(layout, device, num_slots=2)
    packed = list(pack_all(layout))
    fill(arena, 0, packed[0])
    fill(arena, 1, packed[1])
    experts.show([0, 1])
    x, ids, gates = batch(device, num_experts=2)
    before = compute(experts, x, ids, gates)
    fill(arena, 0, packed[3])
    experts.show([-1, 1])
    assert not torch.equal(compute(experts, x, ids, gates), before)
    fill(arena, 0, packed[1])
    fill(arena, 1, packed[0])
    experts.show([1, 0])
    assert torch.equal(compute(experts, x, ids, gates), before)


def test_products_made_in_parts_sum_to_the_same_bits(device):
    layout = layout_of()
    experts, arena = slots_of(layout, device)
    for expert, packed in enumerate(pack_all(layout)):
        fill(arena, expert, packed)
    x, ids, gates = batch(device)
    products = torch.zeros(NUM_TOKENS, TOP_K, HIDDEN, device=device)
    for part in ([0, 1, -1, -1], [-1, -1, 2, 3]):
        experts.show(part)
        experts.multiply(x, ids, SILU, products)
    experts.show(range(NUM_EXPERTS))
    assert torch.equal(experts.combine(products, gates), compute(experts, x, ids, gates))


def test_layouts_are_told_apart_by_name():
    names = {layout_of(weights).name for weights in (None, "int8", "fp8", "int4")}
    assert len(names) == 4
