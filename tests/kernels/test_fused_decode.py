"""The variant that norms, rotates and stores within decode attention has the results of the two kernels that serve."""

import math
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.variants.fused_decode import NewHeads, rotate_store_and_attend
from kernels.gpu.attention import Partials
from kernels.gpu.attention_config import SplitConfig
from kernels.gpu.attention_kernels import SplitWork
from kernels.gpu.rope_kv import norm_rope_write_kv_reference
from tests.support.paged_batch import assert_close, make_batch

pytestmark = pytest.mark.kernel_change

# A padded row, the first token, one token more and less than a tile of 16, several chunks.
LENGTHS = [1, 0, 16, 17, 33, 70]
EPS = 1e-6


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "block_size", "dtype", "fixed_chunk"),
    [
        (4, 2, 64, 16, torch.float32, 32),
        (20, 1, 32, 64, torch.float32, None),
        (8, 1, 64, 64, torch.bfloat16, 32),
    ],
)
def test_heads_are_normed_rotated_stored_and_attended(heads, kv_heads, dim, block_size, dtype, fixed_chunk, device):
    torch.manual_seed(0)
    batch = make_batch(
        LENGTHS, heads=heads, kv_heads=kv_heads, key_dim=dim, block_size=block_size, dtype=dtype, device=device
    )
    last = (batch.seq_lens.long() - 1).clamp(min=0)
    slots = batch.table.gather(1, (last // block_size)[:, None])[:, 0].long() * block_size + last % block_size
    slots = torch.where(batch.seq_lens > 0, slots, -1)
    for pool in (batch.keys, batch.values):
        pool[:, slots[slots >= 0]] = math.nan  # Nobody may read what is not stored yet.
    count = len(LENGTHS)
    q, k, v = (
        torch.randn(count, heads + 2 * kv_heads, dim, device=device).to(dtype).split([heads, kv_heads, kv_heads], 1)
    )
    angles = torch.randn(count, dim // 2, device=device)
    weights = [torch.randn(dim, device=device).to(dtype) for _ in range(2)]
    new = NewHeads(q, k, v, angles.cos(), angles.sin(), slots, *weights, EPS)
    pools = batch.keys.clone(), batch.values.clone()
    rotated = norm_rope_write_kv_reference(
        q, k, v, new.cos, new.sin, slots, *pools, interleaved=False, q_weight=weights[0], k_weight=weights[1], eps=EPS
    )
    wanted = replace(batch, q=rotated, keys=pools[0], values=pools[1]).reference()
    config = SplitConfig(16, 16, 4, 2, min_chunk=16, programs_per_sm=1)
    groups = kv_heads * -(-(heads // kv_heads) // config.rows)
    work = SplitWork(count, count, max(LENGTHS), groups, config, q.device, num_sms=4, fixed_chunk=fixed_chunk)
    work.update(batch.seq_lens)
    partials = Partials.allocate(work, heads, dim)
    found = rotate_store_and_attend(new, batch.context, work, partials, batch.scale)
    assert_close(found, wanted)
    for pool, expected in zip((batch.keys, batch.values), pools, strict=True):
        torch.testing.assert_close(
            pool, expected, equal_nan=True, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-5
        )


def test_other_heads_are_refused(device):
    batch = make_batch([3], key_dim=48, device=device)
    work = SplitWork(1, 1, 3, 2, SplitConfig(16, 16, 4, 2, min_chunk=16, programs_per_sm=1), device, num_sms=4)
    angles = torch.zeros(1, 24, device=device)
    k = batch.q[:, :2]
    new = NewHeads(batch.q, k, k, angles, angles, torch.tensor([0]), angles[0], angles[0], EPS)
    with pytest.raises(ValueError, match="heads of 48"):
        rotate_store_and_attend(new, batch.context, work, Partials.allocate(work, 4, 48), 1.0)
