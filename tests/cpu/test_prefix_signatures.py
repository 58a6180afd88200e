"""A cached prefix tells which experts it used, and they are loaded ahead of the requests that find it."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import moeserve.engine.assemble
from benchmarks.token_engine import TokenEngine
from experts.memory.file import round_to_page
from experts.prediction.lookahead import GateLookahead
from experts.prediction.prefetcher import PrefixWarmer
from experts.prediction.prefix_warmth import PrefixWarmth
from moeserve.config import ServeConfig
from moeserve.engine.memory_plan import read_spec
from moeserve.model.expert_store import layouts_in_store
from moeserve.plan import SamplingParams
from radix_cache import PrefixCache
from tests.support.tiny_models import save

BASE = ServeConfig(kv_cache_memory=2**20, block_size=4, max_model_len=160, max_num_batched_tokens=64)
GREEDY = SamplingParams(max_tokens=6, temperature=0.0, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("qwen3_moe")
    save("qwen3_moe", directory)
    return directory


def bounded(directory: Path, store: Path, **changes: object) -> ServeConfig:
    """Half of the experts fit."""
    spec, dtype = read_spec(directory, BASE)
    assert spec.moe is not None
    slots = len(spec.moe_layers) * max(spec.moe.num_experts // 2, spec.moe.gate.top_k)
    size = slots * round_to_page(layouts_in_store(directory, spec, dtype).num_bytes)
    return replace(BASE, expert_memory=size, expert_store_dir=str(store), **changes)  # type: ignore[arg-type]


def prompt(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1, 128) for _ in range(count)]


def test_a_prefix_hit_asks_for_the_experts_of_the_prefix_and_changes_no_bit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remembered = []
    remember = PrefixWarmth.remember
    monkeypatch.setattr(
        PrefixWarmth,
        "remember",
        lambda warmth, request, rates: (remembered.append(rates), remember(warmth, request, rates)),
    )
    prefix = prompt(1, 40)
    prompts = [prefix + prompt(2, 9), prompt(3, 50), prefix + prompt(4, 1), prefix + prompt(5, 20)]
    llm = TokenEngine(model, bounded(model, tmp_path, expert_prefetch="gate"))
    found = [llm.generate([one], GREEDY)[0] for one in prompts]
    assert llm.experts is not None
    counters = llm.experts.stats().counters
    llm.close()
    assert [completion.num_cached_tokens for completion in found] == [0, 0, 40, 40]
    assert len(remembered) == 2
    assert all(rates.sum(axis=1)[:-1] == pytest.approx(llm.spec.moe.gate.top_k, rel=0.1) for rates in remembered)
    assert counters.prefetch_bytes > 0
    whole = TokenEngine(model, BASE)
    for one, expected in zip(prompts, found, strict=True):
        assert whole.generate([one], GREEDY)[0].token_ids == expected.token_ids


def test_a_second_request_finds_the_experts_of_its_prefix_loaded(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GateLookahead, "arrived", lambda *_: None)  # so that only signatures load ahead
    llm = TokenEngine(model, bounded(model, tmp_path, expert_prefetch="gate"))
    memory = llm.experts
    assert memory is not None
    begin = PrefixWarmer.begin

    def begin_when_loaded(warmer: PrefixWarmer, plan: Any) -> None:
        begin(warmer, plan)
        with memory._changed:
            memory._changed.wait_for(lambda: not len(memory._control._queue), timeout=5)

    monkeypatch.setattr(PrefixWarmer, "begin", begin_when_loaded)
    prefix = prompt(1, 40)
    for one in (prefix + prompt(2, 9), prompt(3, 50)):
        llm.generate([one], GREEDY)
    before = memory.stats().counters
    assert before.prefetch_bytes == 0
    assert before.num_evictions > 0
    (completion,) = llm.generate([prefix + prompt(4, 1)], GREEDY)
    after = memory.stats().counters
    llm.close()
    assert completion.num_cached_tokens == 40
    assert after.useful_bytes > 0
    assert after.num_misses - before.num_misses < after.num_hits - before.num_hits


@pytest.mark.parametrize("absent", ["memory for all", "no prefetch", "no prefix cache"])
def test_where_nothing_is_loaded_ahead_nothing_is_described_kept_or_carried(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("built")

    monkeypatch.setattr(moeserve.engine.assemble, "RoutingTap", refuse)
    monkeypatch.setattr(moeserve.engine.assemble, "PrefixSigner", refuse)
    monkeypatch.setattr(PrefixCache, "annotate", refuse)
    monkeypatch.setattr(PrefixCache, "annotations", refuse)
    config = {
        "memory for all": BASE,
        "no prefetch": bounded(model, tmp_path, expert_prefetch="off"),
        "no prefix cache": bounded(model, tmp_path, expert_prefetch="gate", enable_prefix_caching=False),
    }[absent]
    llm = TokenEngine(model, config)
    for _ in range(2):
        llm.generate([prompt(1, 20)], GREEDY)
    llm.close()
