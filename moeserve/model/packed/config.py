"""The quantisation of a checkpoint by its configuration, or the refusal of one that cannot be read. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moeserve.model.config_bounds import check_tree
from moeserve.model.files import read_json
from moeserve.model.spec import ModelError, QuantizationSpec, UnsupportedModel

Config = Mapping[str, Any]

# The layouts of GPTQ files: their zero points are stored less one, or as they are.
_GPTQ_LAYOUTS = {"gptq": True, "gptq_v2": False}
# The key in `config.json`; earlier of compressed-tensors, and of MLX.
_KEYS = ("quantization_config", "compression_config", "quantization")
# Files beside `config.json`, and whose they are.
DESCRIPTIONS = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
# The dtype of most matrices, for a checkpoint that is known by its configuration alone.
_INTEGERS = {4: "INT4_F16", 8: "INT8_ZERO"}


def quantization_in(directory: Path) -> QuantizationSpec | None:
    """Return the quantisation of the checkpoint in a folder. Raise ModelError."""
    path = directory / "config.json"
    if not path.is_file():
        return None
    config = read_json(path)
    check_tree(config)
    return quantization_spec(described_quantization(directory, config))


def described_quantization(directory: Path, config: Config) -> Any:
    """Return the description of the quantisation of a checkpoint: a part of its `config.json`, or, as older programs
    wrote it, a file beside it. None without one. Raise ModelError."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for name in _KEYS:
            if part.get(name):
                return part[name]
    for name, method in DESCRIPTIONS.items():
        if (directory / name).is_file():
            content = read_json(directory / name)
            check_tree(content)
            return {"quant_method": method, **content}
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
    if method is None and "group_size" in config:
        raise _unsupported("Weights quantised for MLX")
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
    is_dynamic = config.get("activation_scheme") == "dynamic"
    return QuantizationSpec("fp8", _two_sizes(block, "weight_block_size"), rounds_rows=is_dynamic)


def _two_sizes(block: Any, name: str) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or not all(type(size) is int and size > 0 for size in block):
        raise ModelError(f"The configuration's {name} must be two positive numbers.")
    return block[0], block[1]


def _gptq(config: Config) -> QuantizationSpec:
    layout = config.get("checkpoint_format") or "gptq"
    if config.get("is_marlin_format"):
        layout = "marlin"
    if not isinstance(layout, str) or layout not in _GPTQ_LAYOUTS:
        raise _unsupported(f"GPTQ weights in the layout {_shown(layout)}")
    bits, has_order = _bits(config, "bits", "GPTQ"), config.get("desc_act") is True
    return QuantizationSpec(
        "gptq",
        form=_INTEGERS[bits],
        widths=((bits, _group_size(config)),),
        zeros_less_one=_GPTQ_LAYOUTS[layout],
        has_order=has_order,
    )


def _awq(config: Config) -> QuantizationSpec:
    version = config.get("version") or config.get("checkpoint_format") or "gemm"
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _unsupported(f"AWQ weights in the layout {_shown(version)}")
    if _bits(config, "bits" if "bits" in config else "w_bit", "AWQ") != 4:
        raise _unsupported("AWQ weights of 8 bits")
    return QuantizationSpec("awq", form="INT4_F16")


def _auto_round(config: Config) -> QuantizationSpec:
    """AutoRound writes the layouts of others; its first versions name them as the backend."""
    _refuse_parts(config, "AutoRound weights", ("rotation_config", "spinquant_config"))
    packing = str(config.get("packing_format") or config.get("backend") or "auto")
    layout = packing.removeprefix("auto_round:")
    if layout in _AUTO_ROUND_GPTQ:
        layouts = {"checkpoint_format": _AUTO_ROUND_GPTQ[layout]}
        return _gptq({name: config.get(name) for name in ("bits", "group_size")} | layouts)
    if layout in ("auto_awq", "awq"):
        return _awq({"bits": config.get("bits")})
    raise _unsupported(f"AutoRound weights in the layout {_shown(layout)}")


# The layouts of AutoRound that are GPTQ's.
_AUTO_ROUND_GPTQ = dict.fromkeys(("auto", "auto_gptq", "gptq", "gptq:exllamav2"), "gptq")
_AUTO_ROUND_GPTQ |= {"gptqmodel": "gptq_v2", "auto_round": "gptq_v2"}


