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
        # The one of eight columns whose code is in bits 4 i ... 4 i + 3 of the word.
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        words = [
            _pack(part.T.reshape(part.shape[1], -1, 8)[..., order].reshape(part.shape[1], -1), 4, 1)
            for part in (codes, zeros)
        ]
        values = scales.astype(np.float32)[:, groups] * (codes - zeros[:, groups]).astype(np.float32)
        return {"qweight": words[0], "qzeros": words[1], "scales": scales.T}, values

    return config, quantise


def compressed(
    form: str,
    bits: int = 4,
    group: int = 32,
    *,
    symmetric: bool = True,
    desc_act: bool = False,
    dtype: Any = np.float32,
) -> tuple[dict[str, Any], Quantise]:
    """Return the configuration and the writer of compressed-tensors. group: -1 for one scale a row, -2 for one in all,
    0 for one of each block of 16 rows and 32 columns."""
    weights = {"num_bits": bits, "type": "float" if form in ("float-quantized", "nvfp4-pack-quantized") else "int"}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": {"weights": weights}}}

    def words(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        groups = np.arange(weight.shape[1]) // (weight.shape[1] if group == -1 else group)
        if desc_act:
            groups = groups[np.random.default_rng(weight.shape[1]).permutation(weight.shape[1])]
        scales, zeros, codes = _asymmetric(weight, groups, bits, dtype)
        if symmetric:
            zeros = np.full_like(zeros, 2 ** (bits - 1))
            scales = (2 * np.abs(scales.astype(np.float32))).astype(dtype)
            codes = np.clip(np.round(weight / scales.astype(np.float32)[:, groups]) + zeros[:, groups], 0, 2**bits - 1)
            codes = codes.astype(np.int64)
        parts: dict[str, Array | Tensor] = {
            "weight_packed": _pack(codes, bits, 1),
            "weight_scale": torch.from_numpy(np.ascontiguousarray(scales)),
            "weight_shape": np.array(weight.shape, np.int64),
        }
        if not symmetric:
            parts["weight_zero_point"] = _pack(np.pad(zeros, ((0, -len(zeros) % (32 // bits)), (0, 0))), bits, 0)
        if desc_act:
            parts["weight_g_idx"] = groups.astype(np.int32)
        return parts, scales.astype(np.float32)[:, groups] * (codes - zeros[:, groups]).astype(np.float32)

    def plain(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        scales, wide = _scales_of(weight, group)
        if form == "float-quantized":
            small = torch.from_numpy(weight / wide * 400).to(torch.float8_e4m3fn)
            return {"weight": small, "weight_scale": scales / 400}, small.float().numpy() * (wide / np.float32(400))
        zeros = np.zeros_like(scales, np.int8) if symmetric else np.full(scales.shape, 7, np.int8)
        offset = 0 if symmetric else 7
        codes = np.clip(np.round(weight / wide * 120) + offset, -128, 127).astype(np.int8)
        parts: dict[str, Array | Tensor] = {"weight": codes, "weight_scale": scales / np.float32(120)}
        parts |= {} if symmetric else {"weight_zero_point": zeros}
        return parts, (codes.astype(np.float32) - offset) * (wide / np.float32(120))

    return config, {"pack-quantized": words, "nvfp4-pack-quantized": _nvfp4("weight_packed", True)}.get(form, plain)


def deepseek(rows: int, columns: int, scale_dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], Quantise]:
    """FP8 with a scale for each block of some rows and columns, which may be narrower at the edges."""

    def quantise(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        num_rows, depth = weight.shape
        bands, groups = -(-num_rows // rows), -(-depth // columns)
        padded = np.zeros((bands * rows, groups * columns), np.float32)
        padded[:num_rows, :depth] = np.abs(weight)
        scales = torch.from_numpy(padded.reshape(bands, rows, groups, columns).max((1, 3)) / 400).to(scale_dtype)
        wide = scales.float().numpy().repeat(rows, 0).repeat(columns, 1)[:num_rows, :depth]
        small = torch.from_numpy(weight / wide).to(torch.float8_e4m3fn)
        return {"weight": small, "weight_scale_inv": scales}, small.float().numpy() * wide

    return {"quant_method": "fp8", "weight_block_size": [rows, columns], "activation_scheme": "dynamic"}, quantise


def renamed(quantise: Quantise, names: dict[str, str], **further: Array) -> Quantise:
    """Give the tensors of a writer other names, and write further ones."""

    def write(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        parts, values = quantise(weight)
        named = {names.get(name, name): part for name, part in parts.items()}
        return named | {name: part.copy() for name, part in further.items()}, values

    return write


def without(layout: tuple[dict[str, Any], Quantise], name: str) -> tuple[dict[str, Any], Quantise]:
    """Leave a tensor of each matrix out."""
    config, quantise = layout

    def write(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        parts, values = quantise(weight)
        return {own: part for own, part in parts.items() if own != name}, values

    return config, write


def compressed_blocks(rows: int, columns: int) -> tuple[dict[str, Any], Quantise]:
    """compressed-tensors in FP8 with a scale for each block, which may be narrower at the edges."""
    config = compressed("float-quantized", 8, 0)[0]
    weights = config["config_groups"]["group_0"]["weights"]
    weights |= {"strategy": "block", "block_structure": [rows, columns]}
    return config, renamed(deepseek(rows, columns)[1], {"weight_scale_inv": "weight_scale"})


def compressed_widths() -> tuple[dict[str, Any], Quantise]:
    """Codes of 4 bits in groups of 32 and of 8 bits in groups of 64, these in matrices of more columns than rows."""
    (config, four), (other, eight) = (
        compressed("pack-quantized", bits, group, dtype=np.float16) for bits, group in ((4, 32), (8, 64))
    )
    config["config_groups"] |= {"group_1": other["config_groups"]["group_0"]}
    for name, size in (("group_0", 32), ("group_1", 64)):
        config["config_groups"][name]["weights"]["group_size"] = size
    return config, lambda weight: (eight if weight.shape[1] > weight.shape[0] else four)(weight)


def with_byte_zeros(layout: tuple[dict[str, Any], Quantise]) -> tuple[dict[str, Any], Quantise]:
    """Write the zero points of 4 bits as earlier versions of compressed-tensors did, one in a byte and less 8."""
    config, quantise = layout

    def write(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        parts, values = quantise(weight)
        words = np.asarray(parts["weight_zero_point"]).view(np.uint32)
        zeros = np.stack([words >> shift & 15 for shift in range(0, 32, 4)], 1).reshape(-1, words.shape[1])
        return {**parts, "weight_zero_point": (zeros[: len(weight)].astype(np.int8) - 8)}, values

    return config, write


def auto_round(packing: str, layout: tuple[dict[str, Any], Quantise]) -> tuple[dict[str, Any], Quantise]:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
    return {**config, "autoround_version": "0.5.1", "packing_format": packing}, layout[1]


def modelopt_blocks() -> tuple[dict[str, Any], Quantise]:
    """FP8 with a scale for each block of 128 rows and columns, in four dimensions."""

    def quantise(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        parts, values = deepseek(128, 128)[1](weight)
        scales = np.asarray(parts["weight_scale_inv"])
        return {"weight": parts["weight"], "weight_scale": scales[:, None, :, None]}, values

    return {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8_PB_WO"}}, quantise


def mxfp4() -> tuple[dict[str, Any], Quantise]:
    """compressed-tensors in MXFP4: an exponent for each 32 weights."""
    config = compressed("nvfp4-pack-quantized")[0] | {"format": "mxfp4-pack-quantized"}

    def quantise(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        groups = weight.reshape(len(weight), -1, 32)
        exponents = np.ceil(np.log2(np.abs(groups).max(2) / 6))
        codes, values = _nearest_of_4_bits(groups, 2.0 ** exponents[..., None])
        codes = codes.reshape(weight.shape)
        parts = {
            "weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
            "weight_scale": (exponents + 127).astype(np.uint8),
        }
        return parts, values.reshape(weight.shape)

    return config, quantise


def _nearest_of_4_bits(groups: Array, scales: Array) -> tuple[Array, Array]:
    """Return the codes of floats of 4 bits nearest to numbers with a scale, and their values."""
    magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    nearest = np.abs(np.abs(groups)[..., None] / np.maximum(scales, 1e-9)[..., None] - magnitudes).argmin(-1)
    return (nearest + 8 * (groups < 0)).astype(np.uint8), np.sign(groups) * magnitudes[nearest] * scales


def modelopt() -> tuple[dict[str, Any], Quantise]:
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}, _nvfp4("weight", False)


def _scales_of(weight: Array, group: int) -> tuple[Array, Array]:
    """Return the largest magnitude of each part that shares a scale, as it is stored and for each weight."""
    size = np.abs(weight).astype(np.float32)
    if group == -2:
        return size.max().reshape(1), np.broadcast_to(size.max(), weight.shape)
    rows = 16 if group == 0 else 1
    columns = {-1: weight.shape[1], 0: 32}.get(group, group)
    parts = size.reshape(len(size) // rows, rows, -1, columns).max((1, 3))
    return parts, parts.repeat(rows, 0).repeat(columns, 1)


def _nvfp4(codes_name: str, divides: bool) -> Quantise:
    def quantise(weight: Array) -> tuple[dict[str, Array | Tensor], Array]:
        of_all = np.float32(2.0 ** np.ceil(np.log2(np.abs(weight).max() / 6 / 448)))
        groups = weight.reshape(len(weight), -1, 16)
        scales = torch.from_numpy(np.abs(groups).max(2) / 6 / of_all).to(torch.float8_e4m3fn)
        wide = scales.float().numpy()[..., None] * of_all
        codes, values = _nearest_of_4_bits(groups, wide)
        codes = codes.reshape(weight.shape)
        parts: dict[str, Array | Tensor] = {codes_name: codes[:, ::2] | codes[:, 1::2] << 4, "weight_scale": scales}
        parts |= {"weight_global_scale": (1 / of_all).reshape(1)} if divides else {"weight_scale_2": np.asarray(of_all)}
        parts |= {"input_scale": np.ones((), np.float32)}
        return parts, values.reshape(weight.shape)

    return quantise


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
