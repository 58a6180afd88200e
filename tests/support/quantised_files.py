"""Tiny checkpoints in the quantised layouts of other programs, written with numpy from the layouts' descriptions.

Each writer turns a saved model into a quantised one in place, and returns the values [N, K] of its matrices, float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Array = np.ndarray[Any, np.dtype[Any]]
# Turns a matrix [N, K] into the tensors that are stored in its place, by their endings, and its values.
Quantise = Callable[[Array], tuple[dict[str, Array | Tensor], Array]]
_NEVER = ("embed_tokens", "lm_head", "norm", ".gate.", "conv1d", "shared_expert_gate", "router")


def quantise_checkpoint(
    directory: Path, config: dict[str, Any], quantise: Quantise, leave: Callable[[str], bool] = lambda _: False
) -> Path:
    """Quantise a model saved in `directory`; return a folder beside it that holds the same values in float32.

    leave: tells the names of matrices that stay as they are.
    """
    path, plain = directory / "model.safetensors", directory / "plain"
    plain.mkdir()
    tensors, values = load_file(path), {}
    for name, tensor in list(tensors.items()):
        if tensor.dim() != 2 or not name.endswith(".weight") or any(part in name for part in _NEVER) or leave(name):
            continue
        parts, wide = quantise(tensor.float().numpy())
        values[name] = torch.from_numpy(np.ascontiguousarray(wide, np.float32))
        del tensors[name]
        stem = name.removesuffix(".weight")
        for ending, part in parts.items():
            given = part if isinstance(part, Tensor) else torch.from_numpy(np.ascontiguousarray(part))
            tensors[f"{stem}.{ending}"] = given.contiguous()
    assert values
    save_file(
        {**{name: tensor for name, tensor in load_file(path).items() if name not in values}, **values},
        plain / "model.safetensors",
        {"format": "pt"},
    )
    save_file(tensors, path)
    content = json.loads((directory / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(content))
    (directory / "config.json").write_text(json.dumps({**content, "quantization_config": config}))
    return plain


def gptq(
    bits: int, group: int, *, version: str = "gptq", desc_act: bool = False, dtype: Any = np.float16
) -> tuple[dict[str, Any], Quantise]:
    """group: -1 for all columns. Return the configuration and the writer."""
    config = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": desc_act, "sym": False}
    config |= {} if version == "gptq" else {"checkpoint_format": version}

    def quantise(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        depth = weight.shape[1]
        groups = np.arange(depth) // (depth if group == -1 else group)
        if desc_act:
            # The same for matrices of one shape, as gate and up see the same inputs.
            groups = groups[np.random.default_rng(depth).permutation(depth)]
        scales, zeros, codes = _asymmetric(weight, groups, bits, dtype)
        stored = zeros - 1 if version == "gptq" else zeros
        parts = {
            "qweight": _pack(codes.T, bits, 0),
            "qzeros": _pack(stored.T, bits, 1),
            "scales": scales.T,
            "g_idx": groups.astype(np.int32),
        }
        values = scales.astype(np.float32)[:, groups] * (codes - zeros[:, groups]).astype(np.float32)
        return parts, values

    return config, quantise


def awq(group: int) -> tuple[dict[str, Any], Quantise]:
    config = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    config["modules_to_not_convert"] = ["gate"]

    def quantise(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        groups = np.arange(weight.shape[1]) // group
        scales, zeros, codes = _asymmetric(weight, groups, 4, np.float16)
        # Of eight columns, the one whose code is in bits 4 i ... 4 i + 3 of the word.
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        words = [
            _pack(part.T.reshape(part.shape[1], -1, 8)[..., order].reshape(part.shape[1], -1), 4, 1)
            for part in (codes, zeros)
        ]
        values = scales.astype(np.float32)[:, groups] * (codes - zeros[:, groups]).astype(np.float32)
        return {"qweight": words[0], "qzeros": words[1], "scales": scales.T}, values

    return config, quantise


def _asymmetric(weight: Array, groups: Array, bits: int, dtype: Any) -> tuple[Array, Array, Array]:
    """Return scales [N, G], zero points [N, G] and codes [N, K]."""
    most = 2**bits - 1
    number = int(groups.max()) + 1
    low, high = (np.stack([f(weight[:, groups == g], 1) for g in range(number)], 1) for f in (np.min, np.max))
    scales = ((high - low) / most).astype(dtype)
    zeros = np.clip(np.round(-low / scales.astype(np.float32)), 0, most).astype(np.int64)
    codes = np.round(weight / scales.astype(np.float32)[:, groups]) + zeros[:, groups]
    return scales, zeros, np.clip(codes, 0, most).astype(np.int64)


def _pack(codes: Array, bits: int, axis: int) -> Array:
    """Pack codes into words of 32 bits along an axis, the first in the lowest bits."""
    codes = np.moveaxis(codes & (2**bits - 1), axis, -1).astype(np.uint32)
    words = codes.reshape(*codes.shape[:-1], -1, 32 // bits)
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    return np.moveaxis(np.bitwise_or.reduce(words << shifts, -1), -1, axis).view(np.int32)
