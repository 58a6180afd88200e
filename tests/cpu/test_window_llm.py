"""Sliding windows in the whole engine on tiny models: window blocks are used, evicted, and make room.

`tests/cpu/test_token_engine.py` has what holds of these models as of all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from benchmarks.token_engine import Completion, TokenEngine
from radix_cache.window_blocks import least_window_blocks
from tests.support.cache_invariants import check_invariants
from tests.support.llm_prompts import (
    BASE,
    BLOCK,
    PROMPTS,
    SAMPLINGS,
    assert_same,
    assert_same_cold_and_cached,
    complete_alone,
    small_engine,
    without_window_blocks,
)
from tests.support.tiny_models import build
from tests.support.tiny_transformers import save_tiny

WINDOW = 9


# Every second layer has a window; all layers have one, and the KV blocks hold nothing.
@pytest.fixture(scope="module", params=["gpt_oss", "mistral-window"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    build(request.param, sliding_window=WINDOW).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def alone(model_dir: Path) -> list[Completion]:
    with without_window_blocks():
        return complete_alone(model_dir)


def test_torch_computes_the_same_bits_with_and_without_window_blocks(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.attention.native_kernels", lambda: None)
    prompts, samplings = PROMPTS[:4], SAMPLINGS[:4]
    llm = TokenEngine(model_dir, BASE)
    assert llm.caches[0].windows.num_blocks
    with without_window_blocks():
        alone = complete_alone(model_dir, prompts, samplings)
    assert_same(llm.generate(prompts, samplings), alone)


def test_evicted_window_blocks_end_a_hit_earlier_and_change_no_bit(model_dir: Path, alone: list[Completion]) -> None:
    llm, random = TokenEngine(model_dir, BASE), Random(7)
    windows = llm.caches[0].windows
    assert windows.num_blocks
    llm.generate(PROMPTS, SAMPLINGS)
    found = []
    for share in (0.2, 0.5, 1.0):
        windows.evict(int(share * windows.num_cached), "")
        for index in random.sample(range(len(PROMPTS)), len(PROMPTS)):
            found += llm.generate([PROMPTS[index]], SAMPLINGS[index])
            assert_same(found[-1:], [alone[index]])
    assert len({completion.num_cached_tokens for completion in found}) > 3
    check_invariants(llm.caches[0])


def test_a_context_that_all_kv_together_does_not_hold_fits_with_window_blocks(
    model_dir: Path, alone: list[Completion]
) -> None:
    llm = small_engine(model_dir, 20, max_num_seqs=1, max_num_batched_tokens=8)
    cache = llm.caches[0]
    assert cache.windows.num_blocks
    assert 20 * BLOCK < 92
    assert least_window_blocks(WINDOW, BLOCK) <= cache.windows.num_blocks < cache.num_blocks
    assert_same(llm.generate(PROMPTS, SAMPLINGS), alone)


def test_layers_that_keep_a_window_in_transformers_code_have_window_blocks(tmp_path: Path) -> None:
    save_tiny("afmoe", tmp_path)
    llm = TokenEngine(tmp_path, replace(BASE, max_num_seqs=4, max_num_batched_tokens=16))
    assert llm.caches[0].windows.num_blocks
    with without_window_blocks():
        alone = complete_alone(tmp_path)
    assert_same_cold_and_cached(llm, alone)
    assert llm.scheduler.counters.prefix_hit_tokens > 100
