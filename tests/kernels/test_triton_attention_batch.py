"""What a sequence's result may depend on, the work list, and addresses that 32 bits do not hold."""

from __future__ import annotations

import mmap
from dataclasses import replace

import pytest
import torch

from kernels.gpu.attention_config import SplitConfig
from kernels.gpu.attention_kernels import SplitWork
from tests.support.paged_batch import Batch, assert_close, make_batch, run_prefill, run_split

pytestmark = pytest.mark.kernel_change

TILE = 16


def bits(values):
    return values.contiguous().view(torch.int32)


def reordered(batch: Batch, order: list[int]) -> Batch:
    """The same sequences in another order (one new token each)."""
    index = torch.tensor(order, device=batch.q.device)
    return replace(batch, q=batch.q[index], table=batch.table[index], seq_lens=batch.seq_lens[index])


def with_moved_blocks(batch: Batch, seed: int) -> Batch:
    """The same batch with every block somewhere else in pools of the same size."""
    size = batch.block_size
    num_blocks = batch.keys.shape[1] // size
    moved = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed)).to(batch.keys.device)
    slots = (moved.argsort()[:, None] * size + torch.arange(size, device=moved.device)).flatten()
    return replace(
        batch, keys=batch.keys[:, slots], values=batch.values[:, slots], table=moved[batch.table.long()].int()
    )


@pytest.mark.parametrize("window", [None, 40])
def test_with_a_fixed_chunk_a_sequence_has_the_same_bits_in_any_batch(window, device):
    batch = make_batch([1, 0, 17, 90, 64], device=device)
    settings = {"fixed_chunk": 32, "window": window, "max_len": 128}
    whole = run_split(batch, **settings)
    order = [3, 0, 4, 2, 1]
    assert torch.equal(bits(run_split(reordered(batch, order), **settings)), bits(whole[order]))
    for seq in (2, 3):
        alone = run_split(reordered(batch, [seq]), num_sms=132, **settings)
        assert torch.equal(bits(alone), bits(whole[[seq]]))


def test_where_blocks_lie_changes_no_bit(device):
    batch = make_batch([1, 17, 90], device=device)
    assert torch.equal(bits(run_split(with_moved_blocks(batch, 1))), bits(run_split(batch)))
    batch = make_batch([1, 17, 40], [1, 9, 20], device=device)
    assert torch.equal(bits(run_prefill(with_moved_blocks(batch, 2))), bits(run_prefill(batch)))


def test_a_second_run_has_the_same_bits(device):
    batch = make_batch([1, 0, 17, 90], device=device)
    assert torch.equal(bits(run_split(batch)), bits(run_split(batch)))


@pytest.mark.usefixtures("dots_by_row")
def test_prefill_gives_a_token_the_same_bits_in_any_chunking(device):
    batch = make_batch([50], [50], heads=2, kv_heads=1, device=device)
    whole = run_prefill(batch)
    for cut in (16, 33):
        rest = replace(
            batch, q=batch.q[cut:], query_starts=torch.tensor([0, 50 - cut], dtype=torch.int32, device=device)
        )
        assert torch.equal(bits(run_prefill(rest)), bits(whole[cut:]))


@pytest.mark.parametrize("fixed_chunk", [None, 64])
@pytest.mark.parametrize(
    ("lengths", "window"),
    [([0, 0], None), ([5], None), ([4096] * 8, None), ([1, 9000, 30, 700], None), ([3000, 17, 0, 64], 100)],
)
def test_the_work_list_has_every_chunk_once(lengths, window, fixed_chunk, device):
    config = SplitConfig(16, TILE, 4, 2, min_chunk=2 * TILE, programs_per_sm=2)
    work = SplitWork(8, 8, 10000, 2, config, device, num_sms=16, window=window, fixed_chunk=fixed_chunk)
    work.update(torch.tensor(lengths, dtype=torch.int32, device=device))
    chunk = int(work.chunk)
    assert chunk % TILE == 0
    expected = []
    for seq, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window) // chunk
        expected += [seq] * max(1, -(-length // chunk) - first)
    assert int(work.offsets[len(lengths)]) == len(expected) <= work.capacity
    assert work.sequences[: len(expected)].tolist() == expected
    if fixed_chunk is None and max(lengths) >= 4096:
        # 16 pieces fill the machine: about that many, and none is much larger than its share.
        assert 12 <= len(expected) <= work.capacity
        assert chunk <= max(sum(lengths) / 12, 2 * TILE)


def test_an_update_follows_the_lengths(device):
    work = SplitWork(4, 4, 512, 1, SplitConfig(16, TILE, 4, 2, min_chunk=TILE), device, num_sms=4)
    for lengths in ([512, 1], [1, 1, 1, 1], [200]):
        work.update(torch.tensor(lengths, dtype=torch.int32, device=device))
        fresh = SplitWork(4, 4, 512, 1, work.config, device, num_sms=4)
        fresh.update(torch.tensor(lengths, dtype=torch.int32, device=device))
        pieces = int(fresh.offsets[len(lengths)])
        assert work.chunk.tolist() == fresh.chunk.tolist()
        assert work.sequences[:pieces].tolist() == fresh.sequences[:pieces].tolist()
    with pytest.raises(ValueError, match="room for 4"):
        work.update(torch.zeros(5, dtype=torch.int32, device=device))


def sparse_memory(num_elements, device):
    """fp16 memory in which only written parts take room, so that strides can be huge."""
    if device.type != "cpu":
        return torch.empty(num_elements, dtype=torch.float16, device=device)
    memory = mmap.mmap(-1, 2 * num_elements, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=torch.float16)


def spread(tensor, strides, device):
    """The same values at other strides."""
    size = sum((n - 1) * stride for n, stride in zip(tensor.shape, strides, strict=True)) + 1
    view = sparse_memory(size, device).as_strided(tensor.shape, strides)
    view.copy_(tensor)
    return view


@pytest.mark.parametrize("block_size", [16, 8])
@pytest.mark.parametrize(("tensor", "axis"), [("pools", 0), ("pools", 1), ("q", 0), ("q", 1)])
def test_offsets_beyond_32_bits(tensor, axis, block_size, device):
    far = 5 << 29  # in elements: more than 2^31
    options = {"block_size": block_size, "dtype": torch.float16, "device": device}
    for run, batch in (
        (run_split, make_batch([20, 3, 150], **options)),
        (run_prefill, make_batch([20, 3, 150], [20, 2, 1], **options)),
    ):
        moved = {}
        for name in ("q",) if tensor == "q" else ("keys", "values"):
            values = getattr(batch, name)
            strides = [values.shape[2], values.shape[2], 1]
            strides[axis] = far // (values.shape[axis] - 1) // 16 * 16 + 16
            moved[name] = spread(values, strides, device)
        assert_close(run(replace(batch, **moved)), batch.reference())


def test_slots_that_lie_too_far_apart_are_refused(device):
    batch = make_batch([20], dtype=torch.float16, device=device)
    keys = spread(batch.keys, (32, 1 << 24, 1), device)
    with pytest.raises(ValueError, match="too far apart"):
        run_split(replace(batch, keys=keys))


def test_reducing_several_heads_per_program_changes_no_bit(device, monkeypatch):
    batch = make_batch([1, 0, 40], heads=12, kv_heads=1, device=device)
    plain = run_split(batch, fixed_chunk=16)
    monkeypatch.setattr("kernels.gpu.attention._MANY_ROWS", 1)
    assert torch.equal(bits(run_split(batch, fixed_chunk=16)), bits(plain))
