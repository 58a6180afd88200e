"""What `moeserve doctor` says of GPUs that are not here: which serve a model, and what does not fit them."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from kernels.weight_formats import FORMATS
from moeserve.config import ServeConfig
from moeserve.engine.doctor import setups_of
from moeserve.engine.known_model import NativeModel, examine
from moeserve.machine import Gpu
from moeserve.model.families import build_spec, load_config
from moeserve.model.spec import DecoderSpec
from moeserve.model.stored import TensorInfo
from moeserve.model.tensor_names import TensorRef, fused_expert_tensors, layer_tensors, outer_tensors
from tests.cpu.test_doctor import GIB, MACHINE, QWEN3, folder_of
from tests.support.recorded_gpus import GPUS

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
LATENT = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "max_position_embeddings": 32768,
    "dtype": "bfloat16",
}


def setups(folder: Path, gpu: Gpu, fields: dict[str, Any], config: ServeConfig) -> list[Any]:
    found = setups_of(examine(folder_of(fields, folder)), replace(MACHINE, gpus=(gpu,)), config)
    return [setup for setup in found if setup.device == "cuda"]


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: gpu.name)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_every_card_since_ampere_serves_a_dense_model_and_an_older_one_is_left_out(
    gpu: Gpu, head_dim: int, tmp_path: Path
) -> None:
    found = setups(tmp_path, gpu, {**DENSE, "head_dim": head_dim}, ServeConfig())
    assert [setup.obstacle for setup in found] == ([None] if gpu.capability >= (8, 0) else [])


@pytest.mark.parametrize("gpu", [gpu for gpu in GPUS if gpu.obstacle is None], ids=lambda gpu: gpu.name)
def test_every_card_since_ampere_serves_a_30b_of_experts_in_some_way(gpu: Gpu, tmp_path: Path) -> None:
    found = setups(tmp_path, gpu, QWEN3, ServeConfig())
    assert found[-1].obstacle is None
    # Whole in bfloat16 it takes 57 GiB.
    assert (found[0].obstacle is None) == (gpu.total_bytes > 70 * GIB)


def test_a_busy_card_behind_a_free_one_keeps_one_rank_from_nothing(tmp_path: Path) -> None:
    card = next(gpu for gpu in GPUS if "RTX4090" in gpu.name)
    busy, model = replace(card, free_bytes=GIB), examine(folder_of(DENSE, tmp_path))
    first, second = (
        setups_of(model, replace(MACHINE, gpus=gpus), ServeConfig())[-1].obstacle
        for gpus in ((card, busy), (busy, card))
    )
    assert first is None
    assert second is not None


def test_fp8_is_refused_on_a_card_that_lacks_it(tmp_path: Path) -> None:
    ampere = next(gpu for gpu in GPUS if "RTX3090" in gpu.name)
    (setup,) = setups(tmp_path, ampere, DENSE, ServeConfig(kv_cache_dtype="fp8_e4m3"))
    assert setup.obstacle is not None
    assert all(word in setup.obstacle for word in ("8.6", "8.9", "fp8"))


def test_latent_attention_in_float32_is_refused_where_a_program_has_little_shared_memory(tmp_path: Path) -> None:
    small, large = (next(gpu for gpu in GPUS if name in gpu.name) for name in ("RTX4090", "H100"))
    said = {
        gpu.name: setups(tmp_path, replace(gpu, total_bytes=200 * GIB, free_bytes=199 * GIB), LATENT, config)[
            0
        ].obstacle
        for gpu in (small, large)
        for config in (ServeConfig(dtype="float32"),)
    }
    assert said[large.name] is None
    assert said[small.name] == (
        "--device cuda: attention with heads of 576 elements in float32 needs 107520 bytes of shared memory, and the "
        "GPU allows 101376."
    )


def q4_k_m(spec: DecoderSpec) -> dict[str, TensorInfo]:
    """Return the tensors of a file of llama.cpp's kind Q4_K_M: values and `down` of half of the layers in Q6_K."""
    index: dict[str, TensorInfo] = {}

    def add(key: str, ref: TensorRef, layer: int) -> None:
        eighth = spec.num_layers // 8
        finer = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        kind = "Q6_K" if key == "lm_head" or (finer and key in ("v", "down")) else "Q4_K"
        if len(ref.shape) == 1 or key == "moe_gate":
            index[ref.names[0]] = TensorInfo(Path("q4_k_m.gguf"), "F32", ref.shape, 4 * prod(ref.shape))
        else:
            num_bytes = prod(ref.shape) // 256 * FORMATS[kind.lower()].block_bytes
            index[ref.names[0]] = TensorInfo(Path("q4_k_m.gguf"), kind, ref.shape, num_bytes)

    for layer in range(spec.num_layers):
        for key, ref in (layer_tensors(spec, layer) | fused_expert_tensors(spec, layer)).items():
            add(key, ref, layer)
    for key, ref in outer_tensors(spec).items():
        add(key, ref, -1)
    return index


def test_a_30b_of_experts_in_q4_k_m_fits_a_card_of_24_gb_with_32k_tokens(tmp_path: Path) -> None:
    spec = build_spec(load_config(folder_of(QWEN3, tmp_path)))
    index = q4_k_m(spec)
    # The file in public has 18.56 GB.
    assert sum(info.num_bytes for info in index.values()) == pytest.approx(18.55e9, rel=2e-3)
    model = NativeModel(spec, index, ())
    card = next(gpu for gpu in GPUS if "RTX4090" in gpu.name)
    found = [one for one in setups_of(model, replace(MACHINE, gpus=(card,)), ServeConfig()) if one.device == "cuda"]
    assert [setup.obstacle for setup in found] == [None]
    assert found[0].weights_bytes < 1.04 * 18.56e9
    assert found[0].kv_tokens >= 32768
