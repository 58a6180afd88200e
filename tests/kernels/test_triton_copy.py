"""Blocks move between pools bit by bit, and nothing else moves."""

import mmap

import pytest
import torch

from kernels.gpu.block_copy import copy_blocks, copy_blocks_reference


def make_pool(device, heads, blocks, block_size, dim, dtype, *, slots_first=False):
    bits = torch.randint(0, 256, (blocks * block_size * heads * dim * dtype.itemsize,), dtype=torch.uint8)
    bits = bits.view(dtype).to(device)
    if slots_first:
        return bits.view(blocks * block_size, heads, dim).transpose(0, 1)
    return bits.view(heads, blocks * block_size, dim)


def bits_of(pool):
    return pool.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("heads", "block_size", "dim"), [(2, 16, 8), (1, 3, 20), (3, 64, 64)])
def test_gather_into_a_staging_pool_and_scatter_back(device, heads, block_size, dim, dtype):
    torch.manual_seed(0)
    pool = make_pool(device, heads, 6, block_size, dim, dtype, slots_first=True)
    staging = make_pool(device, heads, 3, block_size, dim, dtype)
    expected = staging.clone()
    ids = torch.tensor([4, 0, 5], device=device)
    copy_blocks(pool, staging, ids, None, block_size=block_size)
    copy_blocks_reference(pool, expected, ids, None, block_size=block_size)
    assert torch.equal(bits_of(staging), bits_of(expected))

    other = make_pool(device, heads, 6, block_size, dim, dtype)
    expected = other.clone()
    copy_blocks(staging, other, None, ids, block_size=block_size)
    copy_blocks_reference(staging, expected, None, ids, block_size=block_size)
    assert torch.equal(bits_of(other), bits_of(expected))


def test_copy_within_a_pool_skips_minus_one_on_either_side(device):
    torch.manual_seed(1)
    pool = make_pool(device, 2, 8, 4, 6, torch.float16)
    expected = pool.clone()
    sources = torch.tensor([1, -1, 2, 3], dtype=torch.int32, device=device)
    targets = torch.tensor([7, 6, -1, 5], dtype=torch.int32, device=device)
    copy_blocks(pool, pool, sources, targets, block_size=4)
    copy_blocks_reference(expected, expected, sources, targets, block_size=4)
    assert torch.equal(bits_of(pool), bits_of(expected))


def test_no_ids_copy_the_first_blocks_and_zero_blocks_copy_nothing(device):
    torch.manual_seed(2)
    source = make_pool(device, 1, 4, 2, 4, torch.float32)
    target = make_pool(device, 1, 4, 2, 4, torch.float32)
    before = target.clone()
    copy_blocks(source, target, torch.empty(0, dtype=torch.int64, device=device), None, block_size=2)
    assert torch.equal(bits_of(target), bits_of(before))
    copy_blocks(source, target, None, None, block_size=2, num_blocks=3)
    assert torch.equal(bits_of(target[:, :6]), bits_of(source[:, :6]))
    assert torch.equal(bits_of(target[:, 6:]), bits_of(before[:, 6:]))


def test_a_block_that_lies_beyond_2_to_the_31_elements_is_addressed(device):
    size = 2**31 + 64
    # Pages that nobody touches take no memory.
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8) if device.type == "cpu" else None
    pool = (torch.zeros(size, dtype=torch.uint8, device=device) if memory is None else memory).view(1, size // 16, 16)
    far = size // 16 - 1
    pool[0, far] = torch.arange(16, dtype=torch.uint8)
    copy_blocks(pool, pool, torch.tensor([far], device=device), torch.tensor([0], device=device), block_size=1)
    assert pool[0, 0].tolist() == list(range(16))


def test_pools_of_different_kinds_are_refused(device):
    source = make_pool(device, 1, 2, 2, 4, torch.float32)
    with pytest.raises(ValueError, match="pools differ"):
        copy_blocks(source, source.half(), None, None, block_size=2, num_blocks=1)
