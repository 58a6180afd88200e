"""Quantised safetensors checkpoints, and weights rounded while they are loaded, of models on transformers' code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.token_engine import TokenEngine
from experts.memory.file import round_to_page
from kernels.ops import CpuOps
from moeserve.config import ServeConfig
from moeserve.engine.memory_plan import plan_model, read_any_spec, rounding_of
from moeserve.model.checkpoint import read_index
from moeserve.model.expert_store import layouts_in_store
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.spec import read_transformers_spec
from moeserve.plan import SamplingParams
from tests.support.expert_files import wait_until_written
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

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
BASE = ServeConfig(kv_cache_memory=2**20, block_size=4, max_model_len=96, max_num_batched_tokens=24, max_num_seqs=4)
PROMPTS = [[3 + 7 * n % 101 for n in range(count)] for count in (30, 4, 9)]
_TYPES = ("lfm2_moe", "afmoe", "hunyuan_v1_moe", "exaone_moe", "nemotron_h")
_FORMS: Mapping[str, Callable[[], tuple[dict[str, Any], Quantise]]] = {
    "gptq": lambda: gptq(4, 32),
    "awq": lambda: awq(32),
    "compressed-tensors": lambda: compressed("pack-quantized", 8, 32),
    "fp8": lambda: deepseek(16, 32),
    "mxfp4": mxfp4,
    "nvfp4": modelopt,
}


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


def save(model_type: str, folder: Path) -> Path:
    """Save a tiny model with experts wide enough for all forms."""
    shared = {"moe_shared_expert_intermediate_size": 64} if model_type == "nemotron_h" else {}
    code = tiny_model(model_type, moe_intermediate_size=64, intermediate_size=128, **shared)
    code.outer.save_pretrained(folder)
    return folder


def logits_of(folder: Path, config: ServeConfig | None = None) -> torch.Tensor:
    """config: None widens all weights."""
    spec = read_transformers_spec(folder)
    if config is None:
        decoder = load_transformers_decoder(folder, spec)
    else:
        rounding = rounding_of(config, spec, read_index(folder))
        assert not rounding.is_none
        decoder = load_transformers_decoder(folder, spec, ops=CpuOps(rounding.arithmetic), rounding=rounding)
    return decoder.logits(next(decoder.own_states([range(3, 30)])))


@pytest.mark.parametrize(
    ("form", "model_type"),
    [
        pytest.param(form, model_type, marks=() if (place + number) % 5 == 0 else pytest.mark.long)
        for place, form in enumerate(_FORMS)
        for number, model_type in enumerate(_TYPES)
    ],
)
def test_a_quantised_checkpoint_gives_the_logits_of_its_values(form: str, model_type: str, tmp_path: Path) -> None:
    folder = save(model_type, tmp_path / "model")
    config, quantise = _FORMS[form]()
    plain = quantise_checkpoint(folder, config, quantise, lambda name: "router" in name or ".wg." in name)
    assert any("expert" in name and "weight" in name for name in load_file(folder / "model.safetensors"))
    expected, found = logits_of(plain), logits_of(folder, replace(BASE, arithmetic="exact"))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    wide = plan_model(plain, BASE).weights_bytes
    assert plan_model(folder, BASE).weights_bytes < (0.65 if form in ("fp8", "compressed-tensors") else 0.5) * wide


@pytest.mark.parametrize(("model_type", "quantization"), [("lfm2_moe", "int8"), ("granitemoehybrid", "int4")])
def test_rounded_weights_give_the_same_bits_from_few_slots_and_from_the_cache(
    model_type: str, quantization: str, tmp_path: Path
) -> None:
    folder = save(model_type, tmp_path / "model")
    config = replace(BASE, quantization=quantization, model_impl="transformers")
    expected = TokenEngine(folder, config).generate(PROMPTS, GREEDY)
    spec, dtype = read_any_spec(folder, config)
    layouts = layouts_in_store(folder, spec, dtype, rounding_of(config, spec, read_index(folder)))
    memory = 3 * len(spec.moe_layers) * round_to_page(layouts.num_bytes)
    store = str(tmp_path / "store")
    llm = TokenEngine(folder, replace(config, expert_memory=memory, expert_store_dir=store, record_experts=True))
    assert llm.experts is not None
    for _ in range(2):  # Out of the checkpoint while the expert file is written, then from the prefix cache.
        assert llm.generate(PROMPTS, GREEDY) == expected
        wait_until_written()
    assert llm.experts.stats().counters.num_misses > 10
    llm.close()


@pytest.mark.parametrize("model_type", _TYPES)
def test_rounding_to_8_bits_moves_logits_little_and_takes_a_third_of_the_memory(
    model_type: str, tmp_path: Path
) -> None:
    folder = save(model_type, tmp_path)
    expected, found = logits_of(folder), logits_of(folder, replace(BASE, quantization="int8", arithmetic="exact"))
    assert 0 < (found - expected).abs().median() < 0.1 * expected.std()
    wide, small = (plan_model(folder, replace(BASE, quantization=name)).weights_bytes for name in ("none", "int8"))
    assert small < 0.4 * wide


def test_the_configuration_of_a_quantisation_may_lie_beside_the_model(tmp_path: Path) -> None:
    folder = save("lfm2_moe", tmp_path / "model")
    config, quantise = gptq(4, 32)
    plain = quantise_checkpoint(folder, config, quantise)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    (folder / "quantize_config.json").write_text(json.dumps(content.pop("quantization_config")))
    path.write_text(json.dumps(content))
    expected, found = logits_of(plain), logits_of(folder, replace(BASE, arithmetic="exact"))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
