"""The whole engine on tiny models with sliding windows.

Whatever becomes of the window blocks, the tokens of a request and the bits of their log probabilities are those of the
request computed alone by an engine in which all layers keep all KV.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
import torch

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.config import ServeConfig
from moeserve.model.families import build_spec, load_config
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.plan import SamplingParams
from radix_cache import PrefixCache
from radix_cache.window_blocks import least_window_blocks
from tests.support.llm_prompts import complete_alone, prompts_with_a_common_beginning
from tests.support.tiny_models import save
from tests.support.tiny_transformers import save_tiny

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
RANDOM = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=5, presence_penalty=0.3, logprobs=2)
BLOCK, WINDOW = 4, 9
BASE = ServeConfig(kv_cache_memory=2**21, block_size=BLOCK, max_model_len=160)


# Every second layer has a window; all layers have one, and the KV blocks hold nothing.
@pytest.fixture(scope="module", params=["gpt_oss", "mistral-window"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    save(request.param, directory)
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "sliding_window": WINDOW}))
    return directory


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return prompts_with_a_common_beginning()


@pytest.fixture(scope="module")
def samplings(prompts: list[list[int]]) -> list[SamplingParams]:
    return [(GREEDY, RANDOM)[index % 2] for index in range(len(prompts))]


@pytest.fixture(scope="module")
def alone(model_dir: Path, prompts: list[list[int]], samplings: list[SamplingParams]) -> list[Completion]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeserve.memory_plan.window_demand", lambda *_: None)
        return complete_alone(model_dir, BASE, prompts, samplings)


def start(model_dir: Path, **changes: object) -> TokenEngine:
    llm = TokenEngine(model_dir, replace(BASE, **changes))  # type: ignore[arg-type]
    assert cache_of(llm).windows is not None
    return llm


def cache_of(llm: TokenEngine) -> PrefixCache:
    return llm.scheduler._memories[0]._cache


def assert_same(found: list[Completion], expected: list[Completion]) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.logprobs for c in found] == [c.logprobs for c in expected]


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
    llm = start(model_dir, **changes)
    for _ in range(2):
        assert_same(llm.generate(prompts, samplings), alone)
    assert llm.scheduler.counters.prefix_hit_tokens > 100
    llm.scheduler.check_idle()


def test_torch_computes_the_same_bits_with_and_without_window_blocks(
    model_dir: Path, prompts: list[list[int]], samplings: list[SamplingParams], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.attention.native_kernels", lambda: None)
    with_windows = start(model_dir).generate(prompts[:4], samplings[:4])
    monkeypatch.setattr("moeserve.memory_plan.window_demand", lambda *_: None)
    assert_same(with_windows, complete_alone(model_dir, BASE, prompts[:4], samplings[:4]))


def test_a_hit_at_every_block_border_gives_the_same_bits(model_dir: Path, prompts: list[list[int]]) -> None:
    llm, uncached = start(model_dir), start(model_dir, enable_prefix_caching=False)
    for number, border in enumerate(range(BLOCK, 24, BLOCK)):
        prompt = [number + 1, *prompts[3][:24]]
        llm.generate([prompt[: border + 1]], replace(GREEDY, max_tokens=1))
        (hit,) = llm.generate([prompt], GREEDY)
        assert hit.num_cached_tokens == border
        assert_same([hit], uncached.generate([prompt], GREEDY))
    llm.scheduler.check_idle()


def test_evicted_window_blocks_end_a_hit_earlier_and_change_no_bit(
    model_dir: Path, prompts: list[list[int]], samplings: list[SamplingParams], alone: list[Completion]
) -> None:
    llm, random = start(model_dir), Random(7)
    windows = cache_of(llm).windows
    assert windows is not None
    llm.generate(prompts, samplings)
    found = []
    for share in (0.2, 0.5, 1.0):
        windows._evict(int(share * windows.num_cached))
        order = random.sample(range(len(prompts)), len(prompts))
        for index in order:
            found += llm.generate([prompts[index]], samplings[index])
            assert_same(found[-1:], [alone[index]])
    assert len({completion.num_cached_tokens for completion in found}) > 3
    cache_of(llm).check_invariants()


def test_preempted_requests_end_with_the_same_bits(
    model_dir: Path, prompts: list[list[int]], samplings: list[SamplingParams], alone: list[Completion]
) -> None:
    layers = build_spec(load_config(model_dir)).kv_layers
    memory = 24 * kv_block_bytes(layers, BLOCK, torch.float32)
    small = start(model_dir, max_model_len=92, kv_cache_memory=memory, max_num_seqs=8, max_num_batched_tokens=16)
    assert_same(small.generate(prompts, samplings), alone)
    # Where all layers have a window, whoever is admitted has the blocks to go on.
    assert (small.scheduler.counters.preemptions > 0) == any(layer.window is None for layer in layers)
    small.scheduler.check_idle()


def test_a_context_that_all_kv_together_does_not_hold_fits_with_window_blocks(
    model_dir: Path, alone: list[Completion], prompts: list[list[int]], samplings: list[SamplingParams]
) -> None:
    layers = build_spec(load_config(model_dir)).kv_layers
    memory = 20 * kv_block_bytes(layers, BLOCK, torch.float32)
    llm = start(model_dir, max_model_len=92, kv_cache_memory=memory, max_num_seqs=1, max_num_batched_tokens=8)
    cache = cache_of(llm)
    assert cache.windows is not None
    assert 20 * BLOCK < 92
    assert least_window_blocks(WINDOW, BLOCK) <= cache.windows.num_blocks < cache.num_blocks
    assert_same(llm.generate(prompts, samplings), alone)


def test_layers_that_keep_a_window_in_transformers_code_have_window_blocks(
    prompts: list[list[int]], tmp_path: Path
) -> None:
    save_tiny("gemma4", tmp_path)
    llm = start(tmp_path, max_num_seqs=4, max_num_batched_tokens=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moeserve.memory_plan.window_demand", lambda *_: None)
        alone = complete_alone(tmp_path, BASE, prompts, [GREEDY] * len(prompts))
    # Transformers' code does not give every batch the same bits.
    for _ in range(2):
        assert [c.token_ids for c in llm.generate(prompts, GREEDY)] == [c.token_ids for c in alone]
    assert llm.scheduler.counters.prefix_hit_tokens > 100
