"""`--quantization` on a CPU: a request gets the bits of the rounded values, whatever happens to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.token_engine import Completion, TokenEngine
from experts.memory.file import round_to_page
from kernels.cpu.library import native_kernels
from kernels.cpu.quantised import quantise
from kernels.weight_formats import Q8_0
from moeserve.config import ConfigError, ServeConfig
from moeserve.engine.memory_plan import read_spec, rounding_of
from moeserve.engine.weight_bytes import weights_bytes
from moeserve.model.checkpoint import read_index
from moeserve.model.expert_store import layouts_in_store
from moeserve.model.rounding import INT4, INT8, Rounding
from moeserve.model.spec import CheckpointError, ModelError
from moeserve.model.weights import load_decoder
from moeserve.plan import SamplingParams
from tests.support.llm_prompts import (
    BASE,
    GREEDY,
    PROMPTS,
    SAMPLINGS,
    assert_same,
    assert_same_cold_and_cached,
    complete_alone,
    in_any_batch,
    small_engine,
)
from tests.support.tiny_models import build, save

pytestmark = pytest.mark.skipif(native_kernels() is None, reason="There are no compiled kernels.")
# Plain experts; experts and projections with biases; latent attention and a shared expert; recurrent layers.
MODELS = ["mixtral", "gpt_oss", "deepseek_v3-yarn", "qwen3_next"]


@pytest.fixture(scope="module", params=MODELS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save(request.param, directory)
    return directory


@pytest.fixture(scope="module", params=["int8", "int4"])
def config(request: pytest.FixtureRequest) -> ServeConfig:
    return replace(BASE, quantization=request.param)


@pytest.fixture(scope="module")
def alone(model_dir: Path, config: ServeConfig) -> list[Completion]:
    return complete_alone(model_dir, config=config)


@in_any_batch
def test_rounded_weights_give_the_same_bits_in_any_batch_and_chunking_cold_and_cached(
    model_dir: Path, config: ServeConfig, alone: list[Completion], changes: dict[str, object]
) -> None:
    llm = TokenEngine(model_dir, replace(config, **changes))  # type: ignore[arg-type]
    assert_same_cold_and_cached(llm, alone)
    assert llm.scheduler.counters.prefix_hit_tokens > 100


def test_requests_preempted_beside_rounded_weights_end_with_the_same_bits(
    model_dir: Path, config: ServeConfig, alone: list[Completion]
) -> None:
    llm = small_engine(model_dir, 24, max_num_seqs=8, max_num_batched_tokens=16, quantization=config.quantization)
    assert_same(llm.generate(PROMPTS, SAMPLINGS), alone)
    llm.scheduler.check_idle()


def test_experts_that_come_and_go_change_no_bit(
    model_dir: Path, config: ServeConfig, alone: list[Completion], tmp_path: Path
) -> None:
    spec, dtype = read_spec(model_dir, config)
    layout = layouts_in_store(model_dir, spec, dtype, rounding_of(config, spec, read_index(model_dir)))
    wide = layouts_in_store(model_dir, spec, dtype)
    assert layout.num_bytes < wide.num_bytes / (3 if config.quantization == "int8" else 4)
    assert spec.moe is not None
    slots = spec.moe.gate.top_k + 1
    memory = slots * len(spec.moe_layers) * round_to_page(layout.num_bytes)
    llm = TokenEngine(model_dir, replace(config, expert_memory=memory, expert_store_dir=str(tmp_path)))
    assert_same(llm.generate(PROMPTS, SAMPLINGS), alone)
    assert llm.experts is not None
    assert llm.experts.stats().counters.num_misses > 0


def test_exact_arithmetic_computes_the_bits_of_the_rounded_values_in_float32(tmp_path: Path) -> None:
    """The oracle: a checkpoint in float32 whose matrices hold the rounded values."""
    kernels = native_kernels()
    assert kernels is not None
    given, rounded = tmp_path / "given", tmp_path / "rounded"
    save("mixtral", given)
    save("mixtral", rounded)
    tensors = load_file(given / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() < 2 or name.endswith("gate.weight"):
            continue
        own = name.split(".")[-2]
        key = {"embed_tokens": "embedding", "w2": "down"}.get(own, own.removesuffix("_proj"))
        form = INT4.format_of(key, tensor.shape[-1])
        rows = quantise(tensor.float().flatten(0, -2), form, kernels)
        tensors[name] = rows.dequantise().view(tensor.shape)
    save_file(tensors, rounded / "model.safetensors")
    config = replace(BASE, quantization="int4", arithmetic="exact")
    found = TokenEngine(given, config).generate(PROMPTS, SAMPLINGS)
    assert_same(found, TokenEngine(rounded, BASE).generate(PROMPTS, SAMPLINGS))


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_the_planned_memory_is_that_of_the_loaded_weights(tmp_path: Path, quantization: str) -> None:
    save("mixtral", tmp_path)
    config = replace(BASE, quantization=quantization)
    spec, dtype = read_spec(tmp_path, config)
    planned = weights_bytes(spec, dtype, read_index(tmp_path), rounding=rounding_of(config, spec, {}))
    wide = weights_bytes(spec, dtype, read_index(tmp_path))
    assert planned < wide / (3 if quantization == "int8" else 4)


def test_only_experts_are_rounded_where_that_is_asked_for(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    spec, dtype = read_spec(tmp_path, BASE)
    config = replace(BASE, quantization="experts=int8", arithmetic="exact")
    rounding = rounding_of(config, spec, read_index(tmp_path))
    assert rounding == Rounding(None, INT8, "exact")
    assert rounding.name == "unquantised, experts int8"
    decoder = load_decoder(tmp_path, spec, dtype=dtype, rounding=rounding)
    assert all(experts._layout.shape.formats == (Q8_0, Q8_0) for experts in decoder.experts)
    plain = TokenEngine(tmp_path, BASE).generate(PROMPTS[:2], GREEDY)
    found = TokenEngine(tmp_path, config).generate(PROMPTS[:2], GREEDY)
    assert [c.logprobs for c in found] != [c.logprobs for c in plain]


def test_int8_is_close_to_the_unrounded_model(model_dir: Path) -> None:
    spec, dtype = read_spec(model_dir, BASE)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
    plain = TokenEngine(model_dir, BASE).generate(PROMPTS, sampling)
    found = TokenEngine(model_dir, replace(BASE, quantization="int8")).generate(PROMPTS, sampling)
    assert spec.vocab_size == 128
    assert dtype == torch.float32
    agree = sum(a.token_ids == b.token_ids for a, b in zip(plain, found, strict=True))
    assert agree >= len(PROMPTS) - 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"quantization": "int8", "dtype": "float16"}, "float16"),
        ({"arithmetic": "int8"}, "--arithmetic int8 needs"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    changes: dict[str, str], sentence: str, model_dir: Path
) -> None:
    spec, _ = read_spec(model_dir, BASE)
    with pytest.raises(ConfigError, match=sentence):
        rounding_of(replace(BASE, **changes), spec, {})  # type: ignore[arg-type]


def test_without_compiled_kernels_quantised_weights_are_refused(
    monkeypatch: pytest.MonkeyPatch, model_dir: Path
) -> None:
    spec, _ = read_spec(model_dir, BASE)
    monkeypatch.setattr("moeserve.engine.memory_plan.native_kernels_absence", lambda: "There is no compiler.")
    with pytest.raises(ConfigError, match="There is no compiler"):
        rounding_of(replace(BASE, quantization="int4"), spec, {})


def test_a_loader_refuses_to_round_where_it_cannot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    spec, _ = read_spec(tmp_path, BASE)
    for rounding in (Rounding(INT8, INT8), Rounding(None, INT4)):
        with pytest.raises(CheckpointError, match="not in float16"):
            load_decoder(tmp_path, spec, dtype=torch.float16, rounding=rounding)
        with monkeypatch.context() as without:
            without.setattr("moeserve.model.rounding.native_kernels_absence", lambda: "There is no compiler.")
            with pytest.raises(CheckpointError, match="There is no compiler"):
                load_decoder(tmp_path, spec, rounding=rounding)


def test_experts_whose_rows_are_not_whole_groups_are_refused(tmp_path: Path) -> None:
    build("mixtral", intermediate_size=40).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="rows of 40 weights"):
        TokenEngine(tmp_path, replace(BASE, quantization="int8"))