def _compressed(config: Config) -> QuantizationSpec:
    """compressed-tensors. The tensors show the form of each matrix, but not the bits of codes in words."""
    form = config.get("format")
    if not isinstance(form, str) or form not in _COMPRESSED_FORMS:
        raise _unsupported(f"Compressed tensors in the format {_shown(form)}")
    _refuse_parts(config, "Compressed tensors", ("sparsity_config", "transform_config"))
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ModelError("The configuration's quantization_config has no config_groups.")
    weights = [group.get("weights") if isinstance(group, Mapping) else None for group in groups.values()]
    if not all(isinstance(part, Mapping) for part in weights):
        raise ModelError("A group of the configuration's quantization_config does not say how weights are kept.")
    widths = tuple(
        (_bits(part, "num_bits", "Compressed"), _group_size(part))
        for part in weights
        if part and part.get("type", "int") == "int"
    )
    usual = _INTEGERS[min(widths)[0] if widths else 4]
    return QuantizationSpec(
        "compressed-tensors", _block_of(weights), form=_COMPRESSED_FORMS[form] or usual, widths=widths
    )


def _group_size(weights: Config) -> int:
    size = weights.get("group_size")
    return size if type(size) is int and size > 0 else 0


def _block_of(weights: list[Any]) -> tuple[int, int]:
    """Return the rows and columns that share a scale where groups have scales of blocks, (1, 1) without such."""
    blocks = [part.get("block_structure") for part in weights if part.get("strategy") == "block"]
    if not blocks:
        return 1, 1
    if any(block != blocks[0] for block in blocks):
        raise _unsupported("Compressed tensors in blocks of several sizes")
    return _two_sizes(blocks[0], "block_structure")


# The dtype of most matrices by the format of compressed tensors; empty where it goes by the bits of codes.
_COMPRESSED_FORMS = {
    "pack-quantized": "",
    "int-quantized": "INT8_F32",
    "float-quantized": "FP8_F32",
    "naive-quantized": "FP8_F32",
    "nvfp4-pack-quantized": "NVFP4_F32",
    "mxfp4-pack-quantized": "MXFP4",
    "mixed-precision": "",
}
_MODELOPT_FORMS = {"NVFP4": "NVFP4_F32", "FP8": "FP8_F32", "FP8_PER_CHANNEL_PER_TOKEN": "FP8_F32"}
_MODELOPT_BLOCKS = "FP8_PB_WO"
_MODELOPT_FORMS |= {_MODELOPT_BLOCKS: "FP8_F32"}


def _modelopt(config: Config) -> QuantizationSpec:
    inner = config.get("quantization")
    part = inner if isinstance(inner, Mapping) else config
    algorithms: list[Any] = [part.get("quant_algo")]
    if algorithms == ["MIXED_PRECISION"]:
        layers = part.get("quantized_layers")
        if not isinstance(layers, Mapping) or not layers:
            raise ModelError("The configuration's quantization_config has no quantized_layers.")
        algorithms = [one.get("quant_algo") if isinstance(one, Mapping) else one for one in layers.values()]
    for algorithm in algorithms:
        if not isinstance(algorithm, str) or algorithm not in _MODELOPT_FORMS:
            raise _unsupported(f"ModelOpt weights of the kind {_shown(algorithm)}")
    usual = Counter(algorithms).most_common(1)[0][0]
    block = (128, 128) if _MODELOPT_BLOCKS in algorithms else (1, 1)
    return QuantizationSpec("modelopt", block, form=_MODELOPT_FORMS[usual])


_METHODS = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "intel/auto-round": _auto_round,
}
_METHODS |= {"compressed-tensors": _compressed, "modelopt": _modelopt}


def _refuse_parts(config: Config, weights: str, names: tuple[str, ...]) -> None:
    """Raise UnsupportedModel for a part of the configuration that changes how weights are multiplied."""
    for name in names:
        part = config.get(name)
        if part and not (isinstance(part, Mapping) and part.get("format") == "dense"):
            raise _unsupported(f"{weights} with a {name}")


def _bits(config: Config, name: str, method: str) -> int:
    bits = config.get(name)
    if type(bits) is not int:
        raise ModelError(f"The configuration's quantization_config does not say how many {name} weights have.")
    if bits not in _INTEGERS:
        raise _unsupported(f"{method} weights of {bits} bits")
    return bits


def _shown(value: object) -> str:
    return repr(value[:40] if isinstance(value, str) else value if value is None else type(value).__name__)
