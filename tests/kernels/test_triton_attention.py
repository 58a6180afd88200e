"""Decode, short extends and prefill over paged keys and values against their reference."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from kernels.gpu.attention import ExtendRun, Partials, Scoring, paged_attention, split_attention
from kernels.gpu.attention_config import PrefillConfig, SplitConfig
from kernels.gpu.attention_kernels import SplitWork
from tests.support.far_memory import spread
from tests.support.paged_batch import Batch, assert_close, guarded, make_batch, run_prefill, run_split

pytestmark = pytest.mark.kernel_change

TILE = 16
# An empty sequence (a padded row), one token, one less and one more than a tile, whole tiles, several chunks.
LENGTHS = [1, 0, TILE - 1, TILE, TILE + 1, 70]
FP8 = torch.float8_e4m3fn


def flags_of(window, sinks, soft_cap, device, heads=4):
    flags = {}
    if window is not None:
        flags["window"] = window
    if sinks:
        flags["sinks"] = torch.linspace(-1, 2, heads, device=device)
    if soft_cap is not None:
        flags["soft_cap"] = soft_cap
    return flags


@pytest.mark.parametrize("fixed_chunk", [None, 32])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim", "block_size"),
    [
        (4, 2, 64, 64, 16),
        (9, 3, 80, 80, 64),
        (8, 1, 96, 96, 16),
        (2, 1, 112, 112, 64),
        (2, 1, 128, 128, 16),
        (4, 4, 192, 128, 16),
        (2, 1, 256, 256, 64),
        (20, 1, 24, 40, 16),
    ],
)
def test_decode_matches_the_reference(heads, kv_heads, key_dim, value_dim, block_size, fixed_chunk, device):
    lengths = LENGTHS if kv_heads < 4 else [1, 0, 50]
    batch = make_batch(
        lengths,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        device=device,
    )
    assert_close(run_split(batch, fixed_chunk=fixed_chunk), batch.reference())


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, FP8)])
def test_decode_in_low_precision(dtype, kv_dtype, device):
    batch = make_batch(LENGTHS, dtype=dtype, kv_dtype=kv_dtype, key_dim=64, device=device)
    scales = {"key_scale": 0.75, "value_scale": 1.5} if kv_dtype == FP8 else {}
    assert_close(run_split(batch, fixed_chunk=32, **scales), batch.reference(**scales))


@pytest.mark.parametrize("power", [-60, 20])
@pytest.mark.parametrize("key_dim", [64, 80])
def test_queries_beyond_the_range_of_fp16_over_keys_of_fp8(key_dim, power, device):
    batch = make_batch([40, 5], [3, 5], dtype=torch.bfloat16, kv_dtype=FP8, key_dim=key_dim, device=device)
    batch = replace(batch, q=batch.q * 2.0**power)
    expected = batch.reference(key_scale=2.0**-power)
    assert_close(run_split(batch, fixed_chunk=32, key_scale=2.0**-power), expected)
    assert_close(run_prefill(batch, rows=16, key_scale=2.0**-power), expected)


@pytest.mark.parametrize("fixed_chunk", [None, 16, 32])
@pytest.mark.parametrize(
    ("window", "sinks", "soft_cap"),
    [(1, False, None), (16, True, None), (17, False, 5.0), (33, True, 5.0), (500, False, None), (None, True, 2.0)],
)
def test_decode_with_window_sinks_and_soft_cap(window, sinks, soft_cap, fixed_chunk, device):
    batch = make_batch(LENGTHS, visible=window, device=device)
    flags = flags_of(window, sinks, soft_cap, device)
    assert_close(run_split(batch, fixed_chunk=fixed_chunk, **flags), batch.reference(**flags))


@pytest.mark.parametrize(
    ("heads", "key_dim", "value_dim", "tile"), [(4, 80, 64, 16), (20, 80, 64, 16), (4, 576, 512, 16), (4, 80, 48, 16)]
)
def test_values_that_are_a_prefix_of_the_keys(heads, key_dim, value_dim, tile, device):
    lengths = [1, 0, 37]
    batch = make_batch(
        lengths, heads=heads, kv_heads=1, key_dim=key_dim, value_dim=value_dim, values_in_keys=True, device=device
    )
    assert_close(run_split(batch, tile=tile, fixed_chunk=2 * tile), batch.reference())


def test_values_of_fp8_that_are_a_prefix_of_the_keys(device):
    batch = make_batch(
        [1, 0, 37],
        heads=4,
        kv_heads=1,
        key_dim=80,
        value_dim=64,
        values_in_keys=True,
        dtype=torch.bfloat16,
        kv_dtype=FP8,
        device=device,
    )
    assert_close(
        run_split(batch, fixed_chunk=32, key_scale=0.5, value_scale=0.5),
        batch.reference(key_scale=0.5, value_scale=0.5),
    )


@pytest.mark.parametrize("tile", [16, 32])
def test_keys_and_values_that_lie_beyond_32_bits_are_read(tile, device):
    batch = make_batch([40, 3, 33], [1, 3, 20], dtype=torch.float16, device=device)
    expected = batch.reference()
    strides = (batch.keys.shape[2], (1 << 24) - 16, 1)  # slots lie as far from each other as the kernels take
    assert (int(batch.table.max()) + 1) * batch.block_size * strides[1] > 1 << 31
    batch = replace(batch, keys=spread(batch.keys, strides), values=spread(batch.values, strides))
    assert_close(run_split(batch, tile=tile, fixed_chunk=32), expected)
    assert_close(run_prefill(batch, rows=16, tile=tile), expected)


@pytest.mark.parametrize(("window", "sinks", "soft_cap"), [(None, False, None), (20, True, 5.0)])
@pytest.mark.parametrize("tokens_per_tile", [2, 5])
def test_short_extends_are_split_too(tokens_per_tile, window, sinks, soft_cap, device):
    query_lens = [1, 0, 7, 4, 2]
    batch = make_batch([1, 0, 7, 70, 33], query_lens, heads=6, kv_heads=2, device=device)
    flags = flags_of(window, sinks, soft_cap, device, heads=6)
    for fixed_chunk in (None, 32):
        out = run_split(batch, tokens_per_tile=tokens_per_tile, fixed_chunk=fixed_chunk, **flags)
        assert_close(out, batch.reference(**flags))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim", "block_size"),
    [
        (2, 1, 64, 64, 16),
        (4, 2, 80, 80, 64),
        (2, 1, 96, 96, 16),
        (1, 1, 128, 128, 16),
        (1, 1, 192, 128, 64),
        (1, 1, 256, 256, 16),
        (2, 2, 24, 40, 16),
    ],
)
def test_prefill_matches_the_reference(heads, kv_heads, key_dim, value_dim, block_size, device):
    query_lens = [1, 0, 15, 16, 17, 5]
    batch = make_batch(
        [1, 0, 15, 32, 17, 70],
        query_lens,
        heads=heads,
        kv_heads=kv_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        block_size=block_size,
        device=device,
    )
    assert_close(run_prefill(batch), batch.reference())


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(
    ("window", "sinks", "soft_cap"),
    [(1, False, None), (16, True, None), (17, False, 5.0), (33, True, None), (500, False, None), (None, True, 2.0)],
)
def test_prefill_with_window_sinks_and_soft_cap(window, sinks, soft_cap, rows, device):
    visible = None if window is None else window + 36 - 1
    batch = make_batch([36, 90, 7], [36, 20, 1], heads=2, kv_heads=1, visible=visible, device=device)
    flags = flags_of(window, sinks, soft_cap, device, heads=2)
    assert_close(run_prefill(batch, rows=rows, **flags), batch.reference(**flags))


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(torch.bfloat16,) * 2, (torch.float16,) * 2, (torch.bfloat16, FP8)])
def test_prefill_in_low_precision(dtype, kv_dtype, device):
    batch = make_batch([40, 33], [40, 9], heads=2, kv_heads=1, dtype=dtype, kv_dtype=kv_dtype, device=device)
    scales = {"key_scale": 0.75, "value_scale": 1.5} if kv_dtype == FP8 else {}
    assert_close(run_prefill(batch, rows=32, **scales), batch.reference(**scales))


def test_prefill_of_values_that_are_a_prefix_of_the_keys(device):
    batch = make_batch(
        [20, 33], [20, 9], heads=2, kv_heads=1, key_dim=80, value_dim=64, values_in_keys=True, device=device
    )
    assert_close(run_prefill(batch), batch.reference())


@pytest.mark.parametrize("num_decodes", [0, 2, 4])
@pytest.mark.parametrize("window", [None, 19])
def test_a_mixed_batch(num_decodes, window, device):
    query_lens = [1] * num_decodes + [18, 3] * (num_decodes < 4)
    lengths = ([1, 40, 17, 33][:num_decodes]) + [30, 60][: len(query_lens) - num_decodes]
    batch = make_batch(lengths, query_lens, device=device)
    config = SplitConfig(16, TILE, 4, 2, min_chunk=TILE, programs_per_sm=1)
    work = SplitWork(4, 4, 64, 2, config, device, num_sms=4, window=window)
    work.update(batch.seq_lens[:num_decodes])
    out = guarded(
        lambda out: paged_attention(
            batch.q,
            batch.context,
            batch.query_starts,
            work,
            Partials.allocate(work, 4, 32),
            Scoring(batch.scale),
            num_decodes=num_decodes,
            config=PrefillConfig(16, TILE, 4, 2),
            out=out,
        ),
        batch,
    )
    assert_close(out, batch.reference(window=window))


def test_more_decodes_than_a_tile_has_rows_are_left_alone_by_the_prefill(device):
    num_decodes = 37
    batch = make_batch([1] * num_decodes + [9, 20], [1] * num_decodes + [9, 3], device=device)
    work = SplitWork(64, 64, 64, 2, SplitConfig(16, TILE, 4, 2, min_chunk=TILE), device, num_sms=4)
    work.update(batch.seq_lens[:num_decodes])
    partials = Partials.allocate(work, 4, 32)
    out = guarded(
        lambda out: paged_attention(
            batch.q,
            batch.context,
            batch.query_starts,
            work,
            partials,
            Scoring(batch.scale),
            num_decodes=num_decodes,
            config=PrefillConfig(16, TILE, 4, 2),
            out=out,
        ),
        batch,
    )
    assert_close(out, batch.reference())


@pytest.mark.parametrize("window", [None, 24])
@pytest.mark.parametrize(("first", "end"), [(2, 4), (3, 5), (2, 6), (4, 6), (5, 6)])
def test_short_extends_anywhere_among_prompts(first, end, window, device):
    query_lens = [1, 1, 9, 3, 1, 18]
    batch = make_batch([5, 40, 9, 70, 33, 50], query_lens, visible=70, device=device)
    config = SplitConfig(16, TILE, 4, 2, min_chunk=TILE)
    work = SplitWork(8, 8, 128, 2, config, device, num_sms=4, window=window)
    work.update(batch.seq_lens[:2])
    extends = SplitWork(8, 16, 128, 2, config, device, num_sms=4, max_query_len=18, tokens_per_tile=8, window=window)
    extends.update(batch.seq_lens[first:end], batch.query_starts[first : end + 1])
    partials = Partials.allocate(work, 4, 32, extends)
    partials.parts.fill_(math.nan)
    out = guarded(
        lambda out: paged_attention(
            batch.q,
            batch.context,
            batch.query_starts,
            work,
            partials,
            Scoring(batch.scale),
            num_decodes=2,
            config=PrefillConfig(16, TILE, 4, 2),
            extends=ExtendRun(first, end, sum(query_lens[first:end]), extends),
            out=out,
        ),
        batch,
    )
    assert_close(out, batch.reference(window=window))


def test_rows_behind_the_last_sequence_stay_as_they_are(device):
    batch = make_batch([20, 9], [5, 3], device=device)
    longer = Batch(torch.cat([batch.q, batch.q[:4]]), *batch.where[1:], batch.query_starts, batch.block_size)
    for out in (run_prefill(longer), run_split(longer, tokens_per_tile=2)):
        assert_close(out[:8], batch.reference())
        assert bool(out[8:].isnan().all())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 24}, "power of two"),
        ({"heads": 5}, "do not fit"),
    ],
)
def test_what_the_kernels_would_misread_is_refused(change, message, device):
    batch = make_batch([20], device=device)
    work = SplitWork(1, 1, 32, 2, SplitConfig(16, TILE, 4, 2), device, num_sms=4)
    q = torch.zeros((1, change.get("heads", 4), 32), device=device)
    context = replace(batch.context, block_size=change.get("block_size", 16))
    with pytest.raises(ValueError, match=message):
        split_attention(q, context, work, Partials.allocate(work, 4, 32), Scoring(1.0))


def test_a_chunk_length_that_is_no_multiple_of_the_tile_is_refused(device):
    with pytest.raises(ValueError, match="multiple"):
        SplitWork(1, 1, 32, 2, SplitConfig(16, TILE, 4, 2), device, num_sms=4, fixed_chunk=TILE + 1)


def test_scratch_that_is_too_small_is_refused(device):
    batch = make_batch([20], device=device)
    small, large = (SplitWork(n, n, 32, 2, SplitConfig(16, TILE, 4, 2), device, num_sms=4) for n in (1, 9))
    with pytest.raises(ValueError, match="too small"):
        split_attention(batch.q, batch.context, large, Partials.allocate(small, 4, 32), Scoring(1.0))
