"""Rows of quantised weights made of other checkpoints' codes and scales."""

from __future__ import annotations

import gguf
import pytest
import torch

from kernels.weight_formats import (
    FORMATS,
    INT4_FORMATS,
    INT8_F32,
    MXFP4,
    Q8_0,
    QuantizedRows,
    joined_rows,
    rows_of_codes,
    rows_of_fp8,
    rows_of_mxfp4,
    rows_of_nvfp4,
    rows_of_pairs,
)
from moeserve.model.tensor_reader import dequantise_mxfp4
from tests.support.quantised_rows import e4m3, random_rows


@pytest.mark.parametrize(
    "name", ["q8_0", "q4_0", "q4_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "mxfp4", "iq4_nl", "iq4_xs"]
)
def test_blocks_of_a_gguf_file_have_the_sizes_of_its_format(name: str) -> None:
    kind = gguf.GGMLQuantizationType[name.upper()]
    assert gguf.GGML_QUANT_SIZES[kind] == (FORMATS[name].block, FORMATS[name].block_bytes)


def test_mxfp4_of_safetensors_becomes_blocks_of_the_same_values() -> None:
    blocks = torch.randint(0, 256, (5, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (5, 3), dtype=torch.uint8)
    rows = rows_of_mxfp4(blocks, scales)
    assert rows.format is MXFP4
    assert rows.shape == (5, 96)
    values = gguf.dequantize(rows.data.numpy(), gguf.GGMLQuantizationType.MXFP4)
    assert torch.equal(torch.from_numpy(values), dequantise_mxfp4(blocks, scales, torch.float32))


def test_codes_and_scales_of_groups_become_blocks_of_32() -> None:
    codes = torch.randint(-128, 128, (3, 128)).to(torch.int8)
    scales = torch.rand(3, 2)
    rows = rows_of_codes(codes, scales)
    blocks = rows.data.view(3, 4, 36)
    assert rows.format is INT8_F32
    assert torch.equal(blocks[..., :4].contiguous().view(torch.float32).squeeze(-1), scales.repeat_interleave(2, 1))
    assert torch.equal(blocks[..., 4:].flatten(1).view(torch.int8), codes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_pairs_of_codes_of_four_bits_keep_their_values(dtype: torch.dtype) -> None:
    codes, zeros = (torch.randint(0, 16, shape, dtype=torch.uint8) for shape in ((3, 128), (3, 2)))
    scales = torch.rand(3, 2).to(dtype)
    rows = rows_of_pairs(codes[:, ::2] | codes[:, 1::2] << 4, scales, zeros)
    assert rows.format is (INT8_F32 if dtype == torch.float32 else INT4_FORMATS[dtype])
    wide = [part.float().repeat_interleave(64, 1) for part in (scales, zeros)]
    assert torch.equal(rows.dequantise(), wide[0] * (codes.float() - wide[1]))


def test_codes_of_eight_bits_keep_their_zero_points() -> None:
    codes, zeros = (torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((3, 128), (3, 1)))
    scales = torch.rand(3, 1)
    rows = rows_of_codes(codes, scales, zeros)
    assert torch.equal(rows.dequantise(), scales * (codes.float() - zeros.float()))


def test_floats_of_eight_and_four_bits_keep_their_values() -> None:
    codes, scales = e4m3(3, 64), torch.rand(3, 2)
    wide = codes.float() * scales.repeat_interleave(32, 1)
    assert torch.equal(rows_of_fp8(codes, scales).dequantise(), wide)
    blocks, small = torch.randint(0, 256, (3, 64), dtype=torch.uint8), e4m3(3, 8)
    ones = torch.full((3, 4), 127, dtype=torch.uint8)
    wanted = dequantise_mxfp4(blocks.view(3, 4, 16), ones, torch.float32)
    found = rows_of_nvfp4(blocks, small, torch.tensor(0.3)).dequantise()
    torch.testing.assert_close(found, wanted * small.float().repeat_interleave(16, 1) * 0.3, rtol=3e-7, atol=0.0)


def test_weights_that_are_no_numbers_are_refused() -> None:
    codes = torch.full((2, 64), float("nan")).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="what is no number"):
        rows_of_fp8(codes, torch.ones(2, 1))


def test_rows_in_an_order_of_their_own_are_the_same_matrix() -> None:
    rows = random_rows(Q8_0, 5, 64)
    order = torch.randperm(64)
    ordered = QuantizedRows(Q8_0, rows.data, 64, order)
    assert torch.equal(ordered.dequantise()[:, order], rows.dequantise())
    assert joined_rows([ordered, rows]) is None
    assert joined_rows([ordered, ordered]).order is order  # type: ignore[union-attr]


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        QuantizedRows(Q8_0, torch.zeros((2, 34), dtype=torch.uint8), 33)
    with pytest.raises(ValueError, match="are not rows of 64 weights in q8_0"):
        QuantizedRows(Q8_0, torch.zeros((2, 34), dtype=torch.uint8), 64)
