"""The whole engine on tiny models: tokens equal transformers', and nothing but the prompt decides them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.config import ConfigError, ServeConfig
from moeserve.device import KvBudget
from moeserve.model.families import GenerationDefaults, build_spec, load_config
from moeserve.model.kv_pool import kv_pool_bytes
from moeserve.plan import FinishReason, SamplingParams
from moeserve.rank import ServedModel
from tests.support.llm_prompts import complete_alone, prompts_with_a_common_beginning
from tests.support.tiny_models import save

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
RANDOM = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=5, presence_penalty=0.3, logprobs=2)
BASE = ServeConfig(kv_cache_memory=2**20, block_size=4, max_model_len=160)


@pytest.fixture(
    scope="module",
    params=["mixtral", "gpt_oss", "deepseek_v3-yarn", pytest.param("phimoe-longrope", marks=pytest.mark.long)],
)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save(request.param, directory)
    return directory


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_with_a_common_beginning()


@pytest.fixture(scope="module")
def samplings(prompts: list[list[int]]) -> list[SamplingParams]:
    return [(GREEDY, RANDOM)[index % 2] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(model_dir: Path, prompts: list[list[int]], samplings: list[SamplingParams]) -> list[Completion]:
    return complete_alone(model_dir, BASE, prompts, samplings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"expert_quantization": "int8"}, "^--expert-quantization int8 needs a service on a GPU"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "^--kv-cache-dtype fp8_e4m3 needs a service on a GPU"),
        ({"device": "cuda"}, "device cuda is for a service"),
    ],
)
def test_what_only_a_gpu_honours_is_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        TokenEngine("unread", replace(BASE, **settings))  # type: ignore[arg-type]


def test_greedy_tokens_equal_those_of_transformers(model_dir: Path, prompts: list[list[int]]) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    completions = TokenEngine(model_dir, BASE).generate(prompts, GREEDY)
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert completion.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 64, "scheduling_policy": "lpm"},
        {"max_num_batched_tokens": 256},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 100},
    ],
    ids=["tiny chunks", "middle chunks", "one batch", "no cache"],
)
def test_tokens_and_logprobs_have_the_same_bits_in_any_batch_and_chunking(
    model_dir: Path,
    prompts: list[list[int]],
    samplings: list[SamplingParams],
    alone: list[Completion],
    changes: dict[str, object],
) -> None:
    llm = TokenEngine(model_dir, replace(BASE, **changes))  # type: ignore[arg-type]
    for _ in range(2):
        completions = llm.generate(prompts, samplings)
        assert [c.token_ids for c in completions] == [c.token_ids for c in alone]
        assert [c.logprobs for c in completions] == [c.logprobs for c in alone]
    llm.scheduler.check_idle()


def test_preempted_requests_end_with_the_same_tokens(
    model_dir: Path, prompts: list[list[int]], samplings: list[SamplingParams], alone: list[Completion]
) -> None:
    # Layers with a window take less, so that memory is short for them, too.
    memory = kv_pool_bytes(build_spec(load_config(model_dir)).kv_layers, 24, 6, 4, torch.float32)
    small = TokenEngine(
        model_dir,
        replace(BASE, max_model_len=92, kv_cache_memory=memory, max_num_seqs=8, max_num_batched_tokens=16),
    )
    completions = small.generate(prompts, samplings)
    assert [c.token_ids for c in completions] == [c.token_ids for c in alone]
    assert small.scheduler.counters.preemptions > 0


def test_a_cached_prefix_is_reported(model_dir: Path, prompts: list[list[int]]) -> None:
    llm = TokenEngine(model_dir, BASE)
    assert llm.generate(prompts[:1], GREEDY)[0].num_cached_tokens == 0
    assert llm.generate(prompts[1:2], GREEDY)[0].num_cached_tokens == 36


def test_end_tokens_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    save("olmoe", tmp_path)
    spec = replace(build_spec(load_config(tmp_path)), eos_token_ids=(3, 50279))
    assert spec.vocab_size == 128

    def served(defaults: GenerationDefaults) -> ServedModel:
        return ServedModel(spec, defaults, KvBudget(1, 16), torch.float32, 0, 0, "cpu")

    assert served(GenerationDefaults()).eos_token_ids == [3]
    assert served(GenerationDefaults(eos_token_ids=(128, 127))).eos_token_ids == [127]
