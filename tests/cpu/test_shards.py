"""Shards of every layer over ranks: logits as of one rank, and one set of bits whatever chunks, batch and cache do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.token_engine import Completion, TokenEngine
from tests.support.llm_prompts import BASE, PROMPTS, SAMPLINGS, assert_same
from tests.support.sharded_engine import ShardedEngine
from tests.support.tiny_models import CASES, save

TWO = replace(BASE, tensor_parallel_size=2)


def assert_close(found: Sequence[Completion], expected: Sequence[Completion]) -> None:
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case != "mixtral-mha-odd"])  # Of three heads.
def test_every_family_has_the_logits_of_one_rank_and_its_own_bits_in_any_batch(case: str, tmp_path: Path) -> None:
    save(case, tmp_path)
    one = TokenEngine(tmp_path, replace(BASE, enable_prefix_caching=False))
    sharded = ShardedEngine(tmp_path, replace(TWO, enable_prefix_caching=False))
    pairs = list(zip(PROMPTS[:6], SAMPLINGS[:6], strict=True))
    expected = [one.generate([prompt], sampling)[0] for prompt, sampling in pairs]
    alone = [sharded.generate([prompt], sampling)[0] for prompt, sampling in pairs]
    assert_close(alone, expected)
    many = ShardedEngine(tmp_path, replace(TWO, max_num_batched_tokens=24, max_num_seqs=5))
    for _ in range(2):
        assert_same(many.generate(PROMPTS[:6], SAMPLINGS[:6]), alone)
    many.scheduler.check_idle()
    assert many.scheduler.counters.prefix_hit_tokens > 0
    for engine in (sharded, many):
        engine.close()
