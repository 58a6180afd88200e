"""The experts themselves, against a plain fp32 reference."""

from dataclasses import replace

import pytest
import torch

from kernels.gpu.moe import MoeWorkspace, TritonMoe, moe_experts, moe_experts_reference
from kernels.gpu.moe_config import MoeConfig, Tile
from kernels.gpu.moe_weights import (
    GpuExperts,
    StoredMatrix,
    pack_int4,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    unpack_int4,
)
from kernels.specs import Activation
from tests.support.far_memory import FAR, spread

pytestmark = pytest.mark.kernel_change

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
SILU = Activation()


def config_of(block_k=32, block_n=32, group_m=2):
    tile = Tile(block_n, block_k, group_m, 4, 2)
    return MoeConfig(16, tile, tile)


class Case:
    """Random experts and tokens. Scratch and output are poisoned before each run."""

    def __init__(
        self, device, num_tokens=7, top_k=2, num_experts=5, hidden=48, width=40, dtype=torch.float32, **options
    ):
        random = torch.Generator().manual_seed(options.pop("seed", 0))

        def normal(*sizes, scale=1.0):
            return (torch.randn(sizes, generator=random) * scale).to(device)

        store = options.pop("store", lambda weights, bias: StoredMatrix(weights.to(dtype), bias=bias))
        bias = options.pop("bias", False)
        rows = width * (2 if options.pop("is_gated", True) else 1)
        assert not options
        up_bias, down_bias = (normal(num_experts, n).to(dtype) if bias else None for n in (rows, hidden))
        self.experts = GpuExperts(
            store(normal(num_experts, rows, hidden, scale=hidden**-0.5), up_bias),
            store(normal(num_experts, hidden, width, scale=width**-0.5), down_bias),
        )
        self.x = normal(num_tokens, hidden).to(dtype)
        scores = torch.rand((num_tokens, num_experts), generator=random)
        self.ids = scores.topk(top_k).indices.to(device)
        self.weights = torch.rand((num_tokens, top_k), generator=random).to(device)
        self.workspace = MoeWorkspace.allocate(
            max(num_tokens, 1), top_k, num_experts, hidden, width, dtype, torch.device(device)
        )

    def run(self, config, activation=SILU, out_dtype=None, rows=slice(None)):
        for scratch in (self.workspace.hidden, self.workspace.results):
            scratch.fill_(torch.nan)
        for scratch in (self.workspace.pairs, self.workspace.tiles, self.workspace.num_tiles, self.workspace.counts):
            scratch.fill_(1 << 30)
        x = self.x[rows]
        whole = torch.full((len(x) + 2, x.shape[1]), torch.nan, dtype=out_dtype or x.dtype, device=x.device)
        out = whole[1:-1]
        args = (x, self.ids[rows].contiguous(), self.weights[rows].contiguous(), self.experts, activation)
        assert moe_experts(*args, config, self.workspace, out) is out
        assert whole[0].isnan().all()
        assert whole[-1].isnan().all()
        return out

    def check(self, config, activation=SILU, **options):
        expected = moe_experts_reference(self.x, self.ids, self.weights, self.experts, activation)
        out = self.run(config, activation, **options)
        error = (out.float() - expected).norm() / expected.norm().clamp(min=1e-30)
        assert error < TOLERANCE[self.x.dtype], error
        return out


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_experts_equal_the_reference_for_odd_sizes(device, dtype):
    Case(device, num_tokens=9, hidden=56, width=24, dtype=dtype).check(config_of())


@pytest.mark.parametrize(
    "activation",
    [
        Activation("gelu"),
        Activation("gelu_tanh"),
        Activation("relu"),
        Activation("swigluoai", alpha=1.702, limit=0.7),
        Activation("silu", limit=0.7),
        Activation("clamped_silu", limit=0.7),
        Activation("relu2"),
    ],
    ids=lambda activation: f"{activation.kind}-{activation.limit}",
)
def test_activations_and_biases(device, activation):
    case = Case(device, num_tokens=3, hidden=32, width=32, bias=True, is_gated=activation.is_gated)
    case.check(config_of(), activation)


@pytest.mark.parametrize("store", [StoredMatrix, quantise_int8], ids=["plain", "int8"])
def test_weights_that_lie_beyond_32_bits_are_read(device, store):
    def store_far(weights, bias):
        stored = store(weights, bias=bias)
        return replace(stored, values=spread(stored.values, (FAR, stored.values.shape[2], 1)))

    Case(device, num_tokens=5, num_experts=2, hidden=32, width=32, store=store_far).check(config_of())


def test_experts_refuse_an_activation_that_wants_other_matrices(device):
    with pytest.raises(ValueError, match="with a gate do not take relu2"):
        Case(device).run(config_of(), Activation("relu2"))
    with pytest.raises(ValueError, match="without a gate do not take silu"):
        Case(device, is_gated=False).run(config_of())


def test_experts_without_tokens_and_one_with_all_of_them(device):
    case = Case(device, num_tokens=35, top_k=1, num_experts=4, hidden=32, width=32)
    case.ids.fill_(2)
    case.check(config_of())


def test_one_token_and_none(device):
    Case(device, num_tokens=1).check(config_of())
    assert Case(device, num_tokens=0).run(config_of()).shape == (0, 48)


def test_absent_experts_add_nothing_and_a_token_without_any_gets_zeros(device):
    case = Case(device, num_tokens=6, hidden=32, width=32)
    case.ids[1, 0] = -1
    case.ids[4] = -1
    out = case.check(config_of(), out_dtype=torch.float32)
    assert (out[4] == 0).all()


