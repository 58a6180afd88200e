"""Rows of quantised weights made of other checkpoints' codes and scales."""

from __future__ import annotations

import gguf
import pytest
import torch

from kernels.weight_formats import FORMATS, INT8_F32, MXFP4, Q8_0, QuantizedRows, rows_of_codes, rows_of_mxfp4
from moeserve.model.tensor_reader import dequantise_mxfp4


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q4_k", "q5_k", "q6_k", "mxfp4"])
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


def test_codes_of_four_bits_keep_their_zero_points() -> None:
    codes, zeros = (torch.randint(0, 16, shape).to(torch.uint8) for shape in ((3, 128), (3, 1)))
    rows = rows_of_codes(codes, torch.rand(3, 1).half(), zeros)
    blocks = rows.data.view(3, 4, 19)
    assert torch.equal(blocks[..., 2], zeros.expand(3, 4))
    halves = torch.cat([blocks[..., 3:] & 15, blocks[..., 3:] >> 4], -1)
    assert torch.equal(halves.flatten(1), codes)


def test_rows_that_are_not_whole_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="blocks of 32"):
        QuantizedRows(Q8_0, torch.zeros((2, 34), dtype=torch.uint8), 33)
    with pytest.raises(ValueError, match="are not rows of 64 weights in q8_0"):
        QuantizedRows(Q8_0, torch.zeros((2, 34), dtype=torch.uint8), 64)
