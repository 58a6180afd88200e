"""Paged attention against its one-token-at-a-time reference, and its independence of batch and chunking."""

from __future__ import annotations

from array import array

import pytest
import torch
from torch import Tensor

from kernels.attention import paged_attention, paged_attention_reference
from kernels.attention_plan import ChunkSpan, plan_attention
from kernels.kv_write import write_kv

BLOCK_SIZE = 8


@pytest.fixture(autouse=True)
def _inference_mode():
    torch.manual_seed(0)
    with torch.inference_mode():
        yield


def pools(kv_heads: int, dim: int, num_blocks: int = 64) -> tuple[Tensor, Tensor]:
    shape = (kv_heads, num_blocks * BLOCK_SIZE, dim)
    return torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 4, 16), (9, 3, 64), (8, 1, 32), (16, 2, 128), (2, 1, 80), (5, 1, 24)]
)
@pytest.mark.parametrize("window", [None, 1, 5, 8, 19])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("segment_tokens", [8, 16, 512])
def test_matches_the_reference(
    heads: int, kv_heads: int, dim: int, window: int | None, with_sinks: bool, segment_tokens: int
) -> None:
    keys, values = pools(kv_heads, dim)
    chunks = [
        ChunkSpan(1, 0, array("i", [3])),
        ChunkSpan(1, 37, array("i", [9, 4, 60, 11, 12])),
        ChunkSpan(21, 13, array("i", [20, 21, 22, 23, 24])),
        ChunkSpan(10, 0, array("i", [1, 2])),
        ChunkSpan(1, 35, array("i", [9, 4, 60, 11, 30])),
        ChunkSpan(9, 30, array("i", [9, 4, 61, 31, 32])),
    ]
    plan = plan_attention(chunks, BLOCK_SIZE, [window], segment_tokens=segment_tokens)
    q = torch.randn(plan.num_rows, heads, dim)
    sinks = torch.randn(heads) if with_sinks else None
    out = paged_attention(q, keys, values, plan, scale=dim**-0.5, window=window, sinks=sinks)
    expected = paged_attention_reference(q, keys, values, plan, scale=dim**-0.5, window=window, sinks=sinks)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("segment_tokens", [8, 16, 512])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_a_row_has_the_same_bits_in_any_batch_chunking_and_place(
    group: int, segment_tokens: int, with_sinks: bool
) -> None:
    kv_heads, dim, length = 2, 64, 61
    keys, values = pools(kv_heads, dim)
    run = array("i", range(8, 16))
    scattered = array("i", [40, 3, 50, 7, 33, 20, 1, 28])
    for own, other in zip(run, scattered, strict=True):
        for pool in (keys, values):
            pool[:, other * BLOCK_SIZE : (other + 1) * BLOCK_SIZE] = pool[:, own * BLOCK_SIZE : (own + 1) * BLOCK_SIZE]
    q = torch.randn(length, group * kv_heads, dim)
    sinks = torch.randn(group * kv_heads) if with_sinks else None

    def attend(first: int, last: int, blocks: array[int], beside: int = 0) -> Tensor:
        others = [ChunkSpan(1, 30, array("i", [60, 61, 62, 63])), ChunkSpan(1, 40, blocks[:5] + array("i", [60]))]
        chunks = [ChunkSpan(last - first, first, blocks), *(others * beside)[:beside]]
        plan = plan_attention(chunks, BLOCK_SIZE, [None], segment_tokens=segment_tokens)
        rows = torch.cat([q[first:last], torch.randn(beside, *q.shape[1:])])
        return paged_attention(rows, keys, values, plan, scale=0.125, sinks=sinks)[: last - first]

    whole = attend(0, length, run)
    for first, last in [(0, 1), (0, 7), (3, 20), (20, 61), (59, 60), (60, 61)]:
        for blocks in (run, scattered):
            for beside in (0, 1, 5):
                assert torch.equal(attend(first, last, blocks, beside), whole[first:last]), (first, last, beside)


def test_requests_that_share_a_segment_read_it_together() -> None:
    shared, tails = array("i", [1, 2, 3, 4]), [array("i", [10]), array("i", [20]), array("i", [30])]
    chunks = [ChunkSpan(1, 32 + extra, shared + tail) for extra, tail in enumerate(tails)]
    plan = plan_attention(chunks, BLOCK_SIZE, [None], segment_tokens=16)
    assert [(segment.index, segment.row_ranges) for segment in plan.segments] == [
        (0, [(0, 1), (1, 1), (2, 1)]),
        (1, [(0, 1), (1, 1), (2, 1)]),
    ]
    assert [tile.num_keys for tile in plan.tiles[None]] == [8, 8, 8]


def test_keys_after_a_token_never_matter_even_if_they_are_huge() -> None:
    keys, values = pools(1, 16)
    chunk = ChunkSpan(1, 10, array("i", [0, 1]))
    plan = plan_attention([chunk], BLOCK_SIZE, [None])
    q = torch.randn(1, 2, 16)
    before = paged_attention(q, keys, values, plan, scale=0.25)
    keys[:, 11:16], values[:, 11:16] = 1e30, 1e30
    assert torch.equal(paged_attention(q, keys, values, plan, scale=0.25), before)


def test_write_kv_fills_exactly_the_named_slots() -> None:
    keys, values = torch.zeros(2, 32, 4), torch.zeros(2, 32, 4)
    slots = torch.tensor([5, 30, 0])
    new_keys, new_values = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    write_kv(keys, values, slots, new_keys, new_values)
    assert torch.equal(keys[:, slots], new_keys.transpose(0, 1))
    assert torch.equal(values[:, slots], new_values.transpose(0, 1))
    assert keys.count_nonzero() == new_keys.count_nonzero()
