"""Quantised safetensors checkpoints: the numbers of the values that they stand for, computed from their own bits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from kernels.cpu.library import native_kernels
from kernels.ops import CpuOps
from kernels.weight_formats import Arithmetic
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.memory_plan import plan_model, read_spec, rounding_of
from moeserve.engine.weight_bytes import weights_bytes
from moeserve.model.checkpoint import read_index
from moeserve.model.packed.config import quantization_spec
from moeserve.model.sizes import expected_index
from moeserve.model.spec import CheckpointError, ModelError, UnsupportedModel
from moeserve.model.weights import load_decoder
from tests.support.checkpoints import TOKENS, change_tensors, reference_logits, spec_of
from tests.support.llm_prompts import assert_same_alone_together_and_with_few_experts
from tests.support.paged_runner import PagedRunner
from tests.support.quantised_files import (
    Quantise,
    auto_round,
    awq,
    compressed,
    compressed_blocks,
    compressed_widths,
    deepseek,
    gptq,
    modelopt,
    modelopt_blocks,
    mxfp4,
    quantise_checkpoint,
    renamed,
    with_byte_zeros,
    without,
)
from tests.support.tiny_models import build

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
BASE = ServeConfig(kv_cache_memory=2**20, max_num_seqs=4, max_model_len=64)
# Experts alone; a shared expert, a dense layer and biases; latent attention.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"intermediate_size": 128},
    "qwen2_moe": {"shared_expert_intermediate_size": 64, "moe_intermediate_size": 64, "intermediate_size": 128},
    "deepseek_v3-yarn": {"moe_intermediate_size": 64, "intermediate_size": 128, "v_head_dim": 16},
}
_ONE = np.ones((), np.float32)
LAYOUTS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "gptq-4-32": gptq(4, 32),
    "gptq-4-64-v2": gptq(4, 64, version="gptq_v2"),
    "gptq-4-whole": gptq(4, -1),
    "gptq-4-32-order": gptq(4, 32, desc_act=True),
    "gptq-4-16": gptq(4, 16),
    "gptq-4-narrow-end": gptq(4, 48),
    "gptq-4-narrow-end-untold": without(gptq(4, 48), "g_idx"),
    "gptq-4-float32": gptq(4, 32, dtype=np.float32),
    "gptq-8-32": gptq(8, 32),
    "gptq-8-32-order-v2": gptq(8, 32, version="gptq_v2", desc_act=True),
    "awq-32": awq(32),
    "awq-64": awq(64),
    "words-4-32": compressed("pack-quantized", dtype=np.float16),
    "words-4-64-zeros": compressed("pack-quantized", group=64, symmetric=False, dtype=np.float16),
    "words-4-32-order": compressed("pack-quantized", desc_act=True, dtype=np.float16),
    "words-8-whole": compressed("pack-quantized", 8, -1),
    "words-8-32-zeros": compressed("pack-quantized", 8, symmetric=False),
    "codes-rows": compressed("int-quantized", 8, -1),
    "codes-32-zeros": compressed("int-quantized", 8, 32, symmetric=False),
    "fp8-rows": compressed("float-quantized", 8, -1),
    "fp8-one": compressed("float-quantized", 8, -2),
    "fp8-blocks": compressed("float-quantized", 8, 0),
    "deepseek": deepseek(128, 128),
    "fp8-static": ({"quant_method": "fp8", "activation_scheme": "static"}, compressed("float-quantized", 8, -2)[1]),
    "deepseek-edges": deepseek(48, 96, torch.bfloat16),
    "words-4-32-byte-zeros": with_byte_zeros(compressed("pack-quantized", symmetric=False)),
    "words-of-two-widths": compressed_widths(),
    "auto-round": auto_round("auto_round", gptq(4, 32, version="gptq_v2")),
    "auto-round-gptq": auto_round("auto_round:auto_gptq", gptq(4, 32)),
    "auto-round-awq": auto_round("auto_round:auto_awq", awq(32)),
    "fp8-block-edges": compressed_blocks(48, 96),
    "fp8-inverse": (
        {"quant_method": "fp8", "weight_block_size": None},
        renamed(compressed("float-quantized", 8, -2)[1], {"weight_scale": "weight_scale_inv"}, activation_scale=_ONE),
    ),
    "fp8-modelopt-blocks": modelopt_blocks(),
    "mxfp4": mxfp4(),
    "nvfp4": compressed("nvfp4-pack-quantized"),
    "nvfp4-modelopt": modelopt(),
}


def write(directory: Path, layout: str, model: str = "mixtral") -> Path:
    """Write a quantised model; return the folder with the same values in float32."""
    directory.mkdir(exist_ok=True)
    build(model, **MODELS[model]).save_pretrained(directory)
    config, quantise = LAYOUTS[layout]
    return quantise_checkpoint(directory, config, quantise)


def logits_of(folder: Path, arithmetic: Arithmetic | None) -> Tensor:
    """arithmetic: None widens all weights."""
    spec = spec_of(folder)
    if arithmetic is None:
        decoder = load_decoder(folder, spec, max_model_len=64)
    else:
        rounding = rounding_of(replace(BASE, arithmetic=arithmetic), spec, read_index(folder))
        decoder = load_decoder(folder, spec, ops=CpuOps(arithmetic), max_model_len=64, rounding=rounding)
    return PagedRunner(decoder, [TOKENS]).step([(0, 0, len(TOKENS))])


def reference_of(plain: Path) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return reference_logits(model.eval())


@pytest.mark.parametrize(
    ("model", "layout"),
    [*(("mixtral", layout) for layout in LAYOUTS), *((model, "gptq-4-32-order") for model in list(MODELS)[1:]),
     ("qwen2_moe", "deepseek"), ("deepseek_v3-yarn", "deepseek-edges"), ("qwen2_moe", "awq-64"),
     ("qwen2_moe", "fp8-blocks"), ("qwen2_moe", "nvfp4"), ("deepseek_v3-yarn", "codes-rows")],
)  # fmt: skip
def test_logits_are_those_of_the_values(model: str, layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    wanted = reference_of(write(folder, layout, model))
    assert 0.5 < wanted.abs().max() < 50
    for arithmetic in (None, "exact"):
        assert (logits_of(folder, arithmetic) - wanted).abs().max() <= 1e-4 * wanted.abs().max()
    if not layout.startswith(("gptq-4-16", "gptq-4-narrow-end")):  # They have no blocks of 32.
        # Rounded activations may choose other experts for a token, and those after it see that.
        error = (logits_of(folder, "int8") - wanted).std(1) / wanted.std(1)
        assert 0 < error.quantile(0.25) <= 0.1


@pytest.mark.parametrize(
    "layout",
    [
        "gptq-4-32",
        "gptq-4-32-order",
        "gptq-8-32",
        "awq-64",
        "words-4-32",
        "codes-rows",
        "fp8-blocks",
        "deepseek",
        "nvfp4",
    ],
)
def test_no_matrix_is_widened_in_memory(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, layout)
    spec, dtype = read_spec(folder, BASE)
    index = read_index(folder)
    rounding = rounding_of(BASE, spec, index)
    assert rounding.keeps_stored
    planned = weights_bytes(spec, dtype, index, rounding=rounding)
    assert planned < weights_bytes(spec, dtype, index) / (3 if "4" in layout else 2)
    decoder = load_decoder(folder, spec, dtype=dtype, rounding=rounding)
    assert all(experts._layout.shape.formats is not None for experts in decoder.experts)


@pytest.mark.parametrize("layout", ["gptq-4-32-order", "awq-32", "codes-32-zeros", "deepseek-edges", "nvfp4"])
def test_tokens_of_quantised_files_do_not_depend_on_chunks_memory_of_experts_or_what_else_runs(
    layout: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write(folder, layout)
    assert_same_alone_together_and_with_few_experts(folder, BASE, TOKENS, [tmp_path / "store"])


def test_matrices_that_were_left_out_stay_as_they_are(tmp_path: Path) -> None:
    build("mixtral", **MODELS["mixtral"]).save_pretrained(tmp_path)
    plain = quantise_checkpoint(tmp_path, *gptq(4, 32), lambda name: "layers.0" in name or "k_proj" in name)
    wanted = reference_of(plain)
    assert (logits_of(tmp_path, "exact") - wanted).abs().max() <= 1e-4 * wanted.abs().max()


@pytest.mark.parametrize(
    ("layout", "name", "content"),
    [
        ("gptq-4-32-order", "quantize_config.json", {"bits": 4, "group_size": 32, "desc_act": True, "sym": False}),
        ("awq-32", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
        (
            "nvfp4-modelopt",
            "hf_quant_config.json",
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}},
        ),
        ("fp8-rows", "config.json", {"compression_config": compressed("float-quantized", 8, -1)[0]}),
    ],
)
def test_the_quantisation_may_be_described_in_another_place(
    layout: str, name: str, content: dict[str, Any], tmp_path: Path
) -> None:
    write(tmp_path, layout)
    wanted = logits_of(tmp_path, "exact")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_text(json.dumps(content if name != "config.json" else config | content))
    assert torch.equal(logits_of(tmp_path, "exact"), wanted)
    spec, _ = read_spec(tmp_path, BASE)
    assert spec.quantization == quantization_spec(LAYOUTS[layout][0])


def test_experts_in_one_tensor_of_fp8_stay_in_their_blocks(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "deepseek")
    wanted = logits_of(folder, "exact")

    def join(tensors: dict[str, Tensor]) -> None:
        for layer in range(spec_of(folder).num_layers):
            block = f"model.layers.{layer}.block_sparse_moe.experts"
            for ending in ("", "_scale_inv"):
                parts = [[tensors.pop(f"{block}.{e}.w{i}.weight{ending}") for i in (1, 3, 2)] for e in range(8)]
                if ending:  # Both are one block of less than 128 columns; gate and up are 128 rows each.
                    assert parts[0][0].shape == (1, 1)
                tensors[f"{block}.gate_up_proj{ending}"] = _stacked([torch.cat(of_expert[:2]) for of_expert in parts])
                tensors[f"{block}.down_proj{ending}"] = _stacked([of_expert[2] for of_expert in parts])

    change_tensors(folder, join)
    assert torch.equal(logits_of(folder, "exact"), wanted)
    assert (logits_of(folder, None) - wanted).abs().max() <= 1e-4 * wanted.abs().max()


def _stacked(parts: list[Tensor]) -> Tensor:
    return torch.stack([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def test_fp8_may_be_rounded_further(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    wanted = reference_of(write(folder, "deepseek"))
    spec, index = spec_of(folder), read_index(folder)
    kept = rounding_of(BASE, spec, index)
    assert (kept.name, kept.rounds_rows) == ("fp8_128 and fp8_f32", False)
    for settings, name in (
        ({"quantization": "int8"}, "int8"),
        ({"quantization": "experts=int8"}, "fp8_128 and fp8_f32, experts int8"),
    ):
        rounding = rounding_of(replace(BASE, arithmetic="exact", **settings), spec, index)
        assert rounding.name == name
        decoder = load_decoder(folder, spec, ops=CpuOps("exact"), max_model_len=64, rounding=rounding)
        assert [form.name for form in decoder.experts[0]._layout.shape.formats] == ["q8_0", "q8_0"]
        error = (PagedRunner(decoder, [TOKENS]).step([(0, 0, len(TOKENS))]) - wanted).std(1) / wanted.std(1)
        assert 0 < error.quantile(0.25) <= 0.1


def test_biases_that_a_model_lacks_are_ignored_beside_quantised_matrices(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "gptq-4-32")
    before = logits_of(folder, "exact")
    change_tensors(folder, lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert torch.equal(logits_of(folder, "exact"), before)


def test_a_quantised_checkpoint_is_not_rounded_once_more(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "gptq-4-32")
    with pytest.raises(ConfigError, match=r"--quantization .*int4_f16"):
        plan_model(folder, replace(BASE, quantization="int8"))


@pytest.mark.parametrize("layout", ["gptq-4-32", "mxfp4"])
def test_sizes_by_the_configuration_alone_are_those_of_the_files(layout: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, layout)
    spec, dtype = read_spec(folder, BASE)
    sizes = []
    for index in (read_index(folder), expected_index(spec, "F32")):
        sizes.append(weights_bytes(spec, dtype, index, rounding=rounding_of(BASE, spec, index)))
    assert sizes[0] == sizes[1]


_CODES = "model.layers.0.self_attn.q_proj.qweight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.scales"), "lacks model.layers.0.self_attn.q_proj.scales"),
        (lambda t: t.update({_CODES: t[_CODES].float()}), "qweight is stored as F32, not as I32"),
        (lambda t: t.update({_CODES: t[_CODES].flatten()}), "qweight has shape .*, which it cannot have"),
        (lambda t: t.update({_CODES: t[_CODES][:, :40]}), "q_proj do not fit each other"),
        (lambda t: t.update({_CODES: t[_CODES][:4]}), "q_proj do not fit each other"),
        (lambda t: t.update({_CODES.replace("qweight", "weight"): torch.zeros(64, 64)}), "twice, quantised and not"),
        (lambda t: t[_CODES.replace("qweight", "g_idx")].fill_(7), "its groups are not of 32 columns each"),
        (lambda t: t[_CODES.replace("qweight", "g_idx")].fill_(-5), "its groups are not of 32 columns each"),
        (
            lambda t: t.update({_CODES.replace("qweight", "g_idx"): torch.arange(64, dtype=torch.int32) % 2}),
            "not in the order of their groups",
        ),
    ],
)
def test_tensors_that_do_not_fit_get_one_sentence(change: Any, sentence: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write(folder, "gptq-4-32")
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=sentence):
        logits_of(folder, "exact")


_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("layout", "change", "sentence"),
    [
        ("words-4-32", lambda t: t.pop(f"{_PROJ}.weight_packed"), "lacks model.layers.0.self_attn.q_proj.weight"),
        ("words-4-32", lambda t: t.update({f"{_PROJ}.weight": torch.zeros(64, 64)}), "twice, quantised and not"),
        ("words-4-64-zeros", lambda t: t.update({f"{_PROJ}.weight_zero_point": torch.zeros(3, 1).int()}), "do not fit"),
        ("codes-rows", lambda t: t.update({f"{_PROJ}.weight_scale": torch.zeros(3, 1, 1)}), "do not fit each other"),
        ("codes-rows", lambda t: t.update({f"{_PROJ}.weight_scale": torch.zeros(0, 1)}), "do not fit each other"),
        ("fp8-block-edges", lambda t: t.update({f"{_PROJ}.weight_scale": torch.zeros(3, 1)}), "do not fit each other"),
        ("words-of-two-widths", lambda t: t.update({f"{_PROJ}.weight_scale": torch.zeros(64, 4)}), "do not fit each"),
        ("codes-32-zeros", lambda t: t.update({f"{_PROJ}.weight_zero_point": torch.zeros(1, 1).char()}), "do not fit"),
        ("nvfp4", lambda t: t.update({f"{_PROJ}.weight_global_scale": torch.zeros(2)}), "do not fit each other"),
        (
            "nvfp4",
            lambda t: t[f"{_PROJ}.weight_scale"].view(torch.uint8).fill_(127),
            "cannot be read: it holds what is no",
        ),
        (
            "fp8-rows",
            lambda t: t[f"{_PROJ}.weight"].view(torch.uint8).fill_(127),
            "cannot be read: it holds what is no",
        ),
        ("deepseek", lambda t: t.pop(f"{_PROJ}.weight_scale_inv"), "no scales of its"),
        ("deepseek", lambda t: t.update({f"{_PROJ}.weight_scale_inv": torch.zeros(3, 3)}), r"has shape \[3, 3\], but"),
        ("deepseek", lambda t: t[f"{_PROJ}.weight_scale_inv"].fill_(128), "its scales are not all below 128"),
    ],
)
def test_compressed_tensors_that_do_not_fit_get_one_sentence(
    layout: str, change: Any, sentence: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    write(folder, layout)
    change_tensors(folder, change)
    with pytest.raises(CheckpointError, match=sentence):
        logits_of(folder, "exact")


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "in the format 'marlin-24'"),
        ({"quant_method": "compressed-tensors", "format": ["x"]}, "in the format 'list'"),
        (compressed("pack-quantized", 3)[0], "Compressed weights of 3 bits"),
        (compressed("pack-quantized")[0] | {"transform_config": {"config_groups": {}}}, "with a transform_config"),
        (compressed("pack-quantized")[0] | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "a sparsity_config"),
        (compressed("pack-quantized")[0] | {"config_groups": {"group_0": 4}}, "does not say how"),
        (compressed("pack-quantized")[0] | {"config_groups": {}}, "has no config_groups"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "ModelOpt weights of the kind 'W4A8_AWQ'"),
        (
            {
                "quant_method": "modelopt",
                "quant_algo": "MIXED_PRECISION",
                "quantized_layers": {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4_AWQ"}},
            },
            "ModelOpt weights of the kind 'NVFP4_AWQ'",
        ),
        ({"group_size": 64, "bits": 4, "mode": "affine"}, "Weights quantised for MLX are not supported"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "in the layout 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "checkpoint_format": "llm-awq"}, "in the layout 'llm-awq'"),
        (auto_round("auto_round:llm_compressor", awq(32))[0], "in the layout 'llm_compressor'"),
        (auto_round("auto_round", awq(32))[0] | {"rotation_config": {"r1": 1}}, "weights with a rotation_config"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be two positive numbers",
        ),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits"),
        ({"quant_method": "gptq", "bits": "4"}, "does not say how many bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "in the layout 'marlin'"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ weights in the layout 'gemv'"),
        ({"quant_method": "awq", "bits": 8}, "AWQ weights of 8 bits"),
        (
            {"quant_method": "bitsandbytes"},
            "^Weights quantised with 'bitsandbytes'",
        ),
        ({"quant_method": ["gptq"]}, "Weights quantised with 'list'"),
        ({"bits": 4}, "names no quant_method"),
        ("gptq", "must be an object"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_name(config: Any, sentence: str) -> None:
    with pytest.raises((UnsupportedModel, ModelError), match=sentence):
        quantization_spec(config)
