"""A fault in the sampling of one request in a real model's step: the others get the tokens that they get without it."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest

from moeserve.config import ServeConfig
from moeserve.engine.assemble import load_rank
from moeserve.engine.containment import ContainingExecutor
from moeserve.engine.memory_plan import plan_model
from moeserve.engine.planner import build_caches, build_scheduler
from moeserve.engine.rank import Rank
from moeserve.model import sampler
from moeserve.plan import Chunk, FinishReason, Request, SamplingParams
from moeserve.scheduling.steps import Steps
from tests.support.tiny_checkpoint import write_tiny_checkpoint

CONFIG = ServeConfig(kv_cache_memory=2**20, block_size=4, max_model_len=160, max_num_batched_tokens=64)
POISON = 13


def run(rank: Rank) -> tuple[dict[str, list[int]], list[str]]:
    """Return the tokens of six requests that share a beginning, and the requests that failed. One wishes POISON."""
    scheduler = build_scheduler(CONFIG, rank.model.kv, build_caches(CONFIG, rank.model.kv))
    steps = Steps(scheduler, ContainingExecutor(rank.runner, CONFIG.block_size, lambda _: None), rank.depth)
    for number in range(6):
        sampling = SamplingParams(max_tokens=12, temperature=1.1, seed=number, top_k=POISON if number == 3 else 20)
        scheduler.add(Request(str(number), array("i", [*range(30), number]), sampling))
    tokens: dict[str, list[int]] = {}
    failed = []
    while (outputs := steps.advance()) is not None:
        for output in outputs:
            if output.token_id is not None:
                tokens.setdefault(output.request.request_id, []).append(output.token_id)
            if output.finish_reason is FinishReason.ERROR:
                failed.append(output.request.request_id)
    scheduler.check_idle()
    return tokens, failed


def test_a_fault_in_the_sampler_ends_its_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tiny_checkpoint(tmp_path)
    rank = load_rank(directory, plan_model(directory, CONFIG), CONFIG, lambda _: None).start()
    undisturbed, failed = run(rank)
    assert not failed
    draw_of = sampler._draw_of

    def faulty(chunk: Chunk) -> Any:
        assert chunk.sampling is not None
        # The second token.
        if chunk.sampling.top_k == POISON and chunk.start + len(chunk.token_ids) > 31:
            raise ValueError("no such top_k")
        return draw_of(chunk)

    monkeypatch.setattr(sampler, "_draw_of", faulty)
    disturbed, failed = run(rank)
    assert failed == ["3"]
    assert disturbed == {**undisturbed, "3": undisturbed["3"][:1]}
    rank.close()
