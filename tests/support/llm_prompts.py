"""Prompts for the whole engine on tiny models, and the answers to compare with: each prompt computed by itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from benchmarks.token_engine import Completion, TokenEngine
from experts.memory.file import round_to_page
from moeserve.config import ServeConfig
from moeserve.engine.memory_plan import read_any_spec, rounding_of
from moeserve.model.checkpoint import read_index
from moeserve.model.expert_store import layouts_in_store
from moeserve.model.kv_pool import kv_block_bytes
from moeserve.plan import FinishReason, SamplingParams
from tests.support.expert_files import wait_until_written

BLOCK = 4
BASE = ServeConfig(kv_cache_memory=2**21, block_size=BLOCK, max_model_len=160)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=2)
RANDOM = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.95, seed=5, presence_penalty=0.3, logprobs=2)

in_any_batch = pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 5}, id="tiny chunks"),
        pytest.param({"max_num_batched_tokens": 64}, id="middle chunks", marks=pytest.mark.long),
        pytest.param({"max_num_batched_tokens": 256}, id="one batch"),
    ],
)


def _prompts_with_a_common_beginning() -> list[list[int]]:
    """Return ten prompts; the first five are the other five behind the same 37 tokens."""
    rng = random.Random(3)
    shared = [rng.randrange(1, 128) for _ in range(37)]
    tails = [[rng.randrange(1, 128) for _ in range(count)] for count in (1, 5, 9, 23, 40)]
    return [shared + tail for tail in tails] + tails


PROMPTS = _prompts_with_a_common_beginning()
SAMPLINGS = [(GREEDY, RANDOM)[index % 2] for index in range(len(PROMPTS))]


def complete_alone(
    model_dir: Path,
    prompts: Sequence[list[int]] = PROMPTS,
    samplings: Sequence[SamplingParams] = SAMPLINGS,
    *,
    config: ServeConfig = BASE,
) -> list[Completion]:
    """Compute every prompt by itself in one chunk, without a cache."""
    llm = TokenEngine(model_dir, replace(config, enable_prefix_caching=False))
    return [llm.generate([prompt], sampling)[0] for prompt, sampling in zip(prompts, samplings, strict=True)]


def complete_at_every_border(model_dir: Path, config: ServeConfig = BASE) -> tuple[list[Completion], list[Completion]]:
    """Complete prompts that are cached up to each of some block borders, and the same without a cache."""
    llm = TokenEngine(model_dir, config)
    uncached = TokenEngine(model_dir, replace(config, enable_prefix_caching=False))
    hits, alone = [], []
    for number, border in enumerate(range(BLOCK, 24, BLOCK)):
        prompt = [number + 1, *PROMPTS[3][:24]]
        # Its last token is never served from the cache, so its last snapshot is at the border.
        (first,) = llm.generate([prompt[: border + 1]], replace(GREEDY, max_tokens=1))
        hits += llm.generate([prompt], GREEDY)
        assert (first.num_cached_tokens, hits[-1].num_cached_tokens) == (0, border)
        alone += uncached.generate([prompt], GREEDY)
    llm.scheduler.check_idle()
    return hits, alone


def without_window_blocks() -> AbstractContextManager[object]:
    """All layers keep all KV meanwhile."""
    return patch("moeserve.engine.memory_plan.window_demand", lambda *_: None)


def small_engine(model_dir: Path, num_blocks: int, *, config: ServeConfig = BASE, **changes: object) -> TokenEngine:
    """Return an engine with memory for a number of blocks, in which all layers keep all KV."""
    memory = num_blocks * kv_block_bytes(read_any_spec(model_dir, config)[0].kv_layers, BLOCK, torch.float32)
    return TokenEngine(model_dir, replace(config, max_model_len=92, kv_cache_memory=memory, **changes))  # type: ignore[arg-type]


def assert_same(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The tokens are the same, and the bits of their log probabilities."""
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert [c.logprobs for c in found] == [c.logprobs for c in expected]


def assert_same_cold_and_cached(llm: TokenEngine, expected: Sequence[Completion]) -> None:
    """All prompts together have the answers of each by itself, when they are new and when they are known."""
    for _ in range(2):
        assert_same(llm.generate(PROMPTS, SAMPLINGS), expected)
    llm.scheduler.check_idle()


def assert_same_alone_together_and_with_few_experts(
    folder: Path, config: ServeConfig, tokens: list[int], stores: Sequence[Path | None]
) -> None:
    """Compare the answers to parts of `tokens`: each by itself, all at once, and with few experts in memory.

    stores: folders for expert files, each for a service of its own; None for a service that reads the checkpoint alone.
    """
    sampling = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    prompts = [tokens, tokens[:7], tokens[3:]]
    expected = [TokenEngine(folder, config).generate([prompt], sampling)[0] for prompt in prompts]
    assert_same(TokenEngine(folder, replace(config, max_num_batched_tokens=8)).generate(prompts, sampling), expected)
    spec, dtype = read_any_spec(folder, config)
    assert spec.moe is not None
    layouts = layouts_in_store(folder, spec, dtype, rounding_of(config, spec, read_index(folder)))
    size = (spec.moe.gate.top_k + 1) * len(spec.moe_layers) * round_to_page(layouts.num_bytes)
    for store in stores:
        few = TokenEngine(folder, replace(config, expert_memory=size, expert_store_dir=str(store) if store else None))
        for _ in range(2):
            # The first time out of the checkpoint; meanwhile the expert file is written, if there is to be one.
            assert_same(few.generate(prompts, sampling), expected)
            wait_until_written()
        assert few.experts is not None
        assert few.experts.stats().counters.num_misses > 0
        few.close()


def assert_transformers_generates(model_dir: Path, prompts: Sequence[list[int]], found: Sequence[Completion]) -> None:
    """The greedy tokens of each prompt equal the tokens of transformers' own loop."""
    import transformers

    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    for prompt, completion in zip(prompts, found, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert completion.finish_reason is FinishReason.LENGTH
