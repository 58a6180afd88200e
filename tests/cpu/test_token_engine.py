"""The whole engine on tiny models: tokens equal transformers', and nothing but the prompt decides them.

Whatever chunks, batch, cache, window blocks, snapshots and preemption do, the tokens of a request and the bits of their
log probabilities equal the request's alone, computed by an engine in which all layers keep all KV.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks.token_engine import Completion, TokenEngine
from moeserve.device import KvBudget
from moeserve.engine.rank import ServedModel
from moeserve.model.families import build_spec, load_config
from moeserve.model.generation import GenerationDefaults
from moeserve.scheduling.request_states import StatePolicy
from tests.support.llm_prompts import (
    BASE,
    GREEDY,
    PROMPTS,
    SAMPLINGS,
    assert_same,
    assert_same_cold_and_cached,
    assert_transformers_generates,
    complete_alone,
    complete_at_every_border,
    in_any_batch,
    small_engine,
    without_window_blocks,
)
from tests.support.tiny_models import build, save

# All layers alike; some with a window, all with a window; recurrent layers.
MODELS = ["mixtral", "deepseek_v3-yarn", "gpt_oss", "mistral-window", "qwen3_next"]
MORE_MODELS = ["phimoe-longrope", "qwen3_5_moe"]
# Two blocks and a token.
WINDOWS = {"gpt_oss": {"sliding_window": 9}, "mistral-window": {"sliding_window": 9}}


@pytest.fixture(scope="module", params=[*MODELS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE_MODELS)])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    build(request.param, **WINDOWS.get(request.param, {})).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[Completion]:
    with without_window_blocks():
        return complete_alone(model_dir)


def test_greedy_tokens_equal_those_of_transformers(model_dir: Path) -> None:
    assert_transformers_generates(model_dir, PROMPTS, TokenEngine(model_dir, BASE).generate(PROMPTS, GREEDY))


@in_any_batch
def test_any_batch_and_chunking_cold_and_cached_gives_the_same_bits(
    model_dir: Path, alone: list[Completion], changes: dict[str, object]
) -> None:
    llm = TokenEngine(model_dir, replace(BASE, **changes))  # type: ignore[arg-type]
    assert_same_cold_and_cached(llm, alone)
    assert llm.scheduler.counters.prefix_hit_tokens > 100


def test_a_batch_without_a_cache_gives_the_same_bits(model_dir: Path, alone: list[Completion]) -> None:
    llm = TokenEngine(model_dir, replace(BASE, enable_prefix_caching=False, max_num_batched_tokens=100))
    assert_same_cold_and_cached(llm, alone)
    assert llm.scheduler.counters.prefix_hit_tokens == 0


def test_a_hit_at_every_block_border_gives_the_same_bits(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As the policy stands, a snapshot is saved only where it spares many tokens.
    monkeypatch.setattr("moeserve.engine.planner.StatePolicy", partial(StatePolicy, min_gain=1))
    hits, alone = complete_at_every_border(model_dir)
    assert_same(hits, alone)


def test_preempted_requests_end_with_the_same_bits(model_dir: Path, alone: list[Completion]) -> None:
    layers = build_spec(load_config(model_dir)).kv_layers
    llm = small_engine(model_dir, 24, max_num_seqs=8, max_num_batched_tokens=16)
    assert_same(llm.generate(PROMPTS, SAMPLINGS), alone)
    # Where all layers have a window, whoever is admitted has the blocks to go on.
    assert (llm.scheduler.counters.preemptions > 0) == any(layer.window is None for layer in layers)
    llm.scheduler.check_idle()


def test_end_tokens_beyond_the_vocabulary_are_left_out(tmp_path: Path) -> None:
    save("olmoe", tmp_path)
    spec = replace(build_spec(load_config(tmp_path)), eos_token_ids=(3, 50279))
    assert spec.vocab_size == 128

    def served(defaults: GenerationDefaults) -> ServedModel:
        return ServedModel(spec, defaults, KvBudget(1, 16), torch.float32, 0, 0, "cpu")

    assert served(GenerationDefaults()).eos_token_ids == [3]
    assert served(GenerationDefaults(eos_token_ids=(128, 127))).eos_token_ids == [127]
