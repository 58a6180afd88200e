"""Paged attention against its one-token-at-a-time reference, and its independence of batch and chunking."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kernels.attention import paged_attention, paged_attention_reference
from kernels.attention_plan import AttentionPlan, ChunkSpan
from kernels.cpu.attention import AttentionTiles, torch_attention
from kernels.rope_kv import write_kv
from tests.support.parameters import pairs

pytestmark = pytest.mark.usefixtures("inference")

BLOCK_SIZE = 8
Attend = Callable[..., Tensor]


def with_segments_of(segment_tokens: int) -> Attend:
    """The torch body, its contexts cut into segments of a length."""

    def attend(
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        plan: AttentionPlan,
        *,
        scale: float,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        tiling = AttentionTiles(plan.chunks, plan.block_size, segment_tokens)
        return torch_attention(q, keys, values, tiling, scale=scale, window=window, sinks=sinks)

    return attend


BODIES = {
    "compiled": paged_attention,
    "torch, segments of 8": with_segments_of(8),
    "torch, segments of 16": with_segments_of(16),
    "torch, segments of 512": with_segments_of(512),
}
every_body = pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)


def reference(q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, **flags: Any) -> Tensor:
    tables = [torch.tensor(chunk.block_ids.tolist(), dtype=torch.int32) for chunk in plan.chunks]
    lengths = torch.tensor([chunk.start + chunk.num_tokens for chunk in plan.chunks])
    table, starts = pad_sequence(tables, batch_first=True), plan.arrays().first_rows
    return paged_attention_reference(q, keys, values, table, lengths, starts, block_size=plan.block_size, **flags)


def pools(kv_heads: int, dim: int, num_blocks: int = 64) -> tuple[Tensor, Tensor]:
    shape = (kv_heads, num_blocks * BLOCK_SIZE, dim)
    return torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize(
    ("sizes", "window", "with_sinks", "body"),
    pairs(
        [(4, 4, 16), (9, 3, 64), (8, 1, 32), (16, 2, 128), (2, 1, 80), (5, 1, 24), (112, 1, 16)],
        [None, 1, 5, 8, 19],
        [False, True],
        list(BODIES),
    ),
)
def test_chunks_of_all_kinds_attend_as_the_reference_does(
    sizes: tuple[int, int, int], window: int | None, with_sinks: bool, body: str
) -> None:
    heads, kv_heads, dim = sizes
    keys, values = pools(kv_heads, dim)
    chunks = [
        ChunkSpan(1, 0, array("i", [3])),
        ChunkSpan(1, 37, array("i", [9, 4, 60, 11, 12])),
        ChunkSpan(21, 13, array("i", [20, 21, 22, 23, 24])),
        ChunkSpan(10, 0, array("i", [1, 2])),
        ChunkSpan(1, 35, array("i", [9, 4, 60, 11, 30])),
        ChunkSpan(9, 30, array("i", [9, 4, 61, 31, 32])),
    ]
    plan = AttentionPlan(chunks, BLOCK_SIZE)
    q = torch.randn(plan.num_rows, heads, dim)
    sinks = torch.randn(heads) if with_sinks else None
    out = BODIES[body](q, keys, values, plan, scale=dim**-0.5, window=window, sinks=sinks)
    expected = reference(q, keys, values, plan, scale=dim**-0.5, window=window, sinks=sinks)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("window", [None, 100, 300])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_long_contexts_match_the_reference(window: int | None, with_sinks: bool) -> None:
    keys, values = pools(1, 32, num_blocks=256)
    blocks = array("i", torch.randperm(256).tolist())
    plan = AttentionPlan([ChunkSpan(40, 1000, blocks), ChunkSpan(1, 1535, blocks), ChunkSpan(2, 255, blocks)], 8)
    q = torch.randn(plan.num_rows, 3, 32)
    sinks = torch.randn(3) if with_sinks else None
    out = paged_attention(q, keys, values, plan, scale=0.2, window=window, sinks=sinks)
    expected = reference(q, keys, values, plan, scale=0.2, window=window, sinks=sinks)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(("group", "with_sinks", "body"), pairs([1, 2, 3, 4, 8], [False, True], list(BODIES)))
def test_a_row_has_the_same_bits_in_any_batch_chunking_and_place(group: int, with_sinks: bool, body: str) -> None:
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
        rows = torch.cat([q[first:last], torch.randn(beside, *q.shape[1:])])
        plan = AttentionPlan(chunks, BLOCK_SIZE)
        return BODIES[body](rows, keys, values, plan, scale=0.125, sinks=sinks)[: last - first]

    whole = attend(0, length, run)
    for first, last in [(0, 1), (0, 7), (3, 20), (20, 61), (59, 60), (60, 61)]:
        for blocks in (run, scattered):
            for beside in (0, 1, 5):
                assert torch.equal(attend(first, last, blocks, beside), whole[first:last]), (first, last, beside)


@pytest.mark.parametrize("window", [None, 200])
def test_a_row_of_a_long_context_has_the_same_bits_alone_and_in_a_chunk(window: int | None) -> None:
    keys, values = pools(1, 48, num_blocks=128)
    blocks = array("i", range(128))
    q = torch.randn(1000, 3, 48)

    def attend(first: int, last: int) -> Tensor:
        plan = AttentionPlan([ChunkSpan(last - first, first, blocks)], BLOCK_SIZE)
        return paged_attention(q[first:last], keys, values, plan, scale=0.125, window=window)

    whole = attend(0, 1000)
    for first, last in [(999, 1000), (255, 257), (510, 514), (300, 700)]:
        assert torch.equal(attend(first, last), whole[first:last]), (first, last)


def test_requests_that_share_a_segment_read_it_together() -> None:
    shared, tails = array("i", [1, 2, 3, 4]), [array("i", [10]), array("i", [20]), array("i", [30])]
    chunks = [ChunkSpan(1, 32 + extra, shared + tail) for extra, tail in enumerate(tails)]
    tiling = AttentionTiles(chunks, BLOCK_SIZE, segment_tokens=16)
    assert [(segment.index, segment.row_ranges) for segment in tiling.segments] == [
        (0, [(0, 1), (1, 1), (2, 1)]),
        (1, [(0, 1), (1, 1), (2, 1)]),
    ]
    assert [tile.num_keys for tile in tiling.tiles(None)] == [8, 8, 8]


@every_body
def test_keys_after_a_token_never_matter_even_if_they_are_huge(body: Attend) -> None:
    keys, values = pools(1, 16)
    plan = AttentionPlan([ChunkSpan(1, 10, array("i", [0, 1]))], BLOCK_SIZE)
    q = torch.randn(1, 2, 16)
    before = body(q, keys, values, plan, scale=0.25)
    keys[:, 11:16], values[:, 11:16] = 1e30, 1e30
    assert torch.equal(body(q, keys, values, plan, scale=0.25), before)


def test_huge_scores_neither_overflow_nor_lose_the_largest() -> None:
    keys, values = pools(1, 16)
    keys[:, :16] = 0
    keys[:, 5, 0], keys[:, 9, 0] = 1e4, -1e4
    plan = AttentionPlan([ChunkSpan(1, 15, array("i", [0, 1]))], BLOCK_SIZE)
    q = torch.zeros(1, 1, 16)
    q[..., 0] = 1.0
    assert torch.equal(paged_attention(q, keys, values, plan, scale=1.0)[0, 0], values[0, 5])


def test_write_kv_fills_exactly_the_named_slots() -> None:
    keys, values = torch.zeros(2, 32, 4), torch.zeros(2, 32, 4)
    slots = torch.tensor([5, 30, 0])
    new_keys, new_values = torch.randn(3, 2, 4), torch.randn(3, 2, 4)
    write_kv(keys, values, slots, new_keys, new_values)
    assert torch.equal(keys[:, slots], new_keys.transpose(0, 1))
    assert torch.equal(values[:, slots], new_values.transpose(0, 1))
    assert keys.count_nonzero() == new_keys.count_nonzero()
