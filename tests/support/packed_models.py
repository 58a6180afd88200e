"""Tiny models on transformers' code in each quantised form of safetensors, with experts wide enough for all forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

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

TYPES = ("lfm2_moe", "afmoe", "hunyuan_v1_moe", "exaone_moe", "nemotron_h")
FORMS: Mapping[str, Callable[[], tuple[dict[str, Any], Quantise]]] = {
    "gptq": lambda: gptq(4, 32),
    "awq": lambda: awq(32),
    "compressed-tensors": lambda: compressed("pack-quantized", 8, 32),
    "fp8": lambda: deepseek(16, 32),
    "mxfp4": mxfp4,
    "nvfp4": modelopt,
}
# Of `--quantization`, which rounds while it loads.
ROUNDED = ("int8", "int4")


def save_wide(model_type: str, folder: Path) -> Path:
    shared = {"moe_shared_expert_intermediate_size": 64} if model_type == "nemotron_h" else {}
    code = tiny_model(model_type, moe_intermediate_size=64, intermediate_size=128, **shared)
    code.outer.save_pretrained(folder)
    return folder


def quantise_in(form: str, folder: Path) -> Path:
    """Quantise a saved model in one of `FORMS`; return the folder of the same values in float32."""
    config, quantise = FORMS[form]()
    return quantise_checkpoint(folder, config, quantise, lambda name: "router" in name or ".wg." in name)
