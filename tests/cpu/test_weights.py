"""Loading: every layout of a checkpoint gives the same model, and a rank reads only experts that it owns."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.activation import Activation
from kernels.moe import moe_experts, moe_experts_partial
from kernels.packed_experts import PackedExperts
from moeserve.model.checkpoint import plan_weights, read_index
from moeserve.model.packed.tensors import expand_fp8
from moeserve.model.spec import DecoderSpec, QuantizationSpec
from moeserve.model.stored import PackedPart
from moeserve.model.tensor_names import layer_tensors, outer_tensors
from moeserve.model.tensor_reader import dequantise_mxfp4
from moeserve.model.weights import load_decoder
from tests.support.checkpoints import change_tensors, load, logits_of, reference_logits, spec_of
from tests.support.fp8 import to_fp8
from tests.support.tiny_models import save


@pytest.mark.parametrize("case", ["mixtral", "qwen2_moe", "granitemoe", "gpt_oss", "deepseek_v3-yarn", "ernie4_5_moe"])
def test_fused_experts_load_like_separate_ones(case: str, tmp_path: Path) -> None:
    model = save(case, tmp_path / "separate")
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(".experts.gate_up_proj" in name for name in read_index(tmp_path / "fused"))
    assert torch.equal(logits_of(load(tmp_path / "fused")), logits_of(load(tmp_path / "separate")))


def test_shards_load_like_one_file(tmp_path: Path) -> None:
    save("qwen3_moe", tmp_path / "sharded", max_shard_size="60KB")
    save("qwen3_moe", tmp_path / "single")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 3
    assert torch.equal(logits_of(load(tmp_path / "sharded")), logits_of(load(tmp_path / "single")))


def test_mxfp4_experts_load_like_their_expanded_values(tmp_path: Path) -> None:
    save("gpt_oss", tmp_path)
    generator = torch.Generator().manual_seed(8)

    def quantise(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            experts, columns, rows = tensors[name].shape
            blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(120, 124, (experts, rows, columns // 32), dtype=torch.uint8, generator=generator)
            compressed[f"{name}_blocks"], compressed[f"{name}_scales"] = blocks, scales
            tensors[name] = torch.stack([_mxfp4_by_hand(b, s).T for b, s in zip(blocks, scales, strict=True)])

    compressed: dict[str, Tensor] = {}
    change_tensors(tmp_path, quantise)
    expected = logits_of(load(tmp_path))

    def compress(tensors: dict[str, Tensor]) -> None:
        for name in {name.removesuffix("_blocks").removesuffix("_scales") for name in compressed}:
            del tensors[name]
        tensors.update(compressed)

    change_tensors(tmp_path, compress)
    spec = replace(spec_of(tmp_path), quantization=QuantizationSpec("mxfp4", (1, 32)))
    found = logits_of(load_decoder(tmp_path, spec, max_model_len=32))
    assert torch.equal(found, expected)


def _mxfp4_by_hand(blocks: Tensor, scales: Tensor) -> Tensor:
    magnitudes = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    rows = []
    for row, exponents in zip(blocks.tolist(), scales.tolist(), strict=True):
        values = []
        for block, exponent in zip(row, exponents, strict=True):
            for byte in block:
                for code in (byte & 15, byte >> 4):
                    values.append((-1) ** (code >> 3) * magnitudes[code & 7] * 2.0 ** (exponent - 127))
        rows.append(values)
    return torch.tensor(rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_values_are_exact(dtype: torch.dtype) -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(2, 1, 1)
    scales = torch.arange(100, 132, dtype=torch.uint8).view(2, 16)
    found = dequantise_mxfp4(blocks, scales, dtype)
    assert found.dtype == dtype
    assert torch.equal(found.float(), _mxfp4_by_hand(blocks, scales))


def test_fp8_blocks_at_the_edges_have_their_own_scales() -> None:
    weight = torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(9)).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, 2, generator=torch.Generator().manual_seed(10))
    found = torch.empty(weight.shape)
    expand_fp8(PackedPart("fp8", {}, 8, 4, rows=2), weight, scale, found)
    for e in range(2):
        for row in range(5):
            for column in range(7):
                expected = weight[e, row, column].float() * scale[e, row // 2, column // 4]
                assert found[e, row, column] == expected


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
def test_fp8_weights_load_like_their_expanded_values(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    save("deepseek_v3-yarn", tmp_path / "fp8")
    shutil.copytree(tmp_path / "fp8", tmp_path / "expanded")
    values = to_fp8(tmp_path / "fp8", (16, 24), scale_dtype)
    change_tensors(tmp_path / "expanded", lambda tensors: tensors.update(values))
    assert torch.equal(logits_of(load(tmp_path / "fp8")), logits_of(load(tmp_path / "expanded")))


def test_fp8_weights_that_are_widened_keep_any_scales(tmp_path: Path) -> None:
    save("deepseek_v3-yarn", tmp_path / "fp8")
    shutil.copytree(tmp_path / "fp8", tmp_path / "expanded")
    values = to_fp8(tmp_path / "fp8", (16, 24), powers_of_two=False)
    change_tensors(tmp_path / "expanded", lambda tensors: tensors.update(values))
    assert torch.equal(logits_of(load(tmp_path / "fp8")), logits_of(load(tmp_path / "expanded")))


@pytest.mark.parametrize("original_format", [True, False])
@pytest.mark.parametrize("case", ["mixtral", "gpt_oss"])
def test_only_owned_experts_are_read(case: str, original_format: bool, tmp_path: Path) -> None:
    """The parts that two halves compute add up to the whole, and each half reads about half of the experts' bytes."""
    save(case, tmp_path, save_original_format=original_format)
    spec = spec_of(tmp_path)
    halves = [(5, 1, 4, 2), (0, 7, 3, 6)]
    shares: list[Tensor] = []
    first_layer: list[Tensor] = []
    for half in halves:
        local = torch.full((8,), -1)
        local[list(half)] = torch.arange(4)

        def dispatch(
            x: Tensor,
            ids: Tensor,
            weights: Tensor,
            experts: PackedExperts,
            activation: Activation,
            local: Tensor = local,
        ) -> Tensor:
            assert len(experts) == 4
            out = moe_experts_partial(x, local[ids], weights, experts, activation)
            first_layer.append(out)
            return out

        read: list[tuple[int, int]] = []
        decoder = load_decoder(
            tmp_path,
            spec,
            max_model_len=32,
            owned_experts=lambda layer, half=half: half,
            dispatch_of=lambda _, dispatch=dispatch: dispatch,
            progress=lambda done, total, read=read: read.append((done, total)),
        )
        assert read[-1][0] == read[-1][1]
        start = len(first_layer)
        logits_of(decoder)
        shares.append(first_layer[start])
    plan, whole = (plan_weights(spec, read_index(tmp_path), owned) for owned in (lambda layer: halves[0], None))
    expert_bytes = 2 * (whole.num_bytes - plan.num_bytes)
    assert 0.5 * whole.num_bytes < expert_bytes < whole.num_bytes

    def whole_dispatch(*arguments: Any) -> Tensor:
        first_layer.append(moe_experts(*arguments))
        return first_layer[-1]

    start = len(first_layer)
    logits_of(load_decoder(tmp_path, spec, max_model_len=32, dispatch_of=lambda _: whole_dispatch))
    torch.testing.assert_close(shares[0] + shares[1], first_layer[start], rtol=1e-4, atol=1e-5)