def test_experts_are_read_from_the_slots_that_hold_them(device):
    case = Case(device, num_tokens=6, num_experts=4, hidden=32, width=32)
    expert_slot = torch.tensor([2, -1, 0, 3, -1, 1], dtype=torch.int32, device=device)
    case.experts = GpuExperts(case.experts.gate_up, case.experts.down, expert_slot)
    case.ids = torch.tensor([[0, 1], [2, 3], [5, 0], [4, 1], [3, -1], [5, 2]], device=device)
    case.check(config_of())


def test_a_token_has_the_same_bits_wherever_it_stands_in_whatever_batch(device):
    case = Case(device, num_tokens=20, num_experts=2, hidden=32, width=32, dtype=torch.float16)
    out = case.run(config_of()).clone()
    assert torch.equal(case.run(config_of()), out)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(1)).to(device)
    assert torch.equal(case.run(config_of(), rows=order), out[order])
    assert torch.equal(case.run(config_of(), rows=order[:5]), out[order[:5]])


def test_the_order_of_programs_changes_no_bit(device):
    case = Case(device, num_tokens=24, num_experts=3)
    out = case.run(config_of(group_m=1)).clone()
    assert torch.equal(case.run(config_of(group_m=4)), out)


STORES = {
    "int8": lambda weights, bias: quantise_int8(weights, bias),
    "fp8": lambda weights, bias: quantise_fp8(weights, bias),
    "int4": lambda weights, bias: quantise_int4(weights, 32, bias),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("store", STORES)
def test_quantised_experts_equal_their_expanded_reference(device, store, dtype):
    case = Case(device, num_tokens=5, hidden=64, width=32, dtype=dtype, bias=True, store=STORES[store])
    case.check(config_of())


@pytest.mark.parametrize("store", STORES)
def test_quantised_experts_without_a_gate(device, store):
    options = {"dtype": torch.float16, "is_gated": False, "store": STORES[store]}
    Case(device, num_tokens=3, hidden=64, width=64, **options).check(config_of(), Activation("relu2"))


@pytest.mark.parametrize(("store", "limit"), [("int8", 0.01), ("fp8", 0.04), ("int4", 0.12)])
def test_quantised_weights_are_near_the_weights(store, limit):
    weights = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(2))
    weights[1, 3] = 0
    error = (STORES[store](weights, None).expanded() - weights).norm() / weights.norm()
    assert error < limit


def test_int4_packs_both_halves_of_a_group_into_its_bytes():
    values = torch.arange(-8, 8, dtype=torch.int8).repeat(4)[None]
    packed = pack_int4(values, 32)
    assert torch.equal(packed[0, :16] & 0xF, (values[0, :16] + 8).to(torch.uint8))
    assert torch.equal(packed[0, :16] >> 4, (values[0, 16:32] + 8).to(torch.uint8))
    assert torch.equal(unpack_int4(packed, 32), values)


def test_experts_lie_further_apart_than_32_bits_reach(device):
    # Slot 2 begins beyond 2^31 elements; pages that nobody touches take no memory.
    stride, hidden, width = (1 << 30) + 64, 32, 32
    matrices = []
    for rows, depth in ((2 * width, hidden), (hidden, width)):
        whole = torch.empty(2 * stride + rows * depth, dtype=torch.float16, device=device)
        values = whole.as_strided((3, rows, depth), (stride, depth, 1))
        values[0], values[2] = torch.nan, torch.randn(rows, depth, generator=torch.Generator().manual_seed(rows)) / 6
        matrices.append(StoredMatrix(values))
    case = Case(device, num_tokens=4, top_k=1, num_experts=3, hidden=hidden, width=width, dtype=torch.float16)
    case.ids.fill_(2)
    case.experts = GpuExperts(*matrices)
    out = case.run(config_of()).float()
    only = GpuExperts(*(StoredMatrix(matrix.values[2:].clone()) for matrix in matrices))
    expected = moe_experts_reference(case.x, torch.zeros_like(case.ids), case.weights, only, SILU)
    assert (out - expected).norm() / expected.norm() < TOLERANCE[torch.float16]


def test_a_dispatch_chooses_by_number_of_tokens_and_gives_new_tensors(device):
    case = Case(device, num_tokens=9)
    asked = []

    def choose(num_tokens):
        asked.append(num_tokens)
        return config_of(block_n=16 if num_tokens < 5 else 32)

    moe = TritonMoe(choose, case.workspace)
    args = (case.weights, case.experts, SILU)
    expected = moe_experts_reference(case.x, case.ids, *args)
    torch.testing.assert_close(moe(case.x, case.ids, *args), expected, rtol=1e-4, atol=1e-5)
    few = moe.partial(case.x[:2], case.ids[:2], case.weights[:2], case.experts, SILU)
    torch.testing.assert_close(few, expected[:2], rtol=1e-4, atol=1e-5)
    assert moe(case.x[:0], case.ids[:0], case.weights[:0], case.experts, SILU).shape == (0, 48)
    assert asked == [9, 2]


def test_what_is_larger_than_the_workspace_or_lies_wrong_is_refused(device):
    case = Case(device, num_tokens=4)
    many = (case.x.repeat(2, 1), case.ids.repeat(2, 1), case.weights.repeat(2, 1))
    with pytest.raises(ValueError, match="more than the workspace"):
        moe_experts(*many, case.experts, SILU, config_of(), case.workspace)
    with pytest.raises(ValueError, match="contiguous"):
        moe_experts(case.x, case.ids.T.contiguous().T, case.weights, case.experts, SILU, config_of(), case.workspace)
    with pytest.raises(ValueError, match="do not fit together"):
        GpuExperts(case.experts.gate_up, case.experts.gate_up)
    with pytest.raises(ValueError, match="take a scale"):
        StoredMatrix(torch.zeros(1, 2, 4, dtype=torch.int8))
