"""Checkpoints whose projections are in FP8 with block scales, as DeepSeek publishes them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from tests.support.checkpoints import change_tensors


def to_fp8(
    directory: Path, block: tuple[int, int], scale_dtype: torch.dtype = torch.float32, *, powers_of_two: bool = True
) -> dict[str, Tensor]:
    """Quantise the projections of a saved model in place, by blocks of (rows, columns).

    Return the values that they stand for, by name, in float32. powers_of_two: of the scales.
    """
    values: dict[str, Tensor] = {}

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if "_proj" in name and name.endswith(".weight")]:
            rows, columns = tensors[name].shape
            shape = (-(-rows // block[0]), -(-columns // block[1]))
            generator = torch.Generator().manual_seed(rows)
            scale = torch.exp2(torch.randint(-3, 1, shape, generator=generator).float())
            if not powers_of_two:
                scale *= 1 + torch.rand(shape, generator=generator)
            scale = scale.to(scale_dtype)
            small = (tensors[name] * 4).to(torch.float8_e4m3fn)
            wide = scale.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            values[name] = small.float() * wide[:rows, :columns]
            tensors[name], tensors[f"{name}_scale_inv"] = small, scale

    change_tensors(directory, quantise)
    path = directory / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": list(block)}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    return values