def test_owning_few_experts_takes_a_dispatch(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    with pytest.raises(ValueError, match="3 of 8 experts are here"):
        load(tmp_path, owned_experts=lambda layer: (1, 2, 3))
    with pytest.raises(ValueError, match="not distinct ids below 8"):
        load(tmp_path, owned_experts=lambda layer: (1, 8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near_full_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    model = save("mixtral", tmp_path)
    decoder = load(tmp_path, dtype=dtype)
    logits = logits_of(decoder)
    assert logits.dtype == dtype
    # One expert chosen differently may move a row; most rows must be close.
    distance = (logits.float() - reference_logits(model)).abs().amax(-1)
    assert distance.median() < 0.2


def test_progress_counts_up_to_what_is_read(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    seen: list[tuple[int, int]] = []
    load(tmp_path, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (sum(info.num_bytes for info in read_index(tmp_path).values()),) * 2


def test_bytes_needed_are_known_beforehand(tmp_path: Path) -> None:
    model = save("qwen2_moe", tmp_path)
    spec, index = spec_of(tmp_path), read_index(tmp_path)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    plan = plan_weights(spec, index)
    assert plan.loaded_num_bytes(4, narrow=True) == 4 * parameters  # The checkpoint is in float32.
    first = plan_weights(spec, index, lambda layer: (0,))
    assert first.loaded_num_bytes(2, narrow=False) == 2 * (parameters - 7 * 3 * 64 * 32)


def test_matrices_in_bfloat16_are_counted_as_they_stay(tmp_path: Path) -> None:
    model = save("mixtral", tmp_path)
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    matrices = sum(parameter.numel() for parameter in model.parameters()) - vectors
    change_tensors(tmp_path, lambda tensors: tensors.update({name: t.bfloat16() for name, t in tensors.items()}))
    plan = plan_weights(spec_of(tmp_path), read_index(tmp_path))
    assert plan.loaded_num_bytes(4, narrow=True) == 2 * matrices + 4 * vectors
    assert plan.loaded_num_bytes(4, narrow=False) == 4 * (matrices + vectors)
    assert plan.loaded_num_bytes(2, narrow=False) == 2 * (matrices + vectors)


def expert_num_parameters(spec: DecoderSpec) -> int:
    hidden, width = spec.hidden_size, spec.moe.intermediate_size
    return 3 * hidden * width + (2 * width + hidden if spec.moe.expert_bias else 0)


def num_parameters(spec: DecoderSpec) -> int:
    """The tensors of a model with an output projection of its own."""
    total = sum(prod(ref.shape) for ref in outer_tensors(spec).values())
    for layer in range(spec.num_layers):
        total += sum(prod(ref.shape) for ref in layer_tensors(spec, layer).values())
        if spec.moe is not None and spec.sparse_layers[layer]:
            total += spec.moe.num_experts * expert_num_parameters(spec)
    return total


@pytest.mark.parametrize(
    ("config", "billions"),
    [
        ({"model_type": "llama"}, 6.74),
        ({"model_type": "mistral"}, 7.24),
        ({"model_type": "mixtral"}, 46.70),
        ({"model_type": "qwen2_moe"}, 14.32),
        ({"model_type": "phimoe"}, 41.87),
        ({"model_type": "gpt_oss"}, 116.83),
        ({"model_type": "glm4_moe", "head_dim": 128}, 106.85),
        ({"model_type": "ernie4_5_moe", "tie_word_embeddings": False}, 21.83 + 0.26),
        ({"model_type": "minimax_m2", "rotary_dim": 64}, 228.69),
        ({"model_type": "deepseek_v3"}, 671.03),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_models_have_their_published_sizes(config: dict[str, Any], billions: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert num_parameters(spec_of(tmp_path)) / 1e9 == pytest.approx(billions, abs=0.01)


def test_layers_beyond_the_model_and_old_tables_are_left_out(tmp_path: Path) -> None:
    save("deepseek_v3-yarn", tmp_path)
    expected = logits_of(load(tmp_path))

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)

    change_tensors(tmp_path, add)
    assert torch.equal(logits_of(load(tmp_path)), expected)


def test_a_hybrid_as_published_has_fused_experts_and_further_predictions_beside_it(tmp_path: Path) -> None:
    def as_published(tensors: dict[str, Tensor]) -> None:
        for layer in range(4):
            prefix = f"model.language_model.layers.{layer}.mlp.experts"
            experts = [
                [tensors.pop(f"{prefix}.{expert}.{part}_proj.weight") for part in ("gate", "up", "down")]
                for expert in range(8)
            ]
            tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in experts])
            tensors[f"{prefix}.down_proj"] = torch.stack([down for *_, down in experts])
        tensors["mtp.fc.weight"] = torch.ones(4, 4)

    save("qwen3_5_moe", tmp_path)
    expected = logits_of(load(tmp_path))
    change_tensors(tmp_path, as_published)
    assert torch.equal(logits_of(load(tmp_path)), expected)
