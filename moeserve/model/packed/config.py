"""The quantisation of a checkpoint by its configuration, or the refusal of one that cannot be read. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.model.config_bounds import check_tree
from moeserve.model.files import read_json
from moeserve.model.spec import ModelError, QuantizationSpec, UnsupportedModel

Config = Mapping[str, Any]

# The layouts of GPTQ files: their zero points are stored less one, or as they are.
_GPTQ_LAYOUTS = {"gptq": True, "gptq_v2": False}
# The dtype of most matrices, for a checkpoint that is known by its configuration alone.
_INTEGERS = {4: "INT4_F16", 8: "INT8_ZERO"}


def quantization_in(directory: Path) -> QuantizationSpec | None:
    """Return the quantisation of the checkpoint in a folder. Raise ModelError."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    check_tree(config)
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        if part.get("quantization_config"):
            return quantization_spec(part["quantization_config"])
    return None


def quantization_spec(config: Any) -> QuantizationSpec | None:
    """Return the compression of weights in a configuration's `quantization_config`, None without one.

    Raise UnsupportedModel for a compression that cannot be read, ModelError for one that makes no sense.
    """
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise ModelError("The configuration's quantization_config must be an object.")
    method = config.get("quant_method")
    if method is None:
        raise ModelError("The configuration's quantization_config names no quant_method.")
    build = _METHODS.get(method) if isinstance(method, str) else None
    if build is None:
        raise _unsupported(f"Weights quantised with {_shown(method)}")
    return build(config)


def _unsupported(weights: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{weights} are not supported: take the model before it was quantised, with --quantization int4 or int8 on a "
        "CPU, or a GGUF file of it."
    )


def _mxfp4(_: Config) -> QuantizationSpec:
    return QuantizationSpec("mxfp4", (1, 32))


def _fp8(config: Config) -> QuantizationSpec:
    block = config.get("weight_block_size")
    if not block:  # One scale of a matrix, or of each row.
        return QuantizationSpec("fp8", form="FP8_F32")
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ModelError("The configuration's weight_block_size must be two positive numbers.")
    return QuantizationSpec("fp8", (block[0], block[1]))


def _gptq(config: Config) -> QuantizationSpec:
    layout = config.get("checkpoint_format") or "gptq"
    if not isinstance(layout, str) or layout not in _GPTQ_LAYOUTS:
        raise _unsupported(f"GPTQ weights in the layout {_shown(layout)}")
    form = _INTEGERS[_bits(config, "bits", "GPTQ")]
    return QuantizationSpec(
        "gptq", form=form, zeros_less_one=_GPTQ_LAYOUTS[layout], has_order=config.get("desc_act") is True
    )


def _awq(config: Config) -> QuantizationSpec:
    version = config.get("version") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(f"AWQ weights in the layout {_shown(version)}")
    if _bits(config, "bits" if "bits" in config else "w_bit", "AWQ") != 4:
        raise _unsupported("AWQ weights of 8 bits")
    return QuantizationSpec("awq", form="INT4_F16")


def _auto_round(config: Config) -> QuantizationSpec:
    """AutoRound writes the layouts of others."""
    packing = str(config.get("packing_format") or "auto_round:auto_gptq").removeprefix("auto_round:")
    if packing == "auto_gptq":
        return _gptq({"bits": config.get("bits"), "desc_act": False})
    if packing == "auto_awq":
        return _awq({"bits": config.get("bits")})
    raise _unsupported(f"AutoRound weights in the layout {_shown(packing)}")


def _compressed(config: Config) -> QuantizationSpec:
    """compressed-tensors. The tensors tell the form of each matrix, but not the bits of codes in words."""
    form = config.get("format")
    if not isinstance(form, str) or form not in _COMPRESSED_FORMS:
        raise _unsupported(f"Compressed tensors in the format {_shown(form)}")
    for name in ("sparsity_config", "transform_config"):
        part = config.get(name)
        if part and not (isinstance(part, Mapping) and part.get("format") == "dense"):
            raise _unsupported(f"Compressed tensors with a {name}")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("The configuration's quantization_config has no config_groups.")
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    if not all(isinstance(part, Mapping) for part in weights):
        raise ModelError("A group of the configuration's quantization_config does not say how weights are kept.")
    bits = {_bits(part, "num_bits", "Compressed") for part in weights if part and part.get("type", "int") == "int"}
    if len(bits) > 1 and form != "int-quantized":
        raise _unsupported("Compressed tensors with codes of several widths")
    width = bits.pop() if bits else 0
    return QuantizationSpec("compressed-tensors", form=_COMPRESSED_FORMS[form] or _INTEGERS[width or 4], bits=width)


# The dtype of most matrices by the format of compressed tensors; empty where it goes by the bits of codes.
_COMPRESSED_FORMS = {
    "pack-quantized": "",
    "int-quantized": "INT8_F32",
    "float-quantized": "FP8_F32",
    "naive-quantized": "FP8_F32",
    "nvfp4-pack-quantized": "NVFP4_F32",
    "mixed-precision": "",
}
_MODELOPT_FORMS = {"NVFP4": "NVFP4_F32", "FP8": "FP8_F32"}


def _modelopt(config: Config) -> QuantizationSpec:
    algorithm = config.get("quant_algo")
    if not isinstance(algorithm, str) or algorithm not in _MODELOPT_FORMS:
        raise _unsupported(f"ModelOpt weights of the kind {_shown(algorithm)}")
    return QuantizationSpec("modelopt", form=_MODELOPT_FORMS[algorithm])


_METHODS = {"mxfp4": _mxfp4, "fp8": _fp8, "gptq": _gptq, "awq": _awq, "auto-round": _auto_round}
_METHODS |= {"compressed-tensors": _compressed, "modelopt": _modelopt}


def _bits(config: Config, name: str, method: str) -> int:
    bits = config.get(name)
    if type(bits) is not int:
        raise ModelError(f"The configuration's quantization_config does not say how many {name} weights have.")
    if bits not in _INTEGERS:
        raise _unsupported(f"{method} weights of {bits} bits")
    return bits


def _shown(value: object) -> str:
    return repr(value[:40] if isinstance(value, str) else value if value is None else type(value).__name__)
