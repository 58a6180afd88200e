"""Layers over ranks: every family has the bits of a single rank, whatever chunks, batch, cache and preemption do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.token_engine import Completion, TokenEngine
from tests.support.llm_prompts import BASE, PROMPTS, SAMPLINGS, assert_same, assert_same_cold_and_cached
from tests.support.staged_engine import StagedEngine
from tests.support.tiny_models import CASES, save

TWO = replace(BASE, pipeline_parallel_size=2)
# Stages with attention alone and with recurrent layers alone; a layer each.
SPLITS = {"qwen3_next-recurrent-end": "1,3", "gpt_oss": "1,1,1", "llama": "1,1,1"}


def split(case: str) -> dict[str, object]:
    layers = SPLITS.get(case)
    return {} if layers is None else {"layers_per_rank": layers, "pipeline_parallel_size": layers.count(",") + 1}


@pytest.mark.parametrize("case", CASES)
def test_every_family_has_the_bits_of_one_rank(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    one = TokenEngine(tmp_path, replace(BASE, max_num_batched_tokens=64))
    expected = one.generate(PROMPTS[:6], SAMPLINGS[:6])
    staged = StagedEngine(tmp_path, replace(TWO, max_num_batched_tokens=48, max_num_seqs=5, **split(case)))  # type: ignore[arg-type]
    for _ in range(2):
        assert_same(staged.generate(PROMPTS[:6], SAMPLINGS[:6]), expected)
    staged.scheduler.check_idle()
    assert staged.scheduler.counters.prefix_hit_tokens > 0


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("m")
    save("qwen3_moe", directory)
    return directory


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[Completion]:
    llm = TokenEngine(model_dir, replace(BASE, enable_prefix_caching=False))
    return [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(PROMPTS, SAMPLINGS, strict=True)]


def test_tiny_chunks_cold_and_cached_have_the_bits_of_one_rank(model_dir: Path, alone: list[Completion]) -> None:
    staged = StagedEngine(model_dir, replace(TWO, max_num_seqs=3, max_num_batched_tokens=5))
    assert_same_cold_and_cached(staged, alone)
