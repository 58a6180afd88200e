"""Quantised safetensors checkpoints, and weights rounded while they are loaded, of models on transformers' code."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from benchmarks.token_engine import TokenEngine
from kernels.ops import CpuOps
from moeserve.config import ServeConfig
from moeserve.engine.memory_plan import plan_model, rounding_of
from moeserve.model.checkpoint import read_index
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.spec import read_transformers_spec
from moeserve.plan import SamplingParams
from tests.support.packed_models import FORMS, TYPES, quantise_in, save_wide
from tests.support.quantised_files import gptq, quantise_checkpoint

GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)
BASE = ServeConfig(
    kv_cache_memory=2**20,
    block_size=4,
    max_model_len=96,
    max_num_batched_tokens=24,
    max_num_seqs=4,
    model_impl="transformers",
)
PROMPTS = [[3 + 7 * n % 101 for n in range(count)] for count in (30, 4, 9)]


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()


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
        for place, form in enumerate(FORMS)
        for number, model_type in enumerate(TYPES)
    ],
)
def test_a_quantised_checkpoint_gives_the_logits_of_its_values_and_serves_their_texts(
    form: str, model_type: str, tmp_path: Path
) -> None:
    folder = save_wide(model_type, tmp_path / "model")
    plain = quantise_in(form, folder)
    assert any("expert" in name and "weight" in name for name in load_file(folder / "model.safetensors"))
    exact = replace(BASE, arithmetic="exact")
    expected, found = logits_of(plain), logits_of(folder, exact)
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
    texts = [TokenEngine(*of).generate(PROMPTS, GREEDY) for of in ((plain, BASE), (folder, exact))]
    assert [one.token_ids for one in texts[0]] == [one.token_ids for one in texts[1]]
    wide = plan_model(plain, BASE).weights_bytes
    assert plan_model(folder, BASE).weights_bytes < (0.65 if form in ("fp8", "compressed-tensors") else 0.5) * wide


@pytest.mark.parametrize(("quantization", "most_moved", "share"), [("int8", 0.1, 0.4), ("int4", 0.6, 0.3)])
@pytest.mark.parametrize("model_type", TYPES)
def test_rounded_weights_move_logits_little_take_a_part_of_the_memory_and_serve(
    model_type: str, quantization: str, most_moved: float, share: float, tmp_path: Path
) -> None:
    folder = save_wide(model_type, tmp_path)
    rounded = replace(BASE, quantization=quantization)
    expected, found = logits_of(folder), logits_of(folder, replace(rounded, arithmetic="exact"))
    assert 0 < (found - expected).abs().median() < most_moved * expected.std()
    assert plan_model(folder, rounded).weights_bytes < share * plan_model(folder, BASE).weights_bytes
    assert all(
        len(one.token_ids) == GREEDY.max_tokens for one in TokenEngine(folder, rounded).generate(PROMPTS, GREEDY)
    )


def test_the_configuration_of_a_quantisation_may_lie_beside_the_model(tmp_path: Path) -> None:
    folder = save_wide("lfm2_moe", tmp_path / "model")
    config, quantise = gptq(4, 32)
    plain = quantise_checkpoint(folder, config, quantise)
    path = folder / "config.json"
    content = json.loads(path.read_text())
    (folder / "quantize_config.json").write_text(json.dumps(content.pop("quantization_config")))
    path.write_text(json.dumps(content))
    expected, found = logits_of(plain), logits_of(folder, replace(BASE, arithmetic="exact"))
    assert (found - expected).abs().max() <= 1e-4 * expected.abs().max()
