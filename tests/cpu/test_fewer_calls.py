"""Parts of a layer that are one call of the compiled kernels have the bits of their parts, called one by one."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor

from experts.memory.eviction import lru
from experts.memory.residency import ResidencyControl
from experts.prediction.planning import SURE, LookaheadPlanner
from kernels.activation import softcap
from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.cpu.attention_block import AttentionWeights, attention_block
from kernels.cpu.library import native_kernels
from kernels.linear import Linear, join, pack_linear
from kernels.moe_gate import native_choice, native_foresight, select_experts
from kernels.norm import rms_norm, rms_norm_of_sum
from kernels.rope_kv import rotate_and_store
from kernels.sampling import likeliest
from kernels.specs import GateSpec
from kernels.weight_formats import Q4_K, Q6_K
from tests.support.quantised_rows import random_rows

pytestmark = [
    pytest.mark.usefixtures("inference"),
    pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels."),
]
HIDDEN, HEADS, KV_HEADS, DIM, BLOCK = 256, 4, 2, 32, 8
NORMALISED = GateSpec(2, renormalise=True)
# Tokens and start of the chunks of a step.
STEPS = [[(1, 0)], [(1, 37)], [(1, 5), (1, 70), (3, 9)], [(50, 20), (1, 3)]]


def make_linears(*, is_quantised: bool) -> tuple[Linear, Linear]:
    """Return the projections to queries, keys and values, and to the output."""
    queries, keys = HEADS * DIM, KV_HEADS * DIM
    if not is_quantised:
        width = queries + 2 * keys
        return pack_linear(torch.randn(width, HIDDEN) / 16, torch.randn(width)), pack_linear(torch.randn(96, queries))
    linears = [random_rows(form, rows, HIDDEN) for form, rows in ((Q4_K, queries), (Q4_K, keys), (Q6_K, keys))]
    qkv = join([pack_linear(rows) for rows in linears])
    assert qkv is not None
    return qkv, pack_linear(torch.randn(96, queries).bfloat16(), dtype=torch.float32)


def weights(qkv: Linear, out: Linear, **others: object) -> AttentionWeights:
    usual = {"norms": None, "head_norms": None, "interleaved": False, "window": None, "sinks": None}
    return AttentionWeights(qkv, out, HEADS, KV_HEADS, DIM, eps=1e-6, scale=0.2, **(usual | others))  # type: ignore[arg-type]


def one_by_one(of: AttentionWeights, x: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, plan: AttentionPlan, pools):
    qkv = of.qkv(x)
    if of.norms is not None:
        first = 0
        for norm in of.norms:
            part = qkv[:, first : first + len(norm)]
            part.copy_(rms_norm(part, norm, of.eps))
            first += len(norm)
    q = rotate_and_store(
        qkv.view(len(x), -1, DIM),
        cos,
        sin,
        slots,
        *pools,
        interleaved=of.interleaved,
        head_norms=of.head_norms,
        eps=of.eps,
    )
    return of.out(paged_attention(q, *pools, plan, scale=of.scale, window=of.window, sinks=of.sinks).flatten(1))


@pytest.mark.parametrize("chunks", STEPS, ids=str)
@pytest.mark.parametrize(
    "others",
    [
        {},
        {"head_norms": (torch.rand(DIM), torch.rand(DIM)), "window": 12},
        {"norms": (torch.rand(HEADS * DIM), torch.rand(KV_HEADS * DIM)), "interleaved": True},
        {"sinks": torch.randn(HEADS)},
    ],
    ids=["plain", "head norms", "norms", "sinks"],
)
@pytest.mark.parametrize("is_quantised", [False, True])
def test_attention_in_one_call_has_the_bits_of_its_parts(
    is_quantised: bool, others: dict[str, object], chunks: list[tuple[int, int]]
) -> None:
    of = weights(*make_linears(is_quantised=is_quantised), **others)
    block = attention_block(of)
    assert block is not None
    num_rows, num_slots = sum(count for count, _ in chunks), 64 * BLOCK
    tables = [array("i", range(10 * place, 10 * place + 10)) for place in range(len(chunks))]
    spans = [ChunkSpan(*chunk, table) for chunk, table in zip(chunks, tables, strict=True)]
    slots = [
        table[position // BLOCK] * BLOCK + position % BLOCK
        for (count, start), table in zip(chunks, tables, strict=True)
        for position in range(start, start + count)
    ]
    pools = [torch.randn(KV_HEADS, num_slots, DIM) for _ in range(2)]
    own = [pool.clone() for pool in pools]
    x, cos, sin = torch.randn(num_rows, HIDDEN), torch.randn(num_rows, DIM // 2), torch.randn(num_rows, DIM // 2)
    rest = x, cos, sin, torch.tensor(slots), AttentionPlan(spans, BLOCK)
    for _ in range(2):  # The second time with the values that the first one kept.
        assert torch.equal(block(*rest, *own), one_by_one(of, *rest, pools))
        assert all(map(torch.equal, own, pools))


def test_attention_whose_projections_take_other_code_is_not_one_call() -> None:
    qkv, out = make_linears(is_quantised=False)
    assert attention_block(weights(qkv, pack_linear(torch.randn(96, HEADS * DIM).bfloat16()))) is None
    assert attention_block(weights(out, out)) is None


@pytest.mark.parametrize(
    "spec",
    [
        GateSpec(4),
        GateSpec(4, renormalise=True),
        GateSpec(3, softmax_after_top_k=True, scale=0.5),
        GateSpec(1, renormalise=True, norm_min=1e-12),
        GateSpec(8, "sigmoid", renormalise=True, norm_min=1e-20, scale=2.5),
        GateSpec(22, "sigmoid", renormalise=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("num_experts", [32, 60, 128, 300])
def test_a_choice_in_one_call_has_the_bits_of_the_gate_and_torch(spec: GateSpec, num_experts: int) -> None:
    gate = pack_linear(torch.randn(num_experts, 64))
    for bias in (None, torch.randn(num_experts) / 4):
        choose = native_choice(gate, spec, bias)
        assert choose is not None
        for num_rows in (1, 2, 5, 40):
            x = torch.randn(num_rows, 64) / 8
            (ids, chosen), (wanted_ids, wanted) = choose(x), select_experts(gate(x), spec, bias)
            assert torch.equal(ids, wanted_ids)
            # With narrower registers torch sums in another order.
            if torch.backends.cpu.get_cpu_capability() == "AVX512":
                assert torch.equal(chosen, wanted)
            torch.testing.assert_close(chosen, wanted, atol=0.0, rtol=1e-6)


def test_a_choice_in_one_call_multiplies_weights_by_the_scale_of_their_expert() -> None:
    gate, scales, x = pack_linear(torch.randn(8, 64)), torch.randn(8), torch.randn(5, 64) / 8
    plain, scaled = native_choice(gate, NORMALISED, None), native_choice(gate, NORMALISED, None, scales)
    assert plain is not None
    assert scaled is not None
    (wanted_ids, weights), (ids, found) = plain(x), scaled(x)
    assert torch.equal(ids, wanted_ids)
    assert torch.equal(found, weights * scales[ids])


def test_equal_experts_are_chosen_in_their_order_and_a_nan_first() -> None:
    choose = native_choice(
        pack_linear(torch.zeros(9, 16), torch.tensor([0.0, 1, 2, 2, 1, 2, 0, 2, 1])), GateSpec(5), None
    )
    assert choose is not None
    assert choose(torch.ones(1, 16))[0].tolist() == [[2, 3, 5, 7, 1]]
    choose = native_choice(pack_linear(torch.zeros(4, 16), torch.tensor([0.0, 3, torch.nan, 1])), NORMALISED, None)
    assert choose is not None
    ids, chosen = choose(torch.ones(1, 16))
    assert ids[0, 0] == 2
    assert chosen.isnan().all()


def test_gates_with_other_rules_are_not_one_call() -> None:
    gate = pack_linear(torch.randn(8, 64))
    for spec in (GateSpec(2, "sparsemixer"), GateSpec(2, "ones"), GateSpec(2, num_groups=2)):
        assert native_choice(gate, spec, None) is None
    assert native_choice(pack_linear(torch.randn(8, 64).bfloat16()), GateSpec(2), None) is None


@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.37, 1.0), (1.0, 0.61)])
@pytest.mark.parametrize("shape", [(1, 80), (3, 576), (40, 70)])
def test_a_norm_of_a_sum_has_the_bits_of_the_sum_and_the_norm(
    shape: tuple[int, int], factors: tuple[float, float]
) -> None:
    x, residual, weight = torch.randn(shape), torch.randn(shape), torch.rand(shape[1])
    total = (residual + x * factors[0]) * factors[1]
    found = rms_norm_of_sum(x.clone(), residual, weight, 1e-6, *factors)
    assert torch.equal(residual, total)
    assert torch.equal(found, rms_norm(total, weight, 1e-6))


@pytest.mark.parametrize("count", [1, 37, 40_000])
def test_capped_logits_are_those_of_torch_and_have_the_same_bits_at_any_place(count: int) -> None:
    logits = torch.randn(count).mul_(40.0)
    logits[: count // 2] /= 1000.0
    found = softcap(logits.clone(), 30.0)
    torch.testing.assert_close(found.double(), (logits.double() / 30.0).tanh() * 30.0, atol=0.0, rtol=1e-6)
    assert torch.equal(softcap(logits[count // 3 :].clone(), 30.0), found[count // 3 :])
    ends = softcap(torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0]), 30.0)
    assert ends.tolist()[:2] == [30.0, -30.0]
    assert ends[2].isnan()
    assert ends[3] == 0.0


@pytest.mark.parametrize("width", [1, 17, 1024, 5000])
def test_the_likeliest_tokens_are_those_of_torch(width: int) -> None:
    logits = torch.randn(9, width).round(decimals=1)  # Some are equal.
    logits[1], logits[2] = 0.0, -torch.inf
    logits[3, width // 2], logits[4, width - 1] = torch.nan, torch.inf
    logits[5, width // 3], logits[5, width - 1] = torch.inf, torch.nan
    for rows in (logits, logits[:1], torch.cat([logits, logits], 1)[:, :width]):
        (largest, places), wanted = likeliest(rows), rows.max(-1)
        torch.testing.assert_close(largest, wanted.values, rtol=0, atol=0, equal_nan=True)
        assert torch.equal(places, wanted.indices)


@pytest.mark.parametrize("num_rows", [1, 4, 40])
@pytest.mark.parametrize(
    ("num_experts", "top_k", "has_bias"), [(16, 2, False), (60, 4, True), (128, 8, False), (4, 4, True)]
)
def test_one_call_foresees_the_experts_that_python_finds_sure(
    num_rows: int, num_experts: int, top_k: int, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(num_experts, 64, generator=generator)
    bias = torch.randn(num_experts, generator=generator) if has_bias else None
    gate, norm = pack_linear(weight, bias), torch.rand(64, generator=generator)
    foresight = native_foresight(gate, norm, 1e-5, top_k, SURE)
    assert foresight is not None
    for shared in (torch.randn(num_rows, 64, generator=generator), None):
        residual = torch.randn(num_rows, 64, generator=generator)
        assert foresight.takes(residual, shared)
        logits = gate(rms_norm(residual if shared is None else residual + shared, norm, 1e-5)).numpy()
        control = ResidencyControl([num_experts] * 2, num_experts, 1, lambda _: lru(num_experts))
        LookaheadPlanner(control, top_k, 1).ask(0, [1], [logits])
        asked = []
        while (transfer := control.next_transfer()) is not None:
            asked.append(transfer.expert)
            control.finish(transfer)
        assert foresight(residual, shared) == asked
        assert not foresight.takes(residual.half(), shared)
        assert not foresight.takes(residual.repeat(1, 2)[:, :64], shared) or num_rows == 1
    assert native_foresight(pack_linear(weight.bfloat16()), norm.bfloat16(), 1e-5, top_k, SURE) is None
