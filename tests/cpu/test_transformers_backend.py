"""Models on transformers' modelling code: the tokens of our own decoder, through the whole engine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.token_engine import Completion, TokenEngine
from kernels.specs import Activation
from moeserve.config import ConfigError
from moeserve.engine.memory_plan import plan_model, read_any_spec
from moeserve.model.hf.expert_form import form_of
from moeserve.model.hf.experts import activation_of
from moeserve.model.hf.fused import FusedAttention
from moeserve.model.hf.loading import load_transformers_decoder
from moeserve.model.hf.mixers import Ways, find_mixers
from moeserve.model.hf.modelling import empty_model, read_hf_config
from moeserve.model.hf.spec import experts_by_layer, read_transformers_spec
from moeserve.model.hf.step import Step
from tests.support.gguf_modules import tiny
from tests.support.llm_prompts import (
    BASE,
    GREEDY,
    PROMPTS,
    assert_same_cold_and_cached,
    complete_alone,
    in_any_batch,
)
from tests.support.tiny_models import save
from tests.support.tiny_transformers import save_tiny, tiny_config, tiny_model
from tests.support.transformers_parity import TOLERANCE, Memory, worst_difference

THEIRS = replace(BASE, model_impl="transformers")


@pytest.mark.parametrize("case", ["mixtral-window", "gpt_oss", "deepseek_v3-yarn"])
def test_tokens_equal_those_of_our_own_code(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    native = TokenEngine(tmp_path, replace(BASE, model_impl="native")).generate(PROMPTS, GREEDY)
    llm = TokenEngine(tmp_path, replace(THEIRS, max_num_batched_tokens=24, max_num_seqs=4))
    for _ in range(2):  # The second time from the prefix cache.
        found = llm.generate(PROMPTS, GREEDY)
        assert [c.token_ids for c in found] == [c.token_ids for c in native]
    assert found[-1].num_cached_tokens > 0
    llm.scheduler.check_idle()


@pytest.fixture(scope="module", params=["mixtral", "gpt_oss"])
def alone(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Completion]]:
    folder = tmp_path_factory.mktemp(request.param)
    save(request.param, folder)
    return folder, complete_alone(folder, config=THEIRS)


@in_any_batch
def test_transformers_code_gives_the_same_bits_in_any_batch_and_chunking_cold_and_cached(
    alone: tuple[Path, list[Completion]], changes: dict[str, object]
) -> None:
    folder, completions = alone
    assert_same_cold_and_cached(TokenEngine(folder, replace(THEIRS, **changes)), completions)  # type: ignore[arg-type]


def test_latent_attention_gives_a_row_alone_the_bits_that_it_has_among_others(tmp_path: Path) -> None:
    save_tiny("glm4_moe_lite", tmp_path)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    decoder.use(Ways())
    texts = [list(range(3, 43)), list(range(60, 95))]
    whole, pieces = Memory(decoder, texts), Memory(decoder, texts)
    pieces.step([(0, 0, 17), (1, 0, 30)])
    pieces.step([(0, 17, 39)])
    assert torch.equal(whole.step([(0, 0, 40)])[0], pieces.step([(1, 30, 31), (0, 39, 40)])[1])


def test_the_memory_stated_before_loading_is_that_of_our_own_code(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    ours, theirs = (plan_model(tmp_path, replace(BASE, model_impl=impl)) for impl in ("native", "transformers"))
    assert theirs.weights_bytes == ours.weights_bytes
    assert theirs.kv == ours.kv


@pytest.mark.parametrize("model_type", ["dbrx", "ernie4_5_vl_moe"])
def test_experts_brought_to_the_common_form_take_the_memory_of_those_that_texts_pass(
    model_type: str, tmp_path: Path
) -> None:
    own = save_tiny(model_type, tmp_path)
    # A head that shares the table of tokens has a packed copy of it.
    passed = [tensor for name, tensor in own.outer.state_dict().items() if ".vision_moe." not in name]
    assert plan_model(tmp_path, THEIRS).weights_bytes == 4 * sum(tensor.numel() for tensor in passed)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    assert len(decoder.experts) == len(decoder.spec.moe_layers) > 1
    kept = [name for name, _ in decoder._code.outer.named_parameters() if ".experts." in name and "shared" not in name]
    assert kept == []


@pytest.mark.parametrize("model_type", ["muse_spark", "longcat_flash"])
def test_of_a_checkpoint_in_16_bits_projections_and_tables_alone_stay_so_where_transformers_computes_experts(
    model_type: str, tmp_path: Path
) -> None:
    code, plans = tiny_model(model_type), []
    for dtype in (torch.float32, torch.bfloat16):
        code.outer.to(dtype).save_pretrained(tmp_path / str(dtype))
        plans.append(plan_model(tmp_path / str(dtype), THEIRS).weights_bytes)
    narrow = tmp_path / str(torch.bfloat16)
    decoder = load_transformers_decoder(narrow, read_transformers_spec(narrow))
    experts = [p for name, p in decoder._code.outer.named_parameters() if ".experts." in name and p.dim() > 1]
    assert {weight.dtype for weight in experts} == {torch.float32}
    kept = sum(m.weight.numel() for m in code.outer.modules() if isinstance(m, nn.Linear | nn.Embedding))
    assert plans[0] - plans[1] == 2 * kept


@pytest.mark.parametrize(
    ("model_type", "activation"),
    [
        ("qwen3_moe", Activation()),
        ("deepseek_v4", Activation("silu", limit=10.0)),
        ("gpt_oss", Activation("swigluoai", alpha=1.702, limit=7.0)),
        ("nemotron_h", Activation("relu2")),
        ("step3p7", Activation()),
        ("muse_spark", None),  # A norm behind each expert.
    ],
)
def test_the_activation_of_experts_is_found(model_type: str, activation: Activation | None) -> None:
    code = empty_model(tiny_config(model_type))
    forms = {module: form for module in code.body.modules() if (form := form_of(module)) is not None}
    assert {activation_of(module, form) for module, form in forms.items()} == {activation}


def test_layers_that_limit_their_experts_differently_are_all_computed_by_our_kernels(tmp_path: Path) -> None:
    code = tiny("step35")
    forms = [(module, form_of(module)) for module in experts_by_layer(code).values()]
    found = [activation_of(module, form) for module, form in forms if form is not None]
    assert found == [Activation(), Activation(), Activation("clamped_silu", limit=0.5)]
    code.outer.save_pretrained(tmp_path)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    assert len(decoder.experts) == 3
    assert worst_difference(code, decoder) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "num_fused"), [("mixtral", 4), ("qwen3_moe", 4), ("mellum", 4), ("gpt_oss", 0), ("olmoe", 0)]
)
def test_attention_of_common_forms_is_fused(model_type: str, num_fused: int, tmp_path: Path) -> None:
    own = save_tiny(model_type, tmp_path)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    assert sum(isinstance(mixer.forward, FusedAttention) for _, mixer in find_mixers(decoder._code.body)) == num_fused
    assert worst_difference(own, decoder) < TOLERANCE


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("glm_moe_dsa", "their attention is indexed"), ("minimax", "a part of .* memory lies outside the KV pool")],
)
def test_a_type_that_no_gpu_computes_is_refused_there_in_one_sentence(
    model_type: str, reason: str, tmp_path: Path
) -> None:
    save_tiny(model_type, tmp_path)
    with pytest.raises(ConfigError, match=rf"^--device cuda: [^.]* on a CPU only so far, as {reason}\.$"):
        read_any_spec(tmp_path, replace(THEIRS, device="cuda"), "cuda")


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        ({"expert_parallel_size": 2}, "--device cuda: several GPUs are"),
        ({"expert_memory": 2**20}, "--expert-memory 1048576 on a GPU"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3 on a GPU"),
    ],
)
def test_a_setting_of_a_gpu_that_transformers_code_does_not_honour_is_refused(
    settings: dict[str, Any], flag: str, tmp_path: Path
) -> None:
    save_tiny("mixtral", tmp_path)
    with pytest.raises(ConfigError, match=rf"^{flag} .*for a model on our own code so far, and transformers' code"):
        read_any_spec(tmp_path, replace(THEIRS, device="cuda", **settings), "cuda")


def test_angles_that_differ_between_their_halves_are_left_to_transformers() -> None:
    cos, sin = torch.rand(1, 3, 8), torch.rand(1, 3, 8)
    step = Step()
    assert step.angles_of((cos, sin)) is None
    twice = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    angles = step.angles_of(twice)
    assert angles is not None
    assert torch.equal(angles[0], cos[0])
    assert torch.equal(angles[1], sin[0])
    assert step.angles_of(twice) is angles


def test_what_transformers_keeps_in_its_own_form_goes_on_from_the_tokens_before_alone(tmp_path: Path) -> None:
    save_tiny("minimax", tmp_path)
    decoder = load_transformers_decoder(tmp_path, read_transformers_spec(tmp_path))
    memory = Memory(decoder, [list(range(3, 40)), list(range(40, 80))])
    wanted = memory.step([(0, 0, 9)])
    memory.step([(0, 9, 10)])
    for chunk in ((1, 9, 10), (0, 9, 10)):  # One that never was there, and one that is computed twice.
        with pytest.raises(RuntimeError, match="state of a request's first 9 tokens"):
            memory.step([chunk])
    assert torch.equal(memory.step([(0, 0, 9)]), wanted)


def test_dbrx_rotates_by_the_base_that_its_published_configuration_has_among_attention(tmp_path: Path) -> None:
    save_tiny("dbrx", tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    del fields["rope_parameters"]
    fields["attn_config"]["rope_theta"] = 500_000
    file.write_text(json.dumps(fields))
    assert read_hf_config(tmp_path).rope_parameters["rope_theta"] == 500_000


def test_a_gpu_is_refused(tmp_path: Path) -> None:
    save("mixtral", tmp_path)
    with pytest.raises(ConfigError):
        plan_model(tmp_path, replace(THEIRS, device="cuda"))


@pytest.mark.parametrize("setting", [{"expert_parallel_size": 2}, {"expert_memory": 2**20}])
def test_experts_that_transformers_computes_are_not_shared_out(setting: dict[str, int], tmp_path: Path) -> None:
    save_tiny("muse_spark", tmp_path)
    with pytest.raises(ConfigError, match=r"a muse_spark model has no experts .*that moeserve computes itself"):
        plan_model(tmp_path, replace(THEIRS, **setting))  # type: ignore[arg-type]
