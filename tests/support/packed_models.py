"""Tiny models on transformers' code in each quantised form of safetensors, with experts wide enough for all forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.support.checkpoints import change_tensors
from tests.support.quantised_files import (
    Quantise,
    awq,
    compressed,
    deepseek,
    gptq,
    modelopt,
    mxfp4,
    quantise_checkpoint,
)
from tests.support.tiny_transformers import tiny_model

TYPES = ("lfm2_moe", "afmoe", "hunyuan_v1_moe", "exaone_moe", "nemotron_h", "dbrx", "ernie4_5_vl_moe")
# The fields that are not those of most types.
_WIDE: Mapping[str, dict[str, Any]] = {
    "nemotron_h": {"moe_shared_expert_intermediate_size": 64},
    "dbrx": {"ffn_config": {"hidden_size": 64, "ffn_hidden_size": 64, "moe_num_experts": 8, "moe_top_k": 2}},
    "ernie4_5_vl_moe": {"moe_intermediate_size": [64, 64]},
}
FORMS: Mapping[str, Callable[[], tuple[dict[str, Any], Quantise]]] = {
    "gptq": lambda: gptq(4, 32),
    "awq": lambda: awq(32),
    "compressed-tensors": lambda: compressed("pack-quantized", 8, 32),
    "fp8": lambda: deepseek(16, 32),
    "mxfp4": mxfp4,
    "nvfp4": modelopt,
}
_LEFT = ("router", ".wg.", "wte")
# Of `--quantization`, which rounds while it loads.
ROUNDED = ("int8", "int4")


def save_wide(model_type: str, folder: Path) -> Path:
    fields = {"moe_intermediate_size": 64, "intermediate_size": 128, **_WIDE.get(model_type, {})}
    tiny_model(model_type, **fields).outer.save_pretrained(folder)
    if model_type == "dbrx":
        change_tensors(folder, _split_dbrx)
    return folder


def _split_dbrx(tensors: dict[str, Tensor]) -> None:
    """Split what DBRX has in one tensor into matrices, as its files are converted before they are quantised."""
    for name in [name for name in tensors if ".experts.mlp." in name]:
        stem, _, part = name.rpartition(".")
        for expert, matrix in enumerate(tensors.pop(name).view(8, 64, -1)):
            tensors[f"{stem}.{expert}.{part}.weight"] = (matrix.T if part == "w2" else matrix).contiguous()
    for name in [name for name in tensors if "Wqkv" in name]:
        for part, rows in zip("qkv", tensors.pop(name).split((64, 32, 32)), strict=True):
            tensors[name.replace("Wqkv", f"{part}_proj")] = rows.contiguous()


def quantise_in(form: str, folder: Path) -> Path:
    """Quantise a saved model in one of `FORMS`; return the folder of the same values in float32."""
    config, quantise = FORMS[form]()
    return quantise_checkpoint(folder, config, quantise, lambda name: any(part in name for part in _LEFT))
