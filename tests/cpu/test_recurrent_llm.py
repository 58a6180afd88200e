"""The whole engine on tiny models with recurrent layers.

Whatever cache, batch and preemption do, the tokens of a request and the bits of their log probabilities are those of
the request computed alone.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.config import ServeConfig
from moeserve.model.families import build_spec, load_config
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.plan import SamplingParams
from moeserve.request_states import StatePolicy
from tests.support.llm_prompts import complete_alone, prompts_with_a_common_beginning
from tests.support.tiny_models import save

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
RANDOM = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=5, presence_penalty=0.3, logprobs=2)
BLOCK = 4
BASE = ServeConfig(kv_cache_memory=2**21, block_size=BLOCK, max_model_len=160)


@pytest.fixture(scope="module", params=["qwen3_next", pytest.param("qwen3_5_moe", marks=pytest.mark.long)])
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


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.logprobs for c in found] == [c.logprobs for c in expected]


def test_greedy_tokens_equal_those_of_transformers(
    model_dir: Path, prompts: list[list[int]], alone: list[Completion]
) -> None:
    import transformers

    reference = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, completion in list(zip(prompts, alone, strict=True))[::2]:
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize(
    "changes",
    [
        {"max_num_seqs": 3, "max_num_batched_tokens": 5},
        {"max_num_batched_tokens": 64, "scheduling_policy": "lpm"},
        {"max_num_batched_tokens": 256},
    ],
    ids=["tiny chunks", "middle chunks", "one batch"],
)
def test_any_batch_and_chunking_cold_and_cached_gives_the_same_bits(
    model_dir: Path,
    prompts: list[list[int]],
    samplings: list[SamplingParams],
    alone: list[Completion],
    changes: dict[str, object],
) -> None:
    llm = TokenEngine(model_dir, replace(BASE, **changes))  # type: ignore[arg-type]
    for _ in range(2):
        assert_same(llm.generate(prompts, samplings), alone)
    assert llm.scheduler.counters.prefix_hit_tokens > 100
    llm.scheduler.check_idle()


def test_a_hit_at_every_block_border_gives_the_same_bits(
    model_dir: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the policy stands, a snapshot is saved only where it spares many tokens.
    monkeypatch.setattr("moeserve.assemble.StatePolicy", partial(StatePolicy, min_gain=1))
    llm, uncached = TokenEngine(model_dir, BASE), TokenEngine(model_dir, replace(BASE, enable_prefix_caching=False))
    for number, border in enumerate(range(BLOCK, 24, BLOCK)):
        prompt = [number + 1, *prompts[3][:24]]
        # Its last token is never served from the cache, so its last snapshot is at the border.
        llm.generate([prompt[: border + 1]], replace(GREEDY, max_tokens=1))
        (hit,) = llm.generate([prompt], GREEDY)
        assert hit.num_cached_tokens == border
        assert_same([hit], uncached.generate([prompt], GREEDY))
    llm.scheduler.check_idle()


def test_preempted_requests_end_with_the_same_bits(
    model_dir: Path, prompts: list[list[int]], samplings: list[SamplingParams], alone: list[Completion]
) -> None:
    layers = build_spec(load_config(model_dir)).kv_layers
    memory = 24 * kv_block_bytes(layers, BLOCK, torch.float32)
    small = TokenEngine(
        model_dir,
        replace(BASE, max_model_len=92, kv_cache_memory=memory, max_num_seqs=8, max_num_batched_tokens=16),
    )
    assert_same(small.generate(prompts, samplings), alone)
    assert small.scheduler.counters.preemptions > 0
    small.scheduler.check_idle()
