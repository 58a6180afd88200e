"""The positions that an indexer chooses, and attention over them, against float64 and in any batch and chunking."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor

from kernels.attention import paged_attention
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.indexed_attention import choose_positions, has_choice, indexed_attention
from kernels.kv_rows import pack_rows, unpack_rows

pytestmark = pytest.mark.usefixtures("inference")

BLOCK_SIZE = 8
BLOCKS = array("i", torch.randperm(128, generator=torch.Generator().manual_seed(1)).tolist())
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def body(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        for module in ("kernels.attention", "kernels.indexed_attention"):
            monkeypatch.setattr(f"{module}.native_kernels", lambda: None)


def pool(dim: int, dtype: torch.dtype = torch.float32, num_blocks: int = 128) -> Tensor:
    return pack_rows(torch.randn(1, num_blocks * BLOCK_SIZE, dim), dtype)


def spans(*chunks: tuple[int, int], blocks: array[int] = BLOCKS) -> AttentionPlan:
    """chunks: (first position, number of tokens)."""
    return AttentionPlan([ChunkSpan(count, start, blocks) for start, count in chunks], BLOCK_SIZE)


def positions_of(plan: AttentionPlan) -> list[int]:
    return [chunk.start + token for chunk in plan.chunks for token in range(chunk.num_tokens)]


def context(keys: Tensor, length: int) -> Tensor:
    """The numbers [length, D] of a context's first keys, in float64."""
    places = torch.arange(length)
    slots = torch.tensor(BLOCKS.tolist())[places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
    return unpack_rows(keys[0, slots], torch.float32).double()


@every_dtype
@pytest.mark.parametrize(("heads", "dim"), [(24, 32), (7, 64), (1, 16), (5, 24)])
def test_a_token_gets_the_positions_with_the_largest_scores(heads: int, dim: int, dtype: torch.dtype) -> None:
    keys, plan, top_k = pool(dim, dtype), spans((0, 90), (400, 1), (700, 7), (20, 45)), 40
    q, weights = torch.randn(plan.num_rows, heads, dim), torch.randn(plan.num_rows, heads)
    chosen = choose_positions(q, weights, keys, plan, top_k)
    for row, position in enumerate(positions_of(plan)):
        if position < top_k:
            continue
        own = chosen[row].long()
        assert own.tolist() == sorted(set(own.tolist()))
        scores = weights[row].double() @ (q[row].double() @ context(keys, position + 1).T).relu()
        others = scores.clone()
        others[own] = -torch.inf
        assert scores[own].min() >= others.max() - 1e-4


def test_of_equal_scores_the_earlier_positions_are_chosen() -> None:
    keys = torch.zeros(1, 1024, 16)
    plan, top_k = spans((100, 3)), 10
    best = BLOCKS[50 // BLOCK_SIZE] * BLOCK_SIZE + 50 % BLOCK_SIZE
    keys[0, best] = 1.0
    chosen = choose_positions(torch.ones(3, 4, 16), torch.ones(3, 4), keys, plan, top_k)
    assert chosen.tolist() == [[*range(9), 50]] * 3


@every_dtype
@pytest.mark.parametrize(("heads", "dim", "top_k"), [(3, 32, 20), (16, 80, 300), (64, 48, 64), (5, 24, 7)])
def test_a_token_attends_to_its_chosen_positions_alone(heads: int, dim: int, top_k: int, dtype: torch.dtype) -> None:
    keys, plan = pool(dim, dtype), spans((0, 40), (top_k, 1), (top_k - 3, 9), (900, 2))
    q = torch.randn(plan.num_rows, heads, dim)
    chosen = choose_positions(torch.randn(plan.num_rows, 8, 16), torch.randn(plan.num_rows, 8), pool(16), plan, top_k)
    found = indexed_attention(q, keys, plan, chosen, scale=0.2)
    for row, position in enumerate(positions_of(plan)):
        values = context(keys, position + 1)
        if position >= top_k:
            values = values[chosen[row].long()]
        expected = (q[row].double() @ values.T * 0.2).softmax(-1) @ values
        assert (found[row] - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.05)


@every_dtype
def test_choice_and_attention_have_the_same_bits_in_any_batch_chunking_and_place(dtype: torch.dtype) -> None:
    length, top_k, index_keys, keys = 70, 16, pool(32, dtype), pool(48, dtype)
    moved = array("i", reversed(BLOCKS))
    for memory in (index_keys, keys):
        blocks = memory.view(128, BLOCK_SIZE, -1)
        blocks[moved[:9].tolist()] = blocks[BLOCKS[:9].tolist()]
    q, weights, queries = torch.randn(length, 9, 32), torch.randn(length, 9), torch.randn(length, 5, 48)

    def attend(first: int, last: int, blocks: array[int], beside: int) -> tuple[Tensor, Tensor]:
        own = ChunkSpan(last - first, first, blocks)
        others = [ChunkSpan(2, 200, BLOCKS), ChunkSpan(1, 3, BLOCKS), ChunkSpan(1, 300, BLOCKS)][:beside]
        plan = AttentionPlan([*others, own], BLOCK_SIZE)
        skipped = plan.num_rows - own.num_tokens
        rows = [torch.cat([torch.randn(skipped, *x.shape[1:]), x[first:last]]) for x in (q, weights, queries)]
        chosen = choose_positions(rows[0], rows[1], index_keys, plan, top_k)
        return chosen[skipped:], indexed_attention(rows[2], keys, plan, chosen, scale=0.1)[skipped:]

    whole = attend(0, length, BLOCKS, 0)
    for first, last in [(0, 7), (5, 20), (20, 70), (15, 16), (16, 17), (69, 70)]:
        for blocks in (BLOCKS, moved):
            for beside in range(4):
                chosen, found = attend(first, last, blocks, beside)
                rows = slice(max(0, top_k - first), None)
                assert torch.equal(chosen[rows], whole[0][first:last][rows])
                assert torch.equal(found, whole[1][first:last])


def test_a_token_that_sees_all_positions_has_the_bits_of_attention_without_an_indexer() -> None:
    keys, plan = pool(48), spans((0, 30), (20, 10), (29, 1))
    assert not has_choice(plan, 30)
    assert has_choice(plan, 29)
    q = torch.randn(plan.num_rows, 5, 48)
    chosen = torch.zeros((plan.num_rows, 30), dtype=torch.int32)
    expected = paged_attention(q, keys, keys, plan, scale=0.1)
    assert torch.equal(indexed_attention(q, keys, plan, chosen, scale=0.1), expected)


def test_later_keys_never_matter_even_if_they_are_no_numbers() -> None:
    index_keys, keys, plan, top_k = pool(16), pool(32), spans((50, 5), (60, 1)), 12
    q, weights, queries = torch.randn(6, 4, 16), torch.randn(6, 4), torch.randn(6, 3, 32)

    def attend() -> Tensor:
        return indexed_attention(queries, keys, plan, choose_positions(q, weights, index_keys, plan, top_k), scale=0.2)

    before = attend()
    for position in range(61, 64):
        for memory in (index_keys, keys):
            memory[:, BLOCKS[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = torch.nan
    assert torch.equal(attend(), before)


def test_queries_that_are_no_numbers_spoil_their_own_row_alone() -> None:
    index_keys, keys, plan, top_k = pool(16), pool(32), spans((50, 3)), 12
    q, weights, queries = torch.randn(3, 4, 16), torch.randn(3, 4), torch.randn(3, 3, 32)

    def attend() -> Tensor:
        return indexed_attention(queries, keys, plan, choose_positions(q, weights, index_keys, plan, top_k), scale=0.2)

    before = attend()
    q[1], weights[1], queries[1] = torch.nan, torch.nan, torch.nan
    assert torch.equal(attend()[::2], before[::2])


def test_more_scores_than_are_kept_at_once_choose_the_same(request: pytest.FixtureRequest) -> None:
    if "torch" in request.node.name:
        pytest.skip("torch scores one token at a time")
    blocks = array("i", range(8192))
    keys, plan, top_k = pool(16, num_blocks=8192), spans((65000, 40), blocks=blocks), 8
    q, weights = torch.randn(40, 2, 16), torch.randn(40, 2)
    chosen = choose_positions(q, weights, keys, plan, top_k)
    for row in (0, 31, 32, 39):
        alone = spans((65000 + row, 1), blocks=blocks)
        assert torch.equal(
            choose_positions(q[row : row + 1], weights[row : row + 1], keys, alone, top_k)[0], chosen[row]
        )
